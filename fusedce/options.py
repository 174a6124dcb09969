"""Frozen dataclasses that users pass and get."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "ExpertOptions",
    "LogitOptions",
    "MoEChunks",
    "MoEPlan",
    "RouterBalance",
    "RouterOptions",
    "Upstream",
    "UpstreamOf",
    "Wanted",
]


@dataclass(frozen=True)
class LogitOptions:
    """How plain logits become those of the softmax, z = cap(x) / temperature, and which rows take part.

    ignore_index: the target of rows that do not. temperature: above 0; row_temperature: (N,) takes its place where each
    row has its own. softcap: cap(x) = softcap · tanh(x / softcap); 0 for none.
    """

    ignore_index: int = -100
    temperature: float = 1.0
    softcap: float = 0.0
    row_temperature: Tensor | None = None

    def of_rows(self, start: int, stop: int) -> "LogitOptions":
        """The same for a range of rows."""
        return self if self.row_temperature is None else replace(self, row_temperature=self.row_temperature[start:stop])


class Upstream(NamedTuple):
    """The upstream gradients of the per-token results, each (N,) or None where the loss does not depend on it."""

    d_logprob: Tensor | None
    d_entropy: Tensor | None
    d_lse: Tensor | None


class Wanted(NamedTuple):
    """Which gradients are wanted: it goes where a mask of three bools does. And how d_weight is to come.

    fp32_weight: in fp32, as it is summed, and not in weight's dtype. main_grad: (V,D), fp32 or for fp64 fp64; d_weight
    may be added to it in place, and then comes back with no elements. A backend that does neither is right all the
    same: the op looks at what comes back, and adds it.
    """

    hidden: bool
    weight: bool
    bias: bool
    fp32_weight: bool = False
    main_grad: Tensor | None = None

    @classmethod
    def of(cls, mask: "list[bool] | Wanted") -> "Wanted":
        """`mask`, with the weight's gradient in its own dtype unless it says otherwise."""
        return mask if isinstance(mask, Wanted) else cls(mask[0], mask[1], mask[2])

    def weight_grad(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum as it is to come back."""
        if self.main_grad is not None and total is self.main_grad:
            return total.new_empty(0)
        return total if self.fp32_weight else total.to(dtype)


# (start, stop, logprob, entropy, lse) of a range of rows -> their upstream gradients. The entropy has no elements where
# it was not asked for.
UpstreamOf = Callable[[int, int, Tensor, Tensor, Tensor], Upstream]


ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "gpt_oss")
SAVES = ("pre_activation", "plan")


@dataclass(frozen=True)
class ExpertOptions:
    """What an expert does between its two projections, what is kept for the backward, and what comes out.

    activation, limit, interleaved, save, combine: as in `fusedce.moe_experts`.
    """

    activation: str = "swiglu"
    limit: float = 7.0
    interleaved: bool = False
    save: str = "pre_activation"
    combine: bool = False

    @property
    def keeps_pre_act(self) -> bool:
        """Whether the pre-activation is kept for the backward, which else makes it again."""
        return self.save == "pre_activation"


@dataclass(frozen=True)
class MoEPlan:
    """Where each routed row lives: rows sorted by expert, and by slot n·K + k within an expert. Integers only.

    offsets: (E+1,) int32; expert e owns rows [offsets[e], offsets[e+1]).
    row_slot: (R,) int32; the slot that row r serves, −1 for the rows past offsets[E], which serve none. R = N·K; the
    ops also take a plan cut to offsets[E] rows, where the host knows that number.
    slot_row: (N, K) int32; the row of each slot, −1 for a slot that takes no part (id −1), −2 for one whose expert id
    was out of range.
    """

    offsets: Tensor
    row_slot: Tensor
    slot_row: Tensor

    @property
    def num_experts(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        return self.slot_row.shape[0]

    @property
    def top_k(self) -> int:
        return self.slot_row.shape[1]

    @property
    def counts(self) -> Tensor:
        """(E,) int32: rows of each expert. Their sum is below R by the slots that name no expert."""
        return self.offsets.diff()


@dataclass(frozen=True)
class MoEChunks:
    """The plans of C chunks of ⌈N/C⌉ tokens in turn, the last ones shorter or empty, each in its chunk's own numbers.

    offsets: (C, E+1) int32. row_slot: (R,) int32 and slot_row: (N, K) int32, those of the chunks one after the other.
    """

    offsets: Tensor
    row_slot: Tensor
    slot_row: Tensor

    @property
    def num_chunks(self) -> int:
        return self.offsets.shape[0]

    @property
    def counts(self) -> Tensor:
        """(C, E) int32: rows of each chunk and expert."""
        return self.offsets.diff(dim=1)

    def rank_counts(self, num_ranks: int) -> Tensor:
        """(C, num_ranks) int32: rows of each chunk for each rank, rank r owning experts [r·E/num_ranks, …)."""
        num_experts = self.offsets.shape[1] - 1
        if num_ranks < 1 or num_experts % num_ranks:
            raise ValueError(f"fusedce.MoEChunks: num_ranks is {num_ranks}; expected a divisor of E = {num_experts}")
        return self.offsets[:, :: num_experts // num_ranks].diff(dim=1)

    def tokens(self, chunk: int) -> tuple[int, int]:
        """(start, stop): the chunk's tokens. Known on the host: sizes alone decide it."""
        if not 0 <= chunk < self.num_chunks:
            raise IndexError(f"fusedce.MoEChunks: chunk {chunk} of {self.num_chunks}")
        num_tokens = self.slot_row.shape[0]
        length = -(-num_tokens // self.num_chunks)
        return min(chunk * length, num_tokens), min((chunk + 1) * length, num_tokens)

    def chunk(self, chunk: int) -> MoEPlan:
        """The chunk's plan, as views."""
        start, stop = self.tokens(chunk)
        top_k = self.slot_row.shape[1]
        return MoEPlan(self.offsets[chunk], self.row_slot[start * top_k : stop * top_k], self.slot_row[start:stop])


@dataclass(frozen=True)
class RouterBalance:
    """What the losses on a router are made of, over B sequences: see `fusedce.moe_balance`.

    load: (B, E), the slots of each expert. share: (B, E), the sum of the tokens' normalized scores. square: (B,), the
    sum of lse(logits)². tokens: (B,), how many tokens took part. top_k: K. All but load and tokens are differentiable.
    """

    load: Tensor
    share: Tensor
    square: Tensor
    tokens: Tensor
    top_k: int


@dataclass(frozen=True)
class RouterOptions:
    """How `fusedce.nn.Router` makes its logits and chooses; score to group_best are arguments of `fusedce.moe_route`.

    correction: keep a buffer of that name, (E,) fp32 zeros at first, which is added to the scores for the choice.
    bias: a parameter (E,) on the logits. fp32_logits: make the logits in fp32 whatever the parameters are.
    """

    score: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    correction: bool = False
    bias: bool = False
    fp32_logits: bool = False
