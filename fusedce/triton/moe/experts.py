"""The experts: the order of the grouped GEMMs, forward and backward. Each lives in its own file."""

from torch import Tensor

from fusedce.triton.common import unit_rows
from fusedce.triton.moe.act_backward import act_backward
from fusedce.triton.moe.combine import moe_combine
from fusedce.triton.moe.gate_up import gate_up
from fusedce.triton.moe.rows import expert_rows
from fusedce.triton.moe.slot_grad import slot_grad
from fusedce.triton.moe.weight_grad import weight_grad


def moe_experts(
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    slot_row: Tensor,
) -> tuple[Tensor, Tensor]:
    """rows (R,D), times their routing weights, and pre_act (R,2F). See `fusedce.eager.moe` for the formula."""
    offsets, row_slot = offsets.contiguous(), row_slot.contiguous()
    pre_act, act = gate_up(hidden, gate_up_proj, offsets, row_slot, slot_row.shape[1])
    return expert_rows(act, down_proj, offsets, row_slot, top_k_weights.contiguous()), pre_act


def moe_experts_backward(
    d_rows: Tensor,
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    slot_row: Tensor,
    pre_act: Tensor,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d_hidden, d_gate_up_proj, d_down_proj, d_top_k_weights. See `fusedce.eager.moe` for the formula."""
    want_hidden, want_gate_up, want_down, want_weights = mask
    offsets, row_slot, slot_row = offsets.contiguous(), row_slot.contiguous(), slot_row.contiguous()
    d_rows, hidden, top_k = unit_rows(d_rows), unit_rows(hidden), slot_row.shape[1]
    wanted = (want_hidden or want_gate_up, want_down, want_weights)
    d_pre_act, weighted_act, partial = act_backward(
        d_rows, down_proj, pre_act.contiguous(), top_k_weights.contiguous(), offsets, row_slot, wanted
    )
    d_hidden, d_gate_up, d_down = (hidden.new_empty(0) for _ in range(3))
    d_weights = top_k_weights.new_empty(0)
    if want_hidden:
        d_hidden = moe_combine(expert_rows(d_pre_act, gate_up_proj.mT, offsets, row_slot), row_slot, slot_row)
    if want_gate_up:
        d_gate_up = weight_grad(d_pre_act, hidden, offsets, row_slot, top_k, gather=True)
    if want_down:
        d_down = weight_grad(d_rows, weighted_act, offsets, row_slot, top_k, gather=False)
    if want_weights:
        d_weights = slot_grad(partial, slot_row, top_k_weights.dtype)
    return d_hidden, d_gate_up, d_down, d_weights
