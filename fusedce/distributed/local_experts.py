"""One rank's experts on received rows: the ops, forward and backward."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fusedce.options import ExpertOptions, MoEPlan


@dataclass(frozen=True)
class LocalWeights:
    """The weights (E/R, 2F, D) and (E/R, D, F) and biases (E/R, 2F) and (E/R, D) of a rank's experts, and how they
    work. settings.combine: rows come back as the sums of what a rank's experts make of them.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    settings: ExpertOptions
    backend: str

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.gate_up_proj, self.down_proj, self.gate_up_bias, self.down_bias

    def forward(self, rows: Tensor, top_k_weights: Tensor, plan: MoEPlan) -> tuple[Tensor, Tensor]:
        """(A, D) of rows (A, D) with their slots' weights (A, S); and the pre-activation (V, 2F), or (0, 2F)."""
        settings = self.settings
        return torch.ops.fusedce.moe_experts(
            rows, self.gate_up_proj, self.down_proj, top_k_weights, plan.offsets, plan.row_slot, plan.slot_row,
            self.gate_up_bias, self.down_bias, activation=settings.activation, limit=settings.limit,
            interleaved=settings.interleaved, save=settings.save, combine=settings.combine, backend=self.backend,
        )  # fmt: skip

    def backward(
        self, d_results: Tensor, rows: Tensor, top_k_weights: Tensor, plan: MoEPlan, pre_act: Tensor, mask: list[bool]
    ) -> list[Tensor]:
        """The gradients of rows, gate_up_proj, down_proj, top_k_weights and the biases, those that `mask` wants."""
        settings = self.settings
        return torch.ops.fusedce.moe_experts_backward(
            d_results, rows, self.gate_up_proj, self.down_proj, top_k_weights, plan.offsets, plan.row_slot,
            plan.slot_row, self.gate_up_bias, self.down_bias, pre_act, settings.activation, settings.limit,
            settings.interleaved, settings.save, settings.combine, mask, self.backend,
        )  # fmt: skip
