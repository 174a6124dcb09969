"""The sparse backward in plain torch: the decisions of a GPU's, without its saving. It is there to be compared with."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedce import budget
from fusedce.eager.linear_ce import d_raw_chunks, linear_logprob, linear_logprob_backward, prob_chunks
from fusedce.options import LogitOptions, Upstream
from fusedce.rows import RowGradient, row_gradient


def linear_logprob_sparse(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    with_entropy: bool,
    gradient_budget: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logprob, entropy, lse (N,), normalizer (N, 2) and mass (tiles, N) bf16, (0, 0) without a budget."""
    results = linear_logprob(hidden, weight, target, bias, options, with_entropy)
    if not gradient_budget:
        return *results, hidden.new_empty((0, 0), dtype=torch.bfloat16)
    vocab = weight.shape[0]
    mass = hidden.new_empty((budget.num_tiles(vocab), hidden.shape[0]), dtype=torch.bfloat16)
    for start, stop, probs in prob_chunks(hidden, weight, bias, results[3], options):
        column = target[start:stop, None].clamp(0, vocab - 1)
        in_tiles = _by_tile(probs.scatter(1, column, 0.0))
        mass[:, start:stop] = budget.stored_mass(in_tiles.sum(2).t())
    return *results, mass


def linear_logprob_sparse_backward(
    upstream: Upstream,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    logprob: Tensor,
    entropy: Tensor,
    normalizer: Tensor,
    mass: Tensor,
    options: LogitOptions,
    gradient_budget: float,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d_hidden, d_weight, d_bias and the certificate (4,). See `fusedce.budget`."""
    gradient = row_gradient(upstream, logprob, entropy, target, options)
    total = budget.reference(gradient.on_probs, gradient.on_target, logprob)
    refused = torch.zeros_like(total, dtype=torch.bool)
    saved = (hidden, weight, target, bias)
    if not gradient_budget or not hidden.shape[0]:
        grads = linear_logprob_backward(upstream, *saved, logprob, entropy, normalizer, options, mask)
        return *grads, budget.certificate(total, torch.zeros_like(total), refused, None)
    half = gradient_budget * total / 2
    live = _live_rows(gradient)
    worked, decision = _worked_pairs(gradient, mass, target, entropy, live, half, weight.shape[0])
    threshold = budget.word_threshold(half, decision.num_pairs)
    accepted = decision.accepted

    def d_raw():  # type: ignore[no-untyped-def]
        """The worked pairs' gradient, and how much of it is large, chunk by chunk."""
        for start, stop, dense in d_raw_chunks(gradient, *saved, entropy, normalizer, options):
            pairs = _by_tile(dense)
            kept = torch.where(worked[:, start:stop].t()[:, :, None], pairs, 0.0)
            of_pairs = kept.reshape(dense.shape[0], -1)[:, : weight.shape[0]]
            yield start, stop, dense, of_pairs, of_pairs.abs() >= threshold

    if mask[0]:
        num_words = torch.stack([large.sum() for *_, large in d_raw()]).sum()[None]
        accepted = accepted & budget.few_words(num_words, live.sum(0, keepdim=True))
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    d_hidden = hidden.new_empty(hidden.shape if mask[0] else (0,))
    d_weight = weight.new_zeros(weight.shape if mask[1] else (0,), dtype=dtype)
    d_bias = weight.new_zeros(weight.shape[:1] if mask[2] else (0,), dtype=dtype)
    dropped = torch.zeros_like(total)
    for start, stop, dense, of_pairs, large in d_raw():
        if mask[0]:
            # Selected, so that a row of NaN that is left out stays out.
            of_words = torch.where(accepted, torch.where(large, of_pairs, 0.0), dense)
            d_hidden[start:stop] = (of_words @ weight.to(dtype)).to(hidden.dtype)
            dropped += torch.where(large, 0.0, of_pairs).abs().sum(dtype=torch.float64)
        of_pairs = torch.where(accepted, of_pairs, dense)
        if mask[1]:
            kept = live[start:stop, None]
            d_weight.addmm_(of_pairs.t(), torch.where(kept, hidden[start:stop].to(dtype), 0.0))
        if mask[2]:
            d_bias += of_pairs.sum(0)
    lost = decision.lost + dropped * budget.MARGIN
    return (
        d_hidden,
        d_weight.to(weight.dtype),
        d_bias.to(weight.dtype),
        budget.certificate(total, lost, accepted, None),
    )


def _worked_pairs(
    gradient: RowGradient, mass: Tensor, target: Tensor, entropy: Tensor, live: Tensor, half: Tensor, vocab: int
) -> tuple[Tensor, budget.Decision]:
    """(tiles, N) bool: the pairs that are worked, if the decision is to; and that."""
    tiles, num_rows = mass.shape
    bound = budget.pair_bound(mass, gradient.on_probs, gradient.on_surprise, entropy)
    inside = live & (target >= 0) & (target < vocab)
    own = torch.where(inside, target // budget.WORD_TILE, -1) == torch.arange(tiles, device=mass.device)[:, None]
    levels = budget.thresholds(half, num_rows, tiles)
    above = [(bound >= level) | own for level in levels]
    lost = torch.stack([torch.where(worked, 0.0, bound).sum(dtype=torch.float64) for worked in above])
    counts = torch.stack([worked.sum() for worked in above])
    room = budget.capacity(num_rows, tiles, num_rows * tiles)
    most = budget.most_pairs(live.sum(0, keepdim=True), tiles, room)
    decision = budget.decide(levels, lost, counts, half, most)
    return (bound >= decision.threshold) | own, decision


def _live_rows(gradient: RowGradient) -> Tensor:
    """(N,): the rows that have a gradient; NaN is one."""
    live = (gradient.on_probs != 0) | (gradient.on_target != 0)
    return live if gradient.on_surprise is None else live | (gradient.on_surprise != 0)


def _by_tile(words: Tensor) -> Tensor:
    """(rows, tiles, WORD_TILE) of (rows, V), padded with 0."""
    tiles = budget.num_tiles(words.shape[1])
    return F.pad(words, (0, tiles * budget.WORD_TILE - words.shape[1])).unflatten(1, (tiles, budget.WORD_TILE))
