"""Mixture of experts in plain torch: a loop over the experts, each a few GEMMs on its rows.

Rows past offsets[E] serve no slot (row_slot −1) and are 0. A slot without a row took no part (slot_row −1) or had an
expert id out of range (slot_row −2): that makes its token NaN, so that nothing plausible comes out of a bad id.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor


def moe_experts(
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    slot_row: Tensor,
) -> tuple[Tensor, Tensor]:
    """rows (R,D) = w · (silu(x·gateᵀ) · (x·upᵀ)) · downᵀ and pre_act (R,2F) = x·[gate; up]ᵀ."""
    dtype = _accumulate_dtype(hidden)
    num_rows, top_k = row_slot.shape[0], slot_row.shape[1]
    rows = hidden.new_zeros((num_rows, hidden.shape[1]))
    pre_act = hidden.new_zeros((num_rows, gate_up_proj.shape[1]))
    flat_weights = top_k_weights.reshape(-1)
    for expert, part in _groups(offsets):
        slots = row_slot[part]
        both = hidden[slots // top_k].to(dtype) @ gate_up_proj[expert].to(dtype).t()
        pre_act[part] = both.to(pre_act.dtype)
        gate, up = both.chunk(2, 1)
        act = torch.nn.functional.silu(gate) * up
        weights = flat_weights[slots].to(dtype)
        rows[part] = (act @ down_proj[expert].to(dtype).t() * weights[:, None]).to(rows.dtype)
    return rows, pre_act


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
    """d_hidden, d_gate_up_proj, d_down_proj, d_top_k_weights, without the rows: with g = d_rows·down,
    d_w = Σ_F g·act and d_act = w·g.
    """
    dtype = _accumulate_dtype(hidden)
    want_hidden, want_gate_up, want_down, want_weights = mask
    d_x = hidden.new_zeros((row_slot.shape[0] if want_hidden else 0, hidden.shape[1]), dtype=dtype)
    d_gate_up = gate_up_proj.new_zeros(gate_up_proj.shape if want_gate_up else (0,))
    d_down = down_proj.new_zeros(down_proj.shape if want_down else (0,))
    # A slot without a row keeps its NaN, or 0 where it takes no part.
    d_weights = top_k_weights.new_zeros(slot_row.numel() if want_weights else 0)
    if want_weights:
        d_weights.masked_fill_(slot_row.reshape(-1) < -1, torch.nan)
    flat_weights = top_k_weights.reshape(-1)
    for expert, part in _groups(offsets):
        slots = row_slot[part]
        d_out = d_rows[part].to(dtype)
        weights = flat_weights[slots].to(dtype)[:, None]
        gate, up = pre_act[part].to(dtype).chunk(2, 1)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        act = silu * up
        if want_down:
            d_down[expert] = (d_out.t() @ (weights * act)).to(d_down.dtype)
        if not (want_hidden or want_gate_up or want_weights):
            continue
        grad = d_out @ down_proj[expert].to(dtype)
        if want_weights:
            d_weights[slots] = (grad * act).sum(1).to(d_weights.dtype)
        d_act = weights * grad
        d_pre = torch.cat((d_act * up * (sigmoid + silu * (1.0 - sigmoid)), d_act * silu), 1)
        if want_gate_up:
            d_gate_up[expert] = (d_pre.t() @ hidden[slots // slot_row.shape[1]].to(dtype)).to(d_gate_up.dtype)
        if want_hidden:
            d_x[part] = d_pre @ gate_up_proj[expert].to(dtype)
    d_hidden = moe_combine(d_x, row_slot, slot_row).to(hidden.dtype) if want_hidden else hidden.new_empty(0)
    return d_hidden, d_gate_up, d_down, d_weights.view(slot_row.shape) if want_weights else d_weights


def moe_dispatch(hidden: Tensor, row_slot: Tensor, slot_row: Tensor) -> Tensor:
    """rows (R,D): the token of each row's slot; 0 where a row serves none."""
    rows = hidden[row_slot.clamp(min=0) // slot_row.shape[1]]
    return rows.masked_fill_((row_slot < 0)[:, None], 0.0)


def moe_combine(rows: Tensor, row_slot: Tensor, slot_row: Tensor) -> Tensor:
    """(N,D): the sum of each token's K rows, in slot order. A slot with row −1 adds nothing, with −2 NaN."""
    total = rows.new_zeros((slot_row.shape[0], rows.shape[1]), dtype=_accumulate_dtype(rows))
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
