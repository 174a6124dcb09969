"""Linear cross-entropy, native. On Hopper, with bf16 operands, by matrix products of our own: `hopper` and `seeded`.
Elsewhere a chunk's logits by one plain GEMM, in fp32, and one row kernel over them.

There the logits are written and read once, 8·V bytes a row, and no value is rounded to 16 bits before the softmax.
Kernels: csrc/kernels/linear_ce_rows.cu, which `logit_rows` calls.
"""

import torch
from torch import Tensor

from fusedce import chunked
from fusedce.hip import hopper, seeded
from fusedce.hip.logit_rows import LogitRows, chunks_of, logits_of, row_width
from fusedce.options import LogitOptions, Upstream, UpstreamOf
from fusedce.rows import row_gradient


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
    rows = LogitRows(hidden, target, bias, options)
    for start, stop in chunked.row_chunks(hidden.shape[0], row_width(weight.shape[0]) * 4):
        rows.statistics(start, stop, logits_of(hidden[start:stop], weight))
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
    of_rows = LogitRows(hidden, target, bias, options)
    chunks = chunks_of(hidden, weight)
    sums = chunked.GradientSums(hidden, weight, mask, chunks, scale)
    for start, stop in chunks:
        rows = chunked.kept_rows(hidden[start:stop], target[start:stop], options.ignore_index)
        part = gradient.of_rows(start, stop)
        d_logits = sums.d_logits(stop - start)
        of_rows.gradient(start, stop, logits_of(rows, weight), part, entropy[start:stop], normalizer, d_logits)
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
    of_rows = LogitRows(hidden, target, bias, options)
    chunks = chunks_of(hidden, weight)
    sums = chunked.GradientSums(hidden, weight, mask, chunks)

    def add(start: int, stop: int) -> None:
        rows = chunked.kept_rows(hidden[start:stop], target[start:stop], options.ignore_index)
        logits = logits_of(rows, weight)
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


def linear_parts(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    with_entropy: bool,
) -> Tensor:
    """(N,4): what a shard of the vocabulary knows of each row; see `fusedce.rows.merge_parts`.

    On every GPU by a plain GEMM and a row kernel. Memory and determinism: as `linear_logprob` there.
    """
    rows = LogitRows(hidden, target, bias, options)
    parts = hidden.new_empty((hidden.shape[0], 4), dtype=torch.float32)
    for start, stop in chunked.row_chunks(hidden.shape[0], row_width(weight.shape[0]) * 4):
        rows.parts(start, stop, logits_of(hidden[start:stop], weight), parts[start:stop])
    if not with_entropy:
        parts[:, 2] = 0.0
    return parts


def linear_ce_sum_backward(
    d_loss: Tensor, d_hidden: Tensor, d_weight: Tensor, d_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward's gradients times d_loss (); new tensors, so that a second backward finds them as they were."""
    return seeded.scaled(d_hidden, d_loss), seeded.scaled(d_weight, d_loss), seeded.scaled(d_bias, d_loss)
