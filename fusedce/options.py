"""Frozen dataclasses that users pass and get."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

__all__ = ["ExpertOptions", "LogitOptions", "MoEPlan", "Upstream", "UpstreamOf"]


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


# (start, stop, logprob, entropy, lse) of a range of rows -> their upstream gradients. The entropy has no elements where
# it was not asked for.
UpstreamOf = Callable[[int, int, Tensor, Tensor, Tensor], Upstream]


@dataclass(frozen=True)
class ExpertOptions:
    """What an expert does between its two projections, and what is kept for the backward.

    activation: one of `fusedce.moe_experts`; limit: of its clamp ("gpt_oss"). interleaved: whether rows 2j and 2j + 1
    of an expert's gate_up_proj are gate j and up j, not rows j and F + j. save: "pre_activation", or "plan" for
    nothing but the inputs and the plan.
    """

    activation: str = "swiglu"
    limit: float = 7.0
    interleaved: bool = False
    save: str = "pre_activation"

    @property
    def keeps_pre_act(self) -> bool:
        return self.save == "pre_activation"


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
