"""Mixture of experts in plain torch: a loop over the experts, each a few GEMMs on its rows.

Rows past offsets[E] serve no slot (row_slot −1) and are 0. A slot without a row took no part (slot_row −1) or had an
expert id out of range (slot_row −2): that makes its token NaN, so that nothing plausible comes out of a bad id.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from fusedce.eager.activation import gated
from fusedce.options import ExpertOptions

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
    """rows (R,D) = w · (act(x·[gate; up]ᵀ + b₁) · downᵀ + b₂), or their sums (N,D), and the pre-activation (R,2F), gate
    before up, or (0,2F) where it is not kept.
    """
    dtype = _accumulate_dtype(hidden)
    num_rows = row_slot.shape[0]
    rows = hidden.new_zeros((num_rows, hidden.shape[1]), dtype=dtype if settings.combine else None)
    pre_act = hidden.new_zeros((num_rows if settings.keeps_pre_act else 0, gate_up_proj.shape[1]))
    flat_weights = top_k_weights.reshape(-1)
    for expert, part in _groups(offsets):
        slots = row_slot[part]
        tokens = hidden[slots // slot_row.shape[1]]
        gate, up = _gate_and_up(tokens, gate_up_proj, gate_up_bias, expert, settings)
        if settings.keeps_pre_act:
            pre_act[part] = torch.cat((gate, up), 1).to(pre_act.dtype)
        act, _, _ = gated(gate, up, settings.activation, settings.limit)
        out = act @ down_proj[expert].to(dtype).t()
        if down_bias is not None:
            out = out + down_bias[expert].to(dtype)
        rows[part] = (out * flat_weights[slots].to(dtype)[:, None]).to(rows.dtype)
    if settings.combine:
        rows = moe_combine(rows, row_slot, slot_row).to(hidden.dtype)
    return rows, pre_act


def _gate_and_up(
    tokens: Tensor, gate_up_proj: Tensor, bias: Tensor | None, expert: int, settings: ExpertOptions
) -> tuple[Tensor, Tensor]:
    """The pre-activation of one expert's rows, in the dtype of sums."""
    dtype = _accumulate_dtype(tokens)
    both = tokens.to(dtype) @ gate_up_proj[expert].to(dtype).t()
    if bias is not None:
        both = both + bias[expert].to(dtype)
    if settings.interleaved:
        return both[:, ::2], both[:, 1::2]
    gate, up = both.chunk(2, 1)
    return gate, up


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
    """The gradients of hidden, gate_up_proj, down_proj, top_k_weights and the two biases, without the rows: with
    g = d_rows·down, d_w = Σ_F g·act + Σ_D d_rows·b₂ and d_act = w·g. A weight's gradient is added to its main gradient
    if it has one.
    """
    dtype = _accumulate_dtype(hidden)
    want_hidden, want_gate_up, want_down, want_weights, want_gate_up_bias, want_down_bias = mask
    d_x = hidden.new_zeros((row_slot.shape[0] if want_hidden else 0, hidden.shape[1]), dtype=dtype)
    gate_up_main_grad, down_main_grad = main_grads
    own_gate_up, own_down = want_gate_up and gate_up_main_grad is None, want_down and down_main_grad is None
    # In the order in which the weights are stored.
    d_gate_up = torch.zeros_like(gate_up_proj) if own_gate_up else hidden.new_empty(0)
    d_down = torch.zeros_like(down_proj) if own_down else hidden.new_empty(0)
    d_gate_up_bias = hidden.new_zeros(gate_up_proj.shape[:2] if want_gate_up_bias else (0,))
    d_down_bias = hidden.new_zeros(down_proj.shape[:2] if want_down_bias else (0,))
    # A slot without a row keeps its NaN, or 0 where it takes no part.
    d_weights = top_k_weights.new_zeros(slot_row.numel() if want_weights else 0)
    if want_weights:
        d_weights.masked_fill_(slot_row.reshape(-1) < -1, torch.nan)
    flat_weights = top_k_weights.reshape(-1)
    for expert, part in _groups(offsets):
        slots = row_slot[part]
        tokens = hidden[slots // slot_row.shape[1]]
        d_out = (d_rows[slots // slot_row.shape[1]] if settings.combine else d_rows[part]).to(dtype)
        weights = flat_weights[slots].to(dtype)[:, None]
        if settings.keeps_pre_act:
            gate, up = pre_act[part].to(dtype).chunk(2, 1)
        else:
            gate, up = _gate_and_up(tokens, gate_up_proj, gate_up_bias, expert, settings)
        act, by_gate, by_up = gated(gate, up, settings.activation, settings.limit)
        if want_down:
            (d_down if down_main_grad is None else down_main_grad)[expert] += d_out.t() @ (weights * act)
        if want_down_bias:
            d_down_bias[expert] = (weights * d_out).sum(0).to(d_down_bias.dtype)
        if not (want_hidden or want_gate_up or want_weights or want_gate_up_bias):
            continue
        grad = d_out @ down_proj[expert].to(dtype)
        if want_weights:
            total = (grad * act).sum(1)
            if down_bias is not None:
                total = total + d_out @ down_bias[expert].to(dtype)
            d_weights[slots] = total.to(d_weights.dtype)
        d_both = (weights * grad * by_gate, weights * grad * by_up)
        d_pre = torch.stack(d_both, 2).flatten(1) if settings.interleaved else torch.cat(d_both, 1)
        if want_gate_up:
            (d_gate_up if gate_up_main_grad is None else gate_up_main_grad)[expert] += d_pre.t() @ tokens.to(dtype)
        if want_gate_up_bias:
            d_gate_up_bias[expert] = d_pre.sum(0).to(d_gate_up_bias.dtype)
        if want_hidden:
            d_x[part] = d_pre @ gate_up_proj[expert].to(dtype)
    d_hidden = moe_combine(d_x, row_slot, slot_row).to(hidden.dtype) if want_hidden else hidden.new_empty(0)
    d_weights = d_weights.view(slot_row.shape) if want_weights else d_weights
    return d_hidden, d_gate_up, d_down, d_weights, d_gate_up_bias, d_down_bias


def moe_dispatch(hidden: Tensor, row_slot: Tensor, slot_row: Tensor) -> Tensor:
    """rows (R,D): the token of each row's slot; 0 where a row serves none."""
    rows = hidden[row_slot.clamp(min=0) // slot_row.shape[1]]
    return rows.masked_fill_((row_slot < 0)[:, None], 0.0)


def moe_combine(rows: Tensor, row_slot: Tensor, slot_row: Tensor) -> Tensor:
    """(N,D): the sum of each token's K rows, in slot order. A slot with row −1 adds nothing, with −2 NaN."""
    total = rows.new_zeros((slot_row.shape[0], rows.shape[1]), dtype=_accumulate_dtype(rows))
    if rows.shape[0] == 0:
        rows = rows.new_zeros((1, rows.shape[1]))  # stands in where a shortened plan leaves no row at all
    for row in slot_row.unbind(1):
        # not a product with 0: the row that stands in may hold NaN
        total += torch.where((row >= 0)[:, None], rows[row.clamp(min=0)], 0.0)
        total.masked_fill_((row < -1)[:, None], torch.nan)
    return total.to(rows.dtype)


def _accumulate_dtype(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _groups(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) for every expert that has any. The one host sync of this backend."""
    bounds = offsets.tolist()
    for expert, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if stop > start:
            yield expert, slice(start, stop)
