"""Inputs for the tests of the sparse backward: what a trained policy gives, and what would fool a certificate."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.linear_ce_cases import IGNORE

KINDS = ("policy", "random", "peaked", "flat rows", "ties", "one row", "one word", "ignored", "last tile")


@dataclass(frozen=True)
class Sparse:
    """One problem. kind: one of KINDS."""

    kind: str
    num_rows: int = 40
    vocab: int = 1300
    depth: int = 64
    dtype: torch.dtype = torch.float32
    has_bias: bool = False

    def __str__(self) -> str:
        return f"{self.kind}-{str(self.dtype).removeprefix('torch.')}" + "-bias" * self.has_bias

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """hidden, weight, target, bias and the upstream gradient of the log-prob."""
        generator = torch.Generator().manual_seed(11)
        weight = torch.randn(self.vocab, self.depth, generator=generator)
        weight /= weight.norm(dim=1, keepdim=True)
        hidden, target = self._policy(weight, generator)
        upstream = torch.randn(self.num_rows, generator=generator)
        upstream[::4] = 0
        noise = torch.randn(self.num_rows, self.depth, generator=generator)
        if self.kind == "random":
            hidden = 2 * noise
        elif self.kind == "peaked":
            # The tail, flat over all words, has about as much as the target.
            hidden = noise + 7 * weight[target]
        elif self.kind == "flat rows":
            # What is upstream lies on the rows that have no large word.
            hidden[::5], upstream = noise[::5], 1e-3 * upstream
            upstream[::5] = 3.0
        elif self.kind == "ties":
            weight[:] = weight[0]
        elif self.kind == "one row":
            upstream[:] = 0
            upstream[7] = -2.0
        elif self.kind == "one word":
            hidden = 12 * weight[3].repeat(self.num_rows, 1) + 0.1 * noise
            target[:] = 3
        elif self.kind == "ignored":
            target[::2] = IGNORE
            hidden[::2] = torch.nan
        elif self.kind == "last tile":
            target[:] = self.vocab - 1
        bias = 0.5 * torch.randn(self.vocab, generator=generator) if self.has_bias else None
        moved = [t if t is None else t.to(device, self.dtype) for t in (hidden, weight, bias)]
        return moved[0], moved[1], target.to(device), moved[2], upstream.to(device)

    def _policy(self, weight: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows with four words that hold nearly everything, ids by Zipf, and a target of theirs."""
        zipf = 1.0 / torch.arange(1, self.vocab + 1)
        words = torch.multinomial(zipf, self.num_rows * 4, replacement=True, generator=generator).view(-1, 4)
        gaps = torch.rand(self.num_rows, 4, generator=generator).mul_(2).cumsum(1)
        heights = 26.0 - gaps
        hidden = (heights[:, :, None] * weight[words]).sum(1)
        pick = torch.randint(0, 4, (self.num_rows, 1), generator=generator)
        return hidden, words.gather(1, pick)[:, 0]
