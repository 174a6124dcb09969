"""Linear cross-entropy, native: a chunk's logits by one plain GEMM, in fp32, and one row kernel over them.

The logits are written and read once, 8·V bytes a row, and no value is rounded to 16 bits before the softmax. Kernels:
csrc/kernels/linear_ce_rows.cu.
"""

import torch
from torch import Tensor

from fusedce import arch, chunked
from fusedce.hip import extension, seeded
from fusedce.options import LogitOptions, Upstream, UpstreamOf


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprob, entropy, lse (N,) and normalizer (N,2), fp32. See `fusedce.eager.linear_ce` for the formula.

    Memory: one chunk's logits, within `env.workspace_bytes()`. Bitwise repeatable; but a row's bits may depend on the
    number of rows, by which the vendor library chooses its GEMM.
    """
    results = _results(hidden)
    target, bias = target.contiguous(), _row_bias(bias)
    for start, stop in chunked.row_chunks(hidden.shape[0], _row_width(weight.shape[0]) * 4):
        _statistics(_logits(hidden[start:stop], weight), target, bias, options, start, stop, results)
    logprob, entropy, lse, normalizer = results
    return logprob, entropy if with_entropy else entropy[:0], lse, normalizer


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
    """d_hidden (N,D), d_weight (V,D), d_bias (V,). See `fusedce.eager.linear_ce` for the formula.

    Memory: one chunk's logits and their gradient, within `env.workspace_bytes()`, and d_weight in fp32. Bitwise
    repeatable.
    """
    numbers = _upstream_numbers(upstream, logprob)
    scale = chunked.batch_scale(*numbers)
    target, row_bias = target.contiguous(), _row_bias(bias)
    entropy = entropy.contiguous() if entropy.numel() else torch.zeros_like(logprob)
    chunks = _chunks(hidden, weight)
    sums = chunked.GradientSums(hidden, weight, mask, chunks)
    for start, stop in chunks:
        rows = chunked.kept_rows(hidden[start:stop], target[start:stop], options.ignore_index)
        part = [number[start:stop] for number in (*numbers, entropy, normalizer)]
        d_logits = sums.d_logits(stop - start)
        _d_logits(
            _logits(rows, weight), target[start:stop], row_bias, options.of_rows(start, stop), part, scale, d_logits
        )
        del d_logits
        sums.add(start, stop, rows)
    return sums.result(scale)


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
    """logprob, entropy, lse (N,), d_hidden, d_weight, d_bias: three GEMMs, since a chunk's gradient follows from its
    own logits. With fp16 operands four: what d_logits is to be scaled by is known after the last row. On Hopper, with
    bf16 operands and no entropy, by kernels that write no logits: see `fusedce.hip.seeded`.
    """
    if seeded.suits(hidden, weight, with_entropy):
        return seeded.fused(hidden, weight, target, bias, options, mask, upstream_of)
    if hidden.dtype == torch.float16:
        results = linear_logprob(hidden, weight, target, bias, options, with_entropy)
        logprob, entropy, lse, normalizer = results
        upstream = upstream_of(0, hidden.shape[0], logprob, entropy, lse)
        grads = linear_logprob_backward(
            upstream, hidden, weight, target, bias, logprob, entropy, normalizer, options, mask
        )
        return logprob, entropy, lse, *grads
    results, one = _results(hidden), hidden.new_ones((), dtype=torch.float32)
    target, row_bias = target.contiguous(), _row_bias(bias)
    chunks = _chunks(hidden, weight)
    sums = chunked.GradientSums(hidden, weight, mask, chunks)

    def add(start: int, stop: int) -> None:
        rows = chunked.kept_rows(hidden[start:stop], target[start:stop], options.ignore_index)
        logits = _logits(rows, weight)
        _statistics(logits, target, row_bias, options, start, stop, results)
        logprob, entropy, lse, normalizer = (result[start:stop] for result in results)
        upstream = upstream_of(start, stop, logprob, entropy if with_entropy else entropy[:0], lse)
        part, d_logits = [*_upstream_numbers(upstream, logprob), entropy, normalizer], sums.d_logits(stop - start)
        _d_logits(logits, target[start:stop], row_bias, options.of_rows(start, stop), part, one, d_logits)
        sums.add(start, stop, rows)

    # A function, so that nothing of a chunk outlives it.
    for start, stop in chunks:
        add(start, stop)
    logprob, entropy, lse, _ = results
    return logprob, entropy if with_entropy else entropy[:0], lse, *sums.result(None)


def linear_ce_sum_backward(
    d_loss: Tensor, d_hidden: Tensor, d_weight: Tensor, d_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward's gradients times d_loss (); new tensors, so that a second backward finds them as they were."""
    return seeded.scaled(d_hidden, d_loss), seeded.scaled(d_weight, d_loss), seeded.scaled(d_bias, d_loss)


def _results(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprob, entropy, lse and normalizer, to be filled."""
    num_rows = hidden.shape[0]
    logprob, entropy, lse = (hidden.new_empty(num_rows, dtype=torch.float32) for _ in range(3))
    return logprob, entropy, lse, hidden.new_empty((num_rows, 2), dtype=torch.float32)


def _statistics(
    logits: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    start: int,
    stop: int,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Fill rows [start, stop) of the results."""
    torch.ops.fusedce_native.logprob_rows(
        logits, target[start:stop], bias, *_row_options(options.of_rows(start, stop)),
        *(result[start:stop] for result in results),
    )  # fmt: skip


def _d_logits(
    logits: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    numbers: list[Tensor],
    scale: Tensor,
    out: Tensor,
) -> None:
    """Fill out (rows, V). numbers: d_logprob, d_entropy, d_lse, entropy (rows,), normalizer (rows, 2)."""
    torch.ops.fusedce_native.d_logits_rows(logits, target, bias, *_row_options(options), *numbers, scale, out)


def _row_options(options: LogitOptions) -> tuple[int, float, float, Tensor | None]:
    slope = None if options.row_temperature is None else (1.0 / options.row_temperature.float())
    return options.ignore_index, options.temperature, options.softcap, slope


def _upstream_numbers(upstream: Upstream, like: Tensor) -> list[Tensor]:
    """d_logprob, d_entropy, d_lse as dense fp32 vectors: .sum() hands down an expanded gradient, N times one number."""
    return [torch.zeros_like(like) if grad is None else grad.to(like.dtype).contiguous() for grad in upstream]


def _chunks(hidden: Tensor, weight: Tensor) -> chunked.Chunks:
    row_bytes = _row_width(weight.shape[0]) * 4 + weight.shape[0] * hidden.element_size()
    return chunked.gemm_chunks(hidden, weight, arch.of_device(hidden.device).num_units, row_bytes)


def _row_bias(bias: Tensor | None) -> Tensor | None:
    """The bias in fp32: 4·V bytes once, so that the kernels need one dtype of it."""
    return None if bias is None else bias.float().contiguous()


def _row_width(vocab: int) -> int:
    """Words from one row of logits to the next, a multiple of what one access of the kernels moves.

    So every row is aligned, for them and for the GEMM, and summed in the same order wherever it lies in the chunk.
    """
    width = extension.tile("linear_ce_rows")["vector_width"]
    return -(-vocab // width) * width


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden · weightᵀ (N,V), accumulated and kept in fp32, its rows `_row_width` apart."""
    vocab = weight.shape[0]
    # Not kept from chunk to chunk: the allocator hands the same memory out again, and it is free during the GEMMs.
    out = hidden.new_empty((hidden.shape[0], _row_width(vocab)), dtype=torch.float32)[:, :vocab]
    if hidden.dtype == torch.float32:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
