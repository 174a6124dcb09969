"""Routing and the plan in plain torch."""

import torch
from torch import Tensor


def moe_route(
    logits: Tensor,
    top_k: int,
    correction: Tensor | None,
    score: str,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
    group_best: int,
) -> tuple[Tensor, Tensor]:
    """The K best experts a row, the lowest id first among equals, and their weights.

    Scores grow with logits, so without correction and groups the choice is by logits: they are exact, and scores that
    vanish cannot tie.
    """
    # Contiguous, so that the sums of a row do not depend on how the logits lie in memory.
    logits = logits.contiguous().to(_wide_dtype(logits))
    grouped = top_groups < num_groups
    if correction is None and not grouped:
        index = _descending(logits)[:, :top_k].contiguous()
    else:
        values = logits.softmax(1) if score == "softmax" else logits.sigmoid()
        if correction is not None:
            values = values + correction.to(values.dtype)
        order = _descending(values)
        if grouped:
            # Behind the others, not at −inf: that may be a value of theirs.
            allowed = _in_best_groups(values, num_groups, top_groups, group_best).gather(1, order)
            order = order.gather(1, _descending(allowed.to(torch.uint8)))
        index = order[:, :top_k].contiguous()
    return moe_replay(logits, index, score, renormalize, scale), index


def moe_replay(logits: Tensor, top_k_index: Tensor, score: str, renormalize: bool, scale: float) -> Tensor:
    """The weights of experts that are chosen already: 0 for a slot that takes no part, NaN for an id out of range."""
    logits = logits.contiguous().to(_wide_dtype(logits))
    inside, ids = _inside(top_k_index, logits.shape[1])
    counts = torch.zeros_like(logits).scatter_add_(1, ids, inside.to(logits.dtype))
    part, total, _ = _scores(logits, counts, score, renormalize)
    weights = scale * part.gather(1, ids) / torch.where(total == 0, 1.0, total)
    outside = torch.where(top_k_index == -1, 0.0, torch.nan).to(weights.dtype)
    return torch.where(inside, weights, outside)


def moe_route_backward(
    d_weights: Tensor, logits: Tensor, top_k_index: Tensor, score: str, renormalize: bool, scale: float
) -> Tensor:
    """d_logits = q·(g − c·Σ q·g)·slope, with q = score / total, g = scale·d_weights summed over the slots of an
    expert, and c how many slots name it, or 1 where the total is over all experts.
    """
    values = logits.contiguous().to(_wide_dtype(logits))
    inside, ids = _inside(top_k_index, logits.shape[1])
    counts = torch.zeros_like(values).scatter_add_(1, ids, inside.to(values.dtype))
    part, total, slope = _scores(values, counts, score, renormalize)
    share = part / torch.where(total == 0, 1.0, total)
    given = torch.where(inside, scale * d_weights.to(values.dtype), 0.0)
    # One slot after the other: scatter_add_ of a row's equal ids has no fixed order on a GPU.
    upstream = torch.zeros_like(values)
    for slot in range(top_k_index.shape[1]):
        upstream.scatter_add_(1, ids[:, slot : slot + 1], given[:, slot : slot + 1])
    if renormalize:
        upstream = upstream - counts * (share * upstream).sum(1, keepdim=True)
    elif score == "softmax":
        upstream = upstream - (share * upstream).sum(1, keepdim=True)
    return (share * upstream * slope).to(logits.dtype)


def moe_balance(
    logits: Tensor, top_k_index: Tensor, mask: Tensor | None, num_sequences: int, score: str
) -> tuple[Tensor, Tensor, Tensor]:
    """load (B,E), share (B,E), square (B,): per sequence the slots of each expert, the sums of the normalized scores
    and of lse². A token whose mask is 0 takes no part, whatever it holds.
    """
    values, kept = _kept_logits(logits, mask)
    inside, ids = _inside(top_k_index, logits.shape[1])
    counts = torch.zeros_like(values).scatter_add_(1, ids, inside * kept[:, None])
    shares = _shares(values, score) * kept[:, None]
    squares = values.logsumexp(1).square() * kept
    sizes = (num_sequences, logits.shape[0] // num_sequences)
    load, share = (x.view(*sizes, logits.shape[1]).sum(1) for x in (counts, shares))
    return load, share, squares.view(sizes).sum(1)


def moe_balance_backward(
    d_share: Tensor, d_square: Tensor, logits: Tensor, mask: Tensor | None, num_sequences: int, score: str
) -> Tensor:
    """d_logits = mask · (q·(g − Σ q·g)·slope + 2·lse·g₂·softmax), q the normalized scores."""
    values, kept = _kept_logits(logits, mask)
    length = logits.shape[0] // num_sequences
    g, g2 = (x.to(values.dtype).repeat_interleave(length, 0) for x in (d_share, d_square))
    share = _shares(values, score)
    d_logits = share * (g - (share * g).sum(1, keepdim=True))
    if score == "sigmoid":
        d_logits = d_logits * (1.0 - values.sigmoid())
    d_logits = d_logits + (2.0 * values.logsumexp(1) * g2)[:, None] * values.softmax(1)
    return (d_logits * kept[:, None]).to(logits.dtype)


def _kept_logits(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The logits, 0 in the rows that take no part, and each row's weight (N,)."""
    values = logits.contiguous().to(_wide_dtype(logits))
    if mask is None:
        return values, values.new_ones(values.shape[0])
    return torch.where((mask != 0)[:, None], values, 0.0), mask.to(values.dtype)


def _shares(values: Tensor, score: str) -> Tensor:
    """Each row's scores over their sum; 0 where all sigmoid scores are 0."""
    if score == "softmax":
        return values.softmax(1)
    scores = values.sigmoid()
    total = scores.sum(1, keepdim=True)
    return scores / torch.where(total == 0, 1.0, total)


def _descending(values: Tensor) -> Tensor:
    return values.sort(dim=1, descending=True, stable=True).indices


def _in_best_groups(values: Tensor, num_groups: int, top_groups: int, group_best: int) -> Tensor:
    """(N,E) bool: whether the expert's group is among the top_groups, the lowest group first among equals."""
    size = values.shape[1] // num_groups
    best = values.view(-1, num_groups, size).sort(dim=2, descending=True, stable=True).values[..., :group_best]
    totals = sum(best.unbind(2), torch.zeros_like(best[..., 0]))
    allowed = torch.zeros_like(totals, dtype=torch.bool).scatter_(1, _descending(totals)[:, :top_groups], True)
    return allowed.repeat_interleave(size, 1)


def _inside(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Which slots name an expert, and the ids with 0 for those that do not."""
    inside = (top_k_index >= 0) & (top_k_index < num_experts)
    return inside, torch.where(inside, top_k_index, 0)


def _scores(logits: Tensor, counts: Tensor, score: str, renormalize: bool) -> tuple[Tensor, Tensor, Tensor | float]:
    """(part, total, slope): scores (N,E), 0 outside the chosen where those alone count; what divides them (N,1);
    d score / d logit over score. counts (N,E): how many slots name each expert. Softmax scores are relative to the
    row's maximum, so a total is 0 for sigmoid only, and for a row without a choice.
    """
    slope: Tensor | float
    if score == "softmax":
        scores, slope = (logits - logits.amax(1, keepdim=True)).exp(), 1.0
    else:
        scores = logits.sigmoid()
        slope = 1.0 - scores
    if renormalize or score == "sigmoid":
        # not a product with 0: a score outside the chosen may be NaN
        scores = torch.where(counts > 0, scores, 0.0)
    if renormalize:
        return scores, (counts * scores).sum(1, keepdim=True), slope
    total = scores.sum(1, keepdim=True) if score == "softmax" else torch.ones_like(scores[:, :1])
    return scores, total, slope


def moe_plan(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """offsets (E+1,), row_slot (R,), slot_row (N,K), int32, by a stable sort of the expert ids."""
    ids = top_k_index.reshape(-1)
    inside = (ids >= 0) & (ids < num_experts)
    without = torch.where(ids == -1, -1, -2)
    # Ids that name no expert sort behind every expert and get no row.
    ids = torch.where(inside, ids, num_experts)
    order = ids.argsort(stable=True)
    offsets = ids.new_zeros(num_experts + 1, dtype=torch.int32)
    offsets[1:] = torch.bincount(ids, minlength=num_experts + 1)[:num_experts].cumsum(0)
    row = torch.arange(ids.shape[0], device=ids.device)
    slot_row = torch.empty_like(ids, dtype=torch.int32)
    slot_row[order] = row.int()
    row_slot = torch.where(row < offsets[-1], order, -1).int()
    return offsets, row_slot, torch.where(inside, slot_row, without).int().view(top_k_index.shape)


def moe_plan_chunks(top_k_index: Tensor, num_experts: int, num_chunks: int) -> tuple[Tensor, Tensor, Tensor]:
    """offsets (C,E+1), row_slot (R,), slot_row (N,K): the plans of the chunks, one after the other."""
    length = -(-top_k_index.shape[0] // num_chunks)
    parts = [top_k_index[chunk * length : (chunk + 1) * length] for chunk in range(num_chunks)]
    offsets, row_slot, slot_row = zip(*(moe_plan(part, num_experts) for part in parts), strict=True)
    return torch.stack(offsets), torch.cat(row_slot), torch.cat(slot_row)


def _wide_dtype(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32
