"""Log-probs of several words a row in plain torch, a chunk of rows at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedce.chunked import Chunks, row_chunks
from fusedce.eager.linear_ce import _accumulate_dtype, _Gradients, _raw_logits, _Results
from fusedce.options import LogitOptions
from fusedce.rows import Selection


def linear_logprob_of(
    hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, options: LogitOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of every id (N,K), the target (N,) that the row's results are made with, and the normalizer (N,2)."""
    results, target = _Results(hidden, False), ids.new_empty(ids.shape[0])
    values = hidden.new_empty(ids.shape, dtype=results.dtype)
    for start, stop in _chunks(weight, ids, results.dtype):
        rows, of_rows = slice(start, stop), options.of_rows(start, stop)
        raw, _ = _raw_logits(hidden[rows], weight, bias, options, results.dtype)
        words = Selection(ids[rows], of_rows, weight.shape[0])
        selected = raw.gather(1, torch.where(words.inside(), words.ids, 0))
        target[rows] = words.target(selected)
        results.set(start, stop, raw, target[rows], of_rows)
        values[rows] = words.logprobs(selected, results.normalizer[rows])
    return values, target, results.normalizer


def linear_logprob_of_backward(
    d_logprob: Tensor,
    d_lse: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    logprob: Tensor,
    target: Tensor,
    normalizer: Tensor,
    options: LogitOptions,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """d_hidden, d_weight, d_bias: with d the upstream gradient, d_z_j = Σ_{ids = j} d + p_j · (d_lse − Σ d)."""
    sums = _Gradients(hidden, weight, mask, _accumulate_dtype(hidden))
    for start, stop in _chunks(weight, ids, sums.dtype):
        rows, of_rows = slice(start, stop), options.of_rows(start, stop)
        raw, slope = _raw_logits(hidden[rows], weight, bias, options, sums.dtype)
        words = Selection(ids[rows], of_rows, weight.shape[0])
        upstream = words.upstream(d_logprob[rows].to(sums.dtype))
        on_probs = words.on_probs(upstream, None if d_lse is None else d_lse[rows])[:, None]
        d_raw = _d_raw(raw, words, upstream, on_probs, logprob[rows], normalizer[rows])
        # Select, last, and do not multiply: a row that takes no part may hold NaN or inf, and so does its slope.
        kept = (target[rows] != options.ignore_index)[:, None]
        sums.add(start, stop, torch.where(kept, d_raw if slope is None else d_raw * slope, 0.0), target, options)
    return sums.result()


def _d_raw(
    raw: Tensor, words: Selection, upstream: Tensor, on_probs: Tensor, logprob: Tensor, normalizer: Tensor
) -> Tensor:
    d_raw = ((raw - normalizer[:, :1]) * words.slopes(raw) - normalizer[:, 1:]).exp() * on_probs
    # A word's own entry from its log-prob: 1 − p is exact where p is near 1. Slots of one word all hold their sum, so
    # the order in which they are written does not matter.
    same = torch.where(words.ids[:, :, None] == words.ids[:, None, :], upstream[:, None, :], 0.0).sum(2)
    entries = logprob.exp() * (same + on_probs) - same * torch.expm1(logprob)
    # One column more, for the slots that have none.
    column = torch.where(words.inside(), words.ids, words.vocab)
    return F.pad(d_raw, (0, 1)).scatter(1, column, entries)[:, : words.vocab]


def _chunks(weight: Tensor, ids: Tensor, dtype: torch.dtype) -> Chunks:
    # as the other functions of this backend, and what compares the slots of a row with each other
    num_rows, slots = ids.shape
    return row_chunks(num_rows, (4 * weight.shape[0] + 2 * slots * slots) * dtype.itemsize)
