"""Linear cross-entropy, native. On Hopper, with bf16 operands, by matrix products of our own: `hopper` and `seeded`.
Elsewhere a chunk's logits by one plain GEMM, in fp32, and one row kernel over them.

There the logits are written and read once, 8·V bytes a row, and no value is rounded to 16 bits before the softmax.
Kernels: csrc/kernels/linear_ce_rows.cu.
"""

import torch
from torch import Tensor

from fusedce import arch, chunked
from fusedce.hip import extension, hopper, seeded
from fusedce.options import LogitOptions, Upstream, UpstreamOf
from fusedce.rows import RowGradient, row_gradient, row_slopes


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
    if hopper.suits(hidden, weight):
        return hopper.logprob(hidden, weight, target, bias, options, with_entropy)
    rows = _Rows(hidden, target, bias, options)
    for start, stop in chunked.row_chunks(hidden.shape[0], _row_width(weight.shape[0]) * 4):
        rows.statistics(start, stop, _logits(hidden[start:stop], weight))
    logprob, entropy, lse, normalizer = rows.results
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
    if hopper.suits(hidden, weight):
        return hopper.logprob_backward(
            upstream, hidden, weight, target, bias, logprob, entropy, normalizer, options, mask
        )
    gradient = row_gradient(upstream, logprob, entropy, target, options)
    scale = chunked.batch_scale(*gradient)
    gradient = gradient.over(scale)
    of_rows = _Rows(hidden, target, bias, options)
    chunks = _chunks(hidden, weight)
    sums = chunked.GradientSums(hidden, weight, mask, chunks, scale)
    for start, stop in chunks:
        rows = chunked.kept_rows(hidden[start:stop], target[start:stop], options.ignore_index)
        part = gradient.of_rows(start, stop)
        d_logits = sums.d_logits(stop - start)
        of_rows.gradient(start, stop, _logits(rows, weight), part, entropy[start:stop], normalizer, d_logits)
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
    own logits. Four with fp16 operands, where what d_logits is to be scaled by is known after the last row, and on
    Hopper with the entropy, whose gradient needs more of a row than one factor.
    """
    if hopper.suits(hidden, weight) and not with_entropy:
        return seeded.fused(hidden, weight, target, bias, options, mask, upstream_of)
    if hidden.dtype == torch.float16 or hopper.suits(hidden, weight):
        return chunked.in_two_passes(
            linear_logprob, linear_logprob_backward,
            hidden, weight, target, bias, options, mask, upstream_of, with_entropy,
        )  # fmt: skip
    of_rows = _Rows(hidden, target, bias, options)
    chunks = _chunks(hidden, weight)
    sums = chunked.GradientSums(hidden, weight, mask, chunks)

    def add(start: int, stop: int) -> None:
        rows = chunked.kept_rows(hidden[start:stop], target[start:stop], options.ignore_index)
        logits = _logits(rows, weight)
        of_rows.statistics(start, stop, logits)
        logprob, entropy, lse, normalizer = of_rows.results
        logprob, entropy, lse = logprob[start:stop], entropy[start:stop], lse[start:stop]
        upstream = upstream_of(start, stop, logprob, entropy if with_entropy else entropy[:0], lse)
        part = row_gradient(upstream, logprob, entropy, target[start:stop], options.of_rows(start, stop))
        of_rows.gradient(start, stop, logits, part, entropy, normalizer, sums.d_logits(stop - start))
        sums.add(start, stop, rows)

    # A function, so that nothing of a chunk outlives it.
    for start, stop in chunks:
        add(start, stop)
    logprob, entropy, lse, _ = of_rows.results
    return logprob, entropy if with_entropy else entropy[:0], lse, *sums.result(None)


def linear_ce_sum_backward(
    d_loss: Tensor, d_hidden: Tensor, d_weight: Tensor, d_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward's gradients times d_loss (); new tensors, so that a second backward finds them as they were."""
    return seeded.scaled(d_hidden, d_loss), seeded.scaled(d_weight, d_loss), seeded.scaled(d_bias, d_loss)


class _Rows:
    """The row kernels over a chunk's logits: what they are given of all rows, and the results (N,) that they fill."""

    def __init__(self, hidden: Tensor, target: Tensor, bias: Tensor | None, options: LogitOptions) -> None:
        num_rows = hidden.shape[0]
        self.target, self.bias, self.options = target.contiguous(), hopper.fp32_bias(bias), options
        self.slopes = row_slopes(options, num_rows, hidden)
        logprob, entropy, lse = (hidden.new_empty(num_rows, dtype=torch.float32) for _ in range(3))
        self.results = logprob, entropy, lse, hidden.new_empty((num_rows, 2), dtype=torch.float32)

    def _given(self, start: int, stop: int) -> tuple[Tensor, Tensor | None, Tensor, int, float]:
        rows = slice(start, stop)
        return self.target[rows], self.bias, self.slopes[rows], self.options.ignore_index, self.options.softcap

    def statistics(self, start: int, stop: int, logits: Tensor) -> None:
        """Fill rows [start, stop) of the results from their logits (rows, V)."""
        torch.ops.fusedce_native.logprob_rows(
            logits, *self._given(start, stop), *(result[start:stop] for result in self.results)
        )

    def gradient(
        self,
        start: int,
        stop: int,
        logits: Tensor,
        gradient: RowGradient,
        entropy: Tensor,
        normalizer: Tensor,
        out: Tensor,
    ) -> None:
        """Fill out (rows, V) for rows [start, stop); normalizer: of all rows, the others of these."""
        numbers = [None if number is None else number.contiguous() for number in gradient]
        torch.ops.fusedce_native.d_logits_rows(
            logits, *self._given(start, stop), *numbers, entropy.contiguous(), normalizer[start:stop], out
        )


def _chunks(hidden: Tensor, weight: Tensor) -> chunked.Chunks:
    row_bytes = _row_width(weight.shape[0]) * 4 + weight.shape[0] * hidden.element_size()
    return chunked.gemm_chunks(hidden, weight, arch.of_device(hidden.device).num_units, row_bytes)


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
