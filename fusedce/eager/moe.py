"""Mixture of experts in plain torch: a loop over the experts, each a few GEMMs on its rows.

Rows past offsets[E] serve no slot (row_slot −1): they exist only after an expert id out of range, and are 0. A slot
without a row (slot_row −1) makes its token NaN, so that nothing plausible comes out of a bad id.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor


def moe_route(logits: Tensor, top_k: int, score: str, renormalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The K largest logits a row, the lowest id first among equals, and their weights.

    Scores grow with logits, so the selection is by logits: they are exact, and scores that vanish cannot tie.
    """
    # Contiguous, so that the sums of a row do not depend on how the logits lie in memory.
    logits = logits.contiguous().to(_accumulate_dtype(logits))
    index = logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k].contiguous()
    part, total, _ = _scores(logits, index, score, renormalize)
    weights = scale * part.gather(1, index) / torch.where(total == 0, 1.0, total)
    return weights, index


def moe_route_backward(
    d_weights: Tensor, logits: Tensor, top_k_index: Tensor, score: str, renormalize: bool, scale: float
) -> Tensor:
    """d_logits. With q = score / total over the set that total sums: q·(g − Σ q·g)·slope, g = scale·d_weights."""
    values = logits.contiguous().to(_accumulate_dtype(logits))
    part, total, slope = _scores(values, top_k_index, score, renormalize)
    share = part / torch.where(total == 0, 1.0, total)
    upstream = torch.zeros_like(values).scatter_(1, top_k_index, scale * d_weights.to(values.dtype))
    if renormalize or score == "softmax":
        upstream = upstream - (share * upstream).sum(1, keepdim=True)
    return (share * upstream * slope).to(logits.dtype)


def _scores(logits: Tensor, index: Tensor, score: str, renormalize: bool) -> tuple[Tensor, Tensor, Tensor | float]:
    """(part, total, slope): scores (N,E), 0 outside the chosen where those alone count; what divides them (N,1);
    d score / d logit over score. Softmax scores are relative to the row's maximum, so a total is 0 for sigmoid only.
    """
    slope: Tensor | float
    if score == "softmax":
        scores, slope = (logits - logits.amax(1, keepdim=True)).exp(), 1.0
    else:
        scores = logits.sigmoid()
        slope = 1.0 - scores
    if renormalize or score == "sigmoid":
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, index, True)
        scores = torch.where(chosen, scores, 0.0)
    total = torch.ones_like(scores[:, :1]) if score == "sigmoid" and not renormalize else scores.sum(1, keepdim=True)
    return scores, total, slope


def moe_plan(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """offsets (E+1,), row_slot (R,), slot_row (N,K), int32, by a stable sort of the expert ids."""
    ids = top_k_index.reshape(-1)
    inside = (ids >= 0) & (ids < num_experts)
    # Ids out of range sort behind every expert and get no row.
    ids = torch.where(inside, ids, num_experts)
    order = ids.argsort(stable=True)
    offsets = ids.new_zeros(num_experts + 1, dtype=torch.int32)
    offsets[1:] = torch.bincount(ids, minlength=num_experts + 1)[:num_experts].cumsum(0)
    row = torch.arange(ids.shape[0], device=ids.device)
    slot_row = torch.empty_like(ids, dtype=torch.int32)
    slot_row[order] = row.int()
    row_slot = torch.where(row < offsets[-1], order, -1).int()
    return offsets, row_slot, torch.where(inside, slot_row, -1).view(top_k_index.shape)


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
    # A slot without a row keeps its NaN.
    d_weights = top_k_weights.new_full((slot_row.numel() if want_weights else 0,), torch.nan)
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
    """(N,D): the sum of each token's K rows, in slot order; NaN where a slot has no row."""
    total = rows.new_zeros((slot_row.shape[0], rows.shape[1]), dtype=_accumulate_dtype(rows))
    for row in slot_row.unbind(1):
        total += rows[row.clamp(min=0)]
        total.masked_fill_((row < 0)[:, None], torch.nan)
    return total.to(rows.dtype)


def _accumulate_dtype(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _groups(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) for every expert that has any. The one host sync of this backend."""
    bounds = offsets.tolist()
    for expert, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if stop > start:
            yield expert, slice(start, stop)
