"""The experts: the order of the grouped GEMMs, forward and backward. Each lives in its own file."""

from torch import Tensor

from fusedce.options import ExpertOptions
from fusedce.triton.moe.act_backward import act_backward
from fusedce.triton.moe.bias_grad import bias_grad
from fusedce.triton.moe.combine import moe_combine
from fusedce.triton.moe.gate_up import gate_up
from fusedce.triton.moe.pad import pad_rows
from fusedce.triton.moe.rows import expert_rows
from fusedce.triton.moe.run import Run
from fusedce.triton.moe.slot_grad import slot_grad
from fusedce.triton.moe.tile_table import row_tiles
from fusedce.triton.moe.weight_grad import weight_grad

# Of hidden, gate_up_proj, down_proj, top_k_weights, gate_up_bias and down_bias.
ExpertGradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def moe_experts(
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    slot_row: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    settings: ExpertOptions,
) -> tuple[Tensor, Tensor]:
    """rows (R,D), times their routing weights, or (N,D), and pre_act. See `fusedce.eager.moe` for the formula."""
    run = Run.of(hidden, row_slot.shape[0], down_proj.shape[0])
    tiles = row_tiles(offsets, row_slot, slot_row, run.block_r)
    # Handed over, so that the rows are gone before those of the result are made.
    act, pre_act = gate_up(
        pad_rows(hidden, tiles, by_token=True), gate_up_proj, dense(gate_up_bias), tiles, run, settings,
        settings.keeps_pre_act,
    )  # fmt: skip
    rows = expert_rows(
        act, down_proj, tiles, run, bias=dense(down_bias), top_k_weights=top_k_weights.contiguous(),
        padded=settings.combine,
    )  # fmt: skip
    return moe_combine(rows, row_slot, tiles.slot_padded) if settings.combine else rows, pre_act


def moe_experts_backward(
    d_rows: Tensor,
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    slot_row: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    pre_act: Tensor,
    settings: ExpertOptions,
    mask: list[bool],
) -> ExpertGradients:
    """`moe_experts_backward_into` with no main gradients."""
    plan = (offsets, row_slot, slot_row)
    tensors = (d_rows, hidden, gate_up_proj, down_proj, top_k_weights, *plan, gate_up_bias, down_bias, pre_act)
    return moe_experts_backward_into(*tensors, settings, mask, (None, None))


def moe_experts_backward_into(
    d_rows: Tensor,
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    slot_row: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    pre_act: Tensor,
    settings: ExpertOptions,
    mask: list[bool],
    main_grads: tuple[Tensor | None, Tensor | None],
) -> ExpertGradients:
    """The gradients of hidden, gate_up_proj, down_proj, top_k_weights and the two biases. See `fusedce.eager.moe`."""
    want_hidden, want_gate_up, want_down, want_weights, want_gate_up_bias, want_down_bias = mask
    run = Run.of(hidden, row_slot.shape[0], down_proj.shape[0])
    tiles = row_tiles(offsets, row_slot, slot_row, run.block_r)
    weights = top_k_weights.contiguous()
    d_hidden, d_gate_up, d_down, d_gate_up_bias, d_down_bias = (hidden.new_empty(0) for _ in range(5))
    d_weights = top_k_weights.new_empty(0)
    if settings.keeps_pre_act:
        pre_act = pre_act.contiguous()
    else:
        rows = pad_rows(hidden, tiles, by_token=True)
        _, pre_act = gate_up(rows, gate_up_proj, dense(gate_up_bias), tiles, run, settings, True)
        del rows
    d_out = pad_rows(d_rows, tiles, by_token=settings.combine)
    want_pre = want_hidden or want_gate_up or want_gate_up_bias
    if want_pre or want_weights:
        grad = expert_rows(d_out, down_proj.mT, tiles, run)
    else:
        grad = tiles.padded(hidden, down_proj.shape[2])
    d_pre_act, partial = act_backward(
        grad, pre_act, d_out, dense(down_bias), weights, tiles, settings, (want_pre, want_down, want_weights)
    )
    del pre_act
    if want_down:
        d_down = weight_grad(d_out, grad, tiles, run, down_proj, main_grads[1])
    if want_down_bias:
        d_down_bias = bias_grad(d_out, tiles, weights)
    del d_out, grad
    if want_hidden:
        d_hidden = moe_combine(expert_rows(d_pre_act, gate_up_proj.mT, tiles, run), row_slot, tiles.slot_padded)
    if want_gate_up_bias:
        d_gate_up_bias = bias_grad(d_pre_act, tiles)
    if want_gate_up:
        rows = pad_rows(hidden, tiles, by_token=True)
        d_gate_up = weight_grad(d_pre_act, rows, tiles, run, gate_up_proj, main_grads[0])
    if want_weights:
        d_weights = slot_grad(partial, slot_row.contiguous(), top_k_weights.dtype)
    return d_hidden, d_gate_up, d_down, d_weights, d_gate_up_bias, d_down_bias


def dense(bias: Tensor | None) -> Tensor | None:
    """A bias with its elements side by side."""
    return None if bias is None else bias.contiguous()
