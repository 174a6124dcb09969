"""Linear cross-entropy in plain torch, a chunk of rows at a time: never more than chunk × V logits."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fusedce.chunked import row_chunks
from fusedce.options import LogitOptions, Upstream, UpstreamOf, Wanted
from fusedce.rows import RowGradient, merge_parts, row_gradient


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy and log-sum-exp of softmax(cap(hidden·weightᵀ + bias) / temperature), per row,
    and the normalizer (N,2): the maximum of the raw logits (after the cap, before the temperature), and
    log Σ exp(z − its z).
    """
    results = _Results(hidden, with_entropy)
    for start, stop in _chunks(hidden, weight, results.dtype):
        raw, _ = _raw_logits(hidden[start:stop], weight, bias, options, results.dtype)
        results.set(start, stop, raw, target[start:stop], options.of_rows(start, stop))
    return results.logprob, results.entropy, results.lse, results.normalizer


def linear_parts(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    with_entropy: bool,
) -> Tensor:
    """(N,4): what a shard of the vocabulary knows of each row; see `fusedce.rows.merge_parts`."""
    dtype = _accumulate_dtype(hidden)
    parts = hidden.new_empty((hidden.shape[0], 4), dtype=dtype)
    for start, stop in _chunks(hidden, weight, dtype):
        raw, _ = _raw_logits(hidden[start:stop], weight, bias, options, dtype)
        parts[start:stop] = _parts_of(raw, target[start:stop], options.of_rows(start, stop), with_entropy)
    return parts


def _parts_of(raw: Tensor, target: Tensor, options: LogitOptions, with_entropy: bool) -> Tensor:
    inside = (target >= 0) & (target < raw.shape[1])
    column = torch.where(inside, target, 0)[:, None]
    raw_target = torch.where(inside, raw.gather(1, column)[:, 0], -torch.inf)
    others = raw.scatter(1, column, torch.where(inside, -torch.inf, raw.gather(1, column)[:, 0])[:, None])
    largest = others.amax(1)
    gaps = (others - torch.where(largest == -torch.inf, 0.0, largest)[:, None]) * _row_slope(options, raw)
    exps = gaps.exp()
    sum_gap = torch.where(exps == 0, 0.0, exps * gaps).sum(1) if with_entropy else torch.zeros_like(largest)
    return torch.stack((largest, exps.sum(1), sum_gap, raw_target), 1)


def linear_logprob_backward(
    upstream: Upstream,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    logprob: Tensor,
    entropy: Tensor,
    normalizer: Tensor,
    options: LogitOptions,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """d_hidden, d_weight, d_bias by the formula of `fusedce.rows`."""
    gradient = row_gradient(upstream, logprob, entropy, target, options)
    sums = _Gradients(hidden, weight, mask, _accumulate_dtype(hidden))
    for start, stop, d_raw in d_raw_chunks(gradient, hidden, weight, target, bias, entropy, normalizer, options):
        sums.add(start, stop, d_raw, target, options)
    return sums.result()


def d_raw_chunks(
    gradient: RowGradient,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    entropy: Tensor,
    normalizer: Tensor,
    options: LogitOptions,
) -> Iterator[tuple[int, int, Tensor]]:
    """start, stop and the gradient of the loss in the plain logits of these rows, (rows, V)."""
    dtype = _accumulate_dtype(hidden)
    for start, stop in _chunks(hidden, weight, dtype):
        raw, slope = _raw_logits(hidden[start:stop], weight, bias, options, dtype)
        rows, of_rows = slice(start, stop), options.of_rows(start, stop)
        part = gradient.of_rows(start, stop)
        yield start, stop, _d_raw(raw, slope, part, entropy[rows], normalizer[rows], target[rows], of_rows)


def prob_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, normalizer: Tensor, options: LogitOptions
) -> Iterator[tuple[int, int, Tensor]]:
    """start, stop and the probability of every word in these rows, (rows, V); 0 in rows that take no part."""
    dtype = _accumulate_dtype(hidden)
    for start, stop in _chunks(hidden, weight, dtype):
        raw, _ = _raw_logits(hidden[start:stop], weight, bias, options, dtype)
        part = normalizer[start:stop]
        probs = ((raw - part[:, :1]) * _row_slope(options.of_rows(start, stop), raw) - part[:, 1:]).exp()
        # Selected: an ignored row may hold NaN.
        yield start, stop, torch.where(part[:, :1] == torch.inf, 0.0, probs)


def linear_fused(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    mask: list[bool],
    upstream_of: UpstreamOf,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logprob, entropy, lse (N,), d_hidden, d_weight, d_bias: a chunk's gradient follows from its own logits."""
    results = _Results(hidden, with_entropy)
    sums = _Gradients(hidden, weight, mask, results.dtype)
    for start, stop in _chunks(hidden, weight, results.dtype):
        rows, of_rows = slice(start, stop), options.of_rows(start, stop)
        raw, slope = _raw_logits(hidden[rows], weight, bias, options, results.dtype)
        results.set(start, stop, raw, target[rows], of_rows)
        logprob, entropy = results.logprob[rows], results.entropy[rows]
        upstream = upstream_of(start, stop, logprob, entropy, results.lse[rows])
        part = row_gradient(upstream, logprob, entropy, target[rows], of_rows)
        d_raw = _d_raw(raw, slope, part, entropy, results.normalizer[rows], target[rows], of_rows)
        sums.add(start, stop, d_raw, target, options)
    return results.logprob, results.entropy, results.lse, *sums.result()


def linear_ce_sum_backward(
    d_loss: Tensor, d_hidden: Tensor, d_weight: Tensor, d_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward's gradients times d_loss (); new tensors, so that a second backward finds them as they were."""
    return d_hidden * d_loss, d_weight * d_loss, d_bias * d_loss


class _Results:
    """The per-row results while the chunks go by."""

    def __init__(self, hidden: Tensor, with_entropy: bool) -> None:
        self.dtype = _accumulate_dtype(hidden)
        num_rows = hidden.shape[0]
        self.logprob, self.lse = (hidden.new_zeros(num_rows, dtype=self.dtype) for _ in range(2))
        self.entropy = hidden.new_zeros(num_rows if with_entropy else 0, dtype=self.dtype)
        self.normalizer = hidden.new_zeros((num_rows, 2), dtype=self.dtype)

    def set(self, start: int, stop: int, raw: Tensor, target: Tensor, options: LogitOptions) -> None:
        """Rows [start, stop) from their raw logits; options are those of the rows."""
        rows, with_entropy = slice(start, stop), self.entropy.numel() > 0
        parts = _parts_of(raw, target, options, with_entropy)
        logprob, entropy, lse, normalizer = merge_parts(parts[None], target, options, with_entropy)
        # Labels out of range were reported already; their rows are NaN, so that nothing plausible comes out of them.
        outside = (target != options.ignore_index) & ((target < 0) | (target >= raw.shape[1]))
        self.logprob[rows] = torch.where(outside, torch.nan, logprob)
        self.lse[rows] = torch.where(outside, torch.nan, lse)
        if with_entropy:
            self.entropy[rows] = torch.where(outside, torch.nan, entropy)
        self.normalizer[rows] = torch.where(outside[:, None], torch.nan, normalizer)


def _d_raw(
    raw: Tensor,
    slope: Tensor | None,
    gradient: RowGradient,
    entropy: Tensor,
    normalizer: Tensor,
    target: Tensor,
    options: LogitOptions,
) -> Tensor:
    """The gradient of the loss in the plain logits of some rows; all else is of theirs. slope: the softcap's."""
    kept = target != options.ignore_index
    log_probs = (raw - normalizer[:, :1]) * _row_slope(options, raw) - normalizer[:, 1:]
    probs = log_probs.exp()
    d_raw = probs * gradient.on_probs[:, None]
    if gradient.on_surprise is not None:
        # p·log p is 0 where p is 0, although log p may be −inf there.
        surprise = torch.where(probs == 0, 0.0, log_probs + entropy[:, None])
        d_raw -= probs * gradient.on_surprise[:, None] * surprise
    inside = kept & (target >= 0) & (target < raw.shape[1])
    column = torch.where(inside, target, 0)[:, None]
    on_target = torch.where(inside, gradient.on_target, d_raw.gather(1, column)[:, 0])
    d_raw = d_raw.scatter(1, column, on_target[:, None])
    # Select, last, and do not multiply: an ignored row may hold NaN or inf, and so does its slope.
    return torch.where(kept[:, None], d_raw if slope is None else d_raw * slope, 0.0)


class _Gradients:
    """d_hidden (N,D), d_weight (V,D), d_bias (V,) while the chunks go by; those that `mask` does not want are empty."""

    def __init__(self, hidden: Tensor, weight: Tensor, mask: list[bool], dtype: torch.dtype) -> None:
        self.hidden, self.weight, self.dtype, self.wanted = hidden, weight, dtype, Wanted.of(mask)
        self.d_hidden = hidden.new_empty(hidden.shape if mask[0] else (0,))
        main_grad = self.wanted.main_grad
        sizes = weight.shape if mask[1] else (0,)
        self.d_weight = weight.new_zeros(sizes, dtype=dtype) if main_grad is None else main_grad
        self.d_bias = weight.new_zeros(weight.shape[:1] if mask[2] else (0,), dtype=dtype)

    def add(self, start: int, stop: int, d_logits: Tensor, target: Tensor, options: LogitOptions) -> None:
        rows = slice(start, stop)
        if self.d_hidden.numel():
            self.d_hidden[rows] = (d_logits @ self.weight.to(self.dtype)).to(self.d_hidden.dtype)
        if self.d_weight.numel():
            kept = (target[rows] != options.ignore_index)[:, None]
            self.d_weight.addmm_(d_logits.t(), torch.where(kept, self.hidden[rows].to(self.dtype), 0.0))
        if self.d_bias.numel():
            self.d_bias += d_logits.sum(0)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        d_weight = self.wanted.weight_grad(self.d_weight, self.weight.dtype)
        return self.d_hidden, d_weight, self.d_bias.to(self.weight.dtype)


def _accumulate_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _chunks(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> list[tuple[int, int]]:
    # logits, probabilities and their gradient live at once, with room for the temporaries between them
    return row_chunks(hidden.shape[0], 4 * weight.shape[0] * dtype.itemsize)


def _row_slope(options: LogitOptions, raw: Tensor) -> Tensor:
    """1 / temperature, (rows, 1) or (1, 1)."""
    if options.row_temperature is None:
        return raw.new_full((1, 1), 1.0 / options.temperature)
    return 1.0 / options.row_temperature.to(raw.dtype)[:, None]


def _raw_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: LogitOptions, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The logits after the softcap, before the temperature, and their slope against the plain ones (None: 1)."""
    # Upcast operands multiply exactly as 16-bit ones with an fp32 sum; 16-bit GEMMs on a CPU are slow and round.
    raw = hidden.to(dtype) @ weight.to(dtype).t()
    if bias is not None:
        raw = raw + bias.to(dtype)
    if not options.softcap:
        return raw, None
    bent = torch.tanh(raw / options.softcap)
    return options.softcap * bent, 1.0 - bent * bent
