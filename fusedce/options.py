"""Frozen dataclasses that users pass and get."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["LogitOptions", "MoEPlan", "Upstream"]


@dataclass(frozen=True)
class LogitOptions:
    """How plain logits become those of the softmax, z = cap(x) / temperature, and which rows take part.

    ignore_index: the target of rows that do not. temperature: above 0. softcap: cap(x) = softcap · tanh(x / softcap);
    0 for none.
    """

    ignore_index: int = -100
    temperature: float = 1.0
    softcap: float = 0.0


class Upstream(NamedTuple):
    """The upstream gradients of the per-token results, each (N,)."""

    d_logprob: Tensor
    d_entropy: Tensor
    d_lse: Tensor


@dataclass(frozen=True)
class MoEPlan:
    """Where each routed row lives: rows sorted by expert, and by slot n·K + k within an expert. Integers only.

    offsets: (E+1,) int32; expert e owns rows [offsets[e], offsets[e+1]).
    row_slot: (R,) int32, R = N·K; the slot that row r serves, −1 for the rows past offsets[E], which serve none.
    slot_row: (N, K) int32; the row of each slot, −1 for a slot whose expert id was out of range.
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
        """(E,) int32: rows of each expert. Their sum is below R only where ids were out of range."""
        return self.offsets.diff()
