"""Tasks whose answers can be checked: write a string backwards, sort it. Prompts, held-out prompts, rewards."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ALPHABETS = {"digits": "0123456789", "letters": "abcdefghijklmnopqrstuvwxyz"}
SOLUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "reverse": lambda strings: strings.flip(1),
    "sort": lambda strings: strings.sort(1).values,
}
HELD_OUT_OF = 10  # one string in ten is never trained on

_MIX = 0x2545F4914F6CDD1D  # an odd 64-bit multiplier (xorshift64*); products wrap


@dataclass(frozen=True)
class Task:
    """A prompt is [begin, symbols…, answer]; the answer has as many symbols. Token ids: symbols, then the two marks."""

    name: str
    alphabet: str
    length: int

    @property
    def num_symbols(self) -> int:
        return len(ALPHABETS[self.alphabet])

    @property
    def num_tokens(self) -> int:
        """Token ids in use."""
        return self.num_symbols + 2

    def training(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """`count` prompts (count, length + 2) and their answers (count, length), int64, none of them held out."""
        kept = torch.empty(0, self.length, dtype=torch.int64)
        while len(kept) < count:
            drawn = self._draw(2 * count, generator)
            kept = torch.cat((kept, drawn[~is_held_out(drawn)]))
        return self._pose(kept[:count])

    def held_out(self, count: int) -> tuple[Tensor, Tensor]:
        """At most `count` different prompts that training never draws, and their answers; always the same ones."""
        generator = torch.Generator().manual_seed(0)
        drawn = self._draw(4 * HELD_OUT_OF * count, generator)
        strings = drawn[is_held_out(drawn)].unique(dim=0)
        return self._pose(strings[torch.randperm(len(strings), generator=generator)[:count]])

    def show(self, prompt: Tensor, answer: Tensor) -> str:
        """ "3141 -> 1413", for people; "?" for a token of a larger vocabulary."""
        letters = dict(enumerate(ALPHABETS[self.alphabet] + "<="))
        return " -> ".join("".join(letters.get(i, "?") for i in ids.tolist()) for ids in (prompt[1:-1], answer))

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(self.num_symbols, (count, self.length), generator=generator)

    def _pose(self, strings: Tensor) -> tuple[Tensor, Tensor]:
        begin, answer = (strings.new_full((len(strings), 1), self.num_symbols + mark) for mark in (0, 1))
        return torch.cat((begin, strings, answer), 1), SOLUTIONS[self.name](strings)


def is_held_out(strings: Tensor) -> Tensor:
    """(B,L) int64 -> (B,) bool, by a hash of the string alone: no list to keep, the same on every machine."""
    mixed = torch.zeros(len(strings), dtype=torch.int64)
    for symbols in strings.unbind(1):
        mixed = (mixed + symbols + 1) * _MIX
        mixed = mixed ^ (mixed >> 29)
    return (mixed >> 33) % HELD_OUT_OF == 0


def exact(answers: Tensor, truth: Tensor) -> Tensor:
    """(B,) fp32: 1 where the whole answer is right."""
    return (answers == truth).all(1).float()


def rewards(answers: Tensor, truth: Tensor) -> Tensor:
    """(B,) fp32 in [0, 1]: half for the share of right symbols, half for the whole answer."""
    return 0.5 * (answers == truth).float().mean(1) + 0.5 * exact(answers, truth)
