"""Single words of each row, native: the greedy one, and log-probs of several.

On every GPU, Hopper too, a chunk's logits by one plain GEMM, in fp32, and row kernels over them:
csrc/kernels/linear_ce_words.cu.
"""

import torch
from torch import Tensor

from fusedce import chunked
from fusedce.hip.hopper import fp32_bias
from fusedce.hip.logit_rows import LogitRows, chunks_of, logits_of, row_width
from fusedce.options import LogitOptions
from fusedce.rows import RowGradient, Selection

# In place of a target: no word of the row is one, and the row takes no part. The caller's ignore_index may be either.
NO_TARGET, IGNORED = -1, -2


def linear_argmax(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(N,) int64: the lowest id among a row's largest logits; −1 for a row with NaN or +inf.

    Memory: one chunk's logits, within `env.workspace_bytes()`. Bitwise repeatable; but two logits within the rounding
    of fp32 may change places with the number of rows, by which the vendor library chooses its GEMM.
    """
    words, bias = hidden.new_empty(hidden.shape[0], dtype=torch.int64), fp32_bias(bias)
    for start, stop in chunked.row_chunks(hidden.shape[0], row_width(weight.shape[0]) * 4):
        logits = logits_of(hidden[start:stop], weight)
        torch.ops.fusedce_native.argmax_rows(logits, bias, words[start:stop])
        del logits
    return words


def linear_logprob_of(
    hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, options: LogitOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of every id (N,K), the target (N,) that the row's results are made with, and the normalizer (N,2).

    Memory and determinism: as `linear_argmax`, and 24·K bytes a row of the chunk.
    """
    ids, target = ids.contiguous(), ids.new_empty(ids.shape[0])
    rows = LogitRows(hidden, target, bias, options)
    normalizer = rows.results[-1]
    values = hidden.new_empty(ids.shape, dtype=torch.float32)

    def fill(start: int, stop: int) -> None:
        part, logits = slice(start, stop), logits_of(hidden[start:stop], weight)
        words = Selection(ids[part], options.of_rows(start, stop), weight.shape[0])
        raw = torch.empty_like(words.ids, dtype=torch.float32)
        torch.ops.fusedce_native.selected_logits(
            logits, rows.bias, words.ids, options.ignore_index, options.softcap, raw
        )
        target[part] = words.target(raw)
        rows.statistics(start, stop, logits)
        values[part] = words.logprobs(raw, normalizer[part])

    # A function, so that nothing of a chunk outlives it.
    for start, stop in chunked.row_chunks(hidden.shape[0], row_width(weight.shape[0]) * 4):
        fill(start, stop)
    return values, target, normalizer


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
    """d_hidden, d_weight, d_bias. See `fusedce.eager.selected` for the formula.

    Memory: as `linear_logprob_backward`, and 24·N·K bytes. Bitwise repeatable.
    """
    ids, logprob = ids.contiguous(), logprob.contiguous()
    words = Selection(ids, options, weight.shape[0])
    upstream = words.upstream(d_logprob.float())
    on_probs = words.on_probs(upstream, d_lse)
    scale = chunked.batch_scale(on_probs, upstream.abs().amax(1))
    upstream, on_probs, complement = upstream / scale, on_probs / scale, -torch.expm1(logprob)
    # Every word is written as one that is not selected; then those that are, once more.
    kept = target != options.ignore_index
    whole = LogitRows(hidden, torch.where(kept, NO_TARGET, IGNORED), bias, options, IGNORED)
    gradient = RowGradient(on_probs, None, torch.zeros_like(on_probs))
    chunks = chunks_of(hidden, weight)
    sums = chunked.GradientSums(hidden, weight, mask, chunks)
    for start, stop in chunks:
        part, d_logits = slice(start, stop), sums.d_logits(stop - start)
        rows = chunked.kept_rows(hidden[part], target[part], options.ignore_index)
        logits = logits_of(rows, weight)
        whole.gradient(start, stop, logits, gradient.of_rows(start, stop), on_probs[part], normalizer, d_logits)
        torch.ops.fusedce_native.selected_gradient(
            logits, whole.bias, ids[part], options.ignore_index, options.softcap,
            upstream[part], logprob[part], complement[part], on_probs[part], d_logits,
        )  # fmt: skip
        del logits, d_logits
        sums.add(start, stop, rows)
    return sums.result(scale)
