"""Linear cross-entropy in plain torch, a chunk of rows at a time: never more than chunk × V logits."""

import torch
from torch import Tensor

from fusedce.chunked import row_chunks
from fusedce.options import LogitOptions, Upstream


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy and log-sum-exp of softmax(cap(hidden·weightᵀ + bias) / temperature), per row,
    and the normalizer (N,2): maximum m and log Σ e^(z−m).
    """
    dtype = _accumulate_dtype(hidden)
    logprob, entropy, lse = (hidden.new_zeros(hidden.shape[0], dtype=dtype) for _ in range(3))
    normalizer = hidden.new_zeros((hidden.shape[0], 2), dtype=dtype)
    for rows in _chunks(hidden, weight, dtype):
        logits, _ = _logits(hidden[rows], weight, bias, options, dtype)
        kept = target[rows] != options.ignore_index
        inside = (target[rows] >= 0) & (target[rows] < weight.shape[0])
        row_max = logits.amax(1)
        # A row that is all −inf is shifted by 0: −inf − (−inf) would hide that nothing is there.
        row_max = torch.where(row_max == -torch.inf, 0.0, row_max)
        log_sum = (logits - row_max[:, None]).exp().sum(1).log()
        log_probs = (logits - row_max[:, None]) - log_sum[:, None]
        chosen = log_probs.gather(1, torch.where(inside, target[rows], 0)[:, None])[:, 0]
        # Labels out of range were reported already; their rows are NaN, so that nothing plausible comes out of them.
        spoiled = torch.where(inside | ~kept, 0.0, torch.nan).to(dtype)
        logprob[rows] = torch.where(kept, chosen + spoiled, 0.0)
        entropy[rows] = torch.where(kept, _entropy(log_probs) + spoiled, 0.0)
        lse[rows] = torch.where(kept, row_max + log_sum + spoiled, 0.0)
        normalizer[rows] = torch.stack((row_max, log_sum + spoiled), 1)
    return logprob, entropy, lse, normalizer


def linear_logprob_backward(
    upstream: Upstream,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    entropy: Tensor,
    normalizer: Tensor,
    options: LogitOptions,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """d_hidden, d_weight, d_bias. With (m, s) the normalizer, p = exp(z − m − s), H the entropy and y the target,
    d_z = p·(d_lse − d_entropy·(log p + H)) + d_logprob·([j = y] − p).
    """
    d_logprob, d_entropy, d_lse = upstream
    dtype = _accumulate_dtype(hidden)
    d_hidden = hidden.new_empty(hidden.shape) if mask[0] else hidden.new_empty(0)
    d_weight = weight.new_zeros(weight.shape if mask[1] else (0,), dtype=dtype)
    d_bias = weight.new_zeros(weight.shape[:1] if mask[2] else (0,), dtype=dtype)
    for rows in _chunks(hidden, weight, dtype):
        logits, slope = _logits(hidden[rows], weight, bias, options, dtype)
        kept = target[rows] != options.ignore_index
        log_probs = (logits - normalizer[rows, :1]) - normalizer[rows, 1:]
        probs = log_probs.exp()
        # p·log p is 0 where p is 0, although log p may be −inf there.
        surprise = torch.where(probs == 0, 0.0, log_probs + entropy[rows, None])
        inside = kept & (target[rows] >= 0) & (target[rows] < weight.shape[0])
        column = torch.where(inside, target[rows], 0)[:, None]
        d_logits = probs * (d_lse[rows, None] - d_entropy[rows, None] * surprise)
        # 1 − p is exact where p is near 1; p·(… − d_logprob) + d_logprob would round there.
        d_logits += d_logprob[rows, None] * (-probs).scatter_add(1, column, inside[:, None].to(dtype))
        # Select, do not multiply: an ignored row may hold NaN or inf.
        d_logits = torch.where(kept[:, None], d_logits * slope, 0.0)
        if mask[0]:
            d_hidden[rows] = (d_logits @ weight.to(dtype)).to(hidden.dtype)
        if mask[1]:
            live = torch.where(kept[:, None], hidden[rows].to(dtype), 0.0)
            d_weight.addmm_(d_logits.t(), live)
        if mask[2]:
            d_bias += d_logits.sum(0)
    return d_hidden, d_weight.to(weight.dtype), d_bias.to(weight.dtype)


def _accumulate_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _chunks(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> list[slice]:
    # logits, probabilities and their gradient live at once, with room for the temporaries between them
    row_bytes = 4 * weight.shape[0] * dtype.itemsize
    return [slice(start, stop) for start, stop in row_chunks(hidden.shape[0], row_bytes)]


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: LogitOptions, dtype: torch.dtype
) -> tuple[Tensor, Tensor | float]:
    """The logits after softcap and temperature, and their slope against the plain ones."""
    # Upcast operands multiply exactly as 16-bit ones with an fp32 sum; 16-bit GEMMs on a CPU are slow and round.
    logits = hidden.to(dtype) @ weight.to(dtype).t()
    if bias is not None:
        logits = logits + bias.to(dtype)
    if not options.softcap:
        return logits / options.temperature, 1.0 / options.temperature
    bent = torch.tanh(logits / options.softcap)
    return options.softcap / options.temperature * bent, (1.0 - bent * bent) / options.temperature


def _entropy(log_probs: Tensor) -> Tensor:
    probs = log_probs.exp()
    return -torch.where(probs == 0, 0.0, probs * log_probs).sum(1)
