"""Linear cross-entropy, native: a chunk's logits by one plain GEMM, in fp32, and one row kernel over them.

The logits are written and read once, 8·V bytes a row, and no value is rounded to 16 bits before the softmax. Kernels:
csrc/kernels/linear_ce_rows.cu.
"""

from dataclasses import astuple

import torch
from torch import Tensor

from fusedce import chunked
from fusedce.hip import extension
from fusedce.options import LogitOptions, Upstream


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprob, entropy, lse (N,) and normalizer (N,2), fp32. See `fusedce.eager.linear_ce` for the formula.

    Memory: one chunk's logits, within `env.workspace_bytes()`. Bitwise repeatable; but a row's bits may depend on the
    number of rows, by which the vendor library chooses its GEMM.
    """
    num_rows, vocab = hidden.shape[0], weight.shape[0]
    logprob, entropy, lse = (hidden.new_empty(num_rows, dtype=torch.float32) for _ in range(3))
    normalizer = hidden.new_empty((num_rows, 2), dtype=torch.float32)
    target, bias = target.contiguous(), _row_bias(bias)
    for start, stop in chunked.row_chunks(num_rows, _row_width(vocab) * 4):
        torch.ops.fusedce_native.logprob_rows(
            _logits(hidden[start:stop], weight), target[start:stop], bias, *astuple(options),
            logprob[start:stop], entropy[start:stop], lse[start:stop], normalizer[start:stop],
        )  # fmt: skip
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
    """d_hidden (N,D), d_weight (V,D), d_bias (V,). See `fusedce.eager.linear_ce` for the formula.

    Memory: one chunk's logits and their gradient, within `env.workspace_bytes()`, and d_weight in fp32. Bitwise
    repeatable.
    """
    scale = chunked.batch_scale(*upstream)
    # .sum() hands down an expanded gradient, N times one number; the kernel reads N numbers.
    d_logprob, d_entropy, d_lse = (grad.contiguous() for grad in upstream)
    entropy, normalizer = entropy.contiguous(), normalizer.contiguous()
    target, row_bias = target.contiguous(), _row_bias(bias)
    vocab = weight.shape[0]
    row_bytes = _row_width(vocab) * 4 + vocab * hidden.element_size()

    def fill_d_logits(start: int, stop: int, out: Tensor) -> None:
        torch.ops.fusedce_native.d_logits_rows(
            _logits(hidden[start:stop], weight), target[start:stop], row_bias, *astuple(options),
            d_logprob[start:stop], d_entropy[start:stop], d_lse[start:stop],
            entropy[start:stop], normalizer[start:stop], scale, out,
        )  # fmt: skip

    return chunked.gradients(fill_d_logits, hidden, weight, target != options.ignore_index, mask, scale, row_bytes)


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
