"""The experts: the order of the grouped GEMMs, forward and backward. Each lives in its own file."""

from torch import Tensor

from fusedce.options import ExpertOptions
from fusedce.triton.moe.act_backward import act_backward
from fusedce.triton.moe.combine import moe_combine
from fusedce.triton.moe.gate_up import gate_up
from fusedce.triton.moe.pad import pad_rows
from fusedce.triton.moe.rows import expert_rows
from fusedce.triton.moe.run import Run
from fusedce.triton.moe.slot_grad import slot_grad
from fusedce.triton.moe.tile_table import row_tiles
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
    options = ExpertOptions()
    run = Run.of(hidden, row_slot.shape[0], down_proj.shape[0])
    tiles = row_tiles(offsets.contiguous(), row_slot.contiguous(), slot_row.shape[1], run.block_r)
    act, pre_act = gate_up(pad_rows(hidden, tiles, gather=True), gate_up_proj, None, tiles, run, options)
    return expert_rows(act, down_proj, tiles, run, top_k_weights=top_k_weights.contiguous()), pre_act


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
    options = ExpertOptions()
    want_hidden, want_gate_up, want_down, want_weights = mask
    run = Run.of(hidden, row_slot.shape[0], down_proj.shape[0])
    slot_row = slot_row.contiguous()
    tiles = row_tiles(offsets.contiguous(), row_slot.contiguous(), slot_row.shape[1], run.block_r)
    wanted = (want_hidden or want_gate_up, want_down, want_weights)
    d_out = pad_rows(d_rows, tiles, gather=False)
    d_pre_act, weighted_act, partial = act_backward(
        d_out, down_proj, pre_act.contiguous(), top_k_weights.contiguous(), tiles, run, options, wanted
    )
    d_hidden, d_gate_up, d_down = (hidden.new_empty(0) for _ in range(3))
    d_weights = top_k_weights.new_empty(0)
    if want_down:
        d_down = weight_grad(d_out, weighted_act, tiles, run, down_proj.new_empty(down_proj.shape))
    del d_out, weighted_act
    if want_hidden:
        d_hidden = moe_combine(expert_rows(d_pre_act, gate_up_proj.mT, tiles, run), row_slot, slot_row)
    if want_gate_up:
        rows = pad_rows(hidden, tiles, gather=True)
        d_gate_up = weight_grad(d_pre_act, rows, tiles, run, gate_up_proj.new_empty(gate_up_proj.shape))
    if want_weights:
        d_weights = slot_grad(partial, slot_row, top_k_weights.dtype)
    return d_hidden, d_gate_up, d_down, d_weights
