"""What every GPU backend of linear cross-entropy does around its logits kernel: chunks of rows and two plain GEMMs.

With d_logits of a chunk in a buffer of chunk × V, d_hidden = d_logits · weight and d_weight += d_logitsᵀ · hidden are
GEMMs that a vendor library runs at its full rate. The buffer is all of [tokens × vocab] that ever exists.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fusedce import env

ROW_MULTIPLE = 128


def row_chunks(num_rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """Balanced (start, stop) ranges over the rows, each within `env.workspace_bytes()`, multiples of 128 rows but the
    last.

    row_bytes: workspace bytes a row takes.
    """
    if num_rows == 0:
        return []
    most = max(env.workspace_bytes() // max(row_bytes, 1) // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    count = math.ceil(num_rows / most)
    step = math.ceil(num_rows / count / ROW_MULTIPLE) * ROW_MULTIPLE
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def batch_scale(*upstream: Tensor) -> Tensor:
    """The power of two, at least the largest finite |upstream gradient|, by which d_logits is divided while in 16 bits.

    A mean over 65,536 tokens makes gradients of 1.5e-5, times p of 1e-5: below what fp16 can hold. Divided, they are of
    the order of p; multiplied back in fp32 or by exponent alone, nothing is rounded twice. () fp32.
    """
    finite = torch.stack([torch.where(g.isfinite(), g.abs(), 0.0) for g in upstream])
    largest = finite.amax() if finite.numel() else finite.new_zeros(())
    return torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest))), 1.0).float()


def gradients(
    fill_d_logits: Callable[[int, int, Tensor], None],
    hidden: Tensor,
    weight: Tensor,
    kept: Tensor,
    mask: list[bool],
    scale: Tensor,
    row_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """d_hidden (N,D), d_weight (V,D), d_bias (V,) from a function that fills d_logits / scale of rows [start, stop).

    fill_d_logits(start, stop, out): writes all of out (stop - start, V), in hidden's dtype, its rows `out.stride(0)`
    apart. kept: (N,) bool, the rows that take part; the others may hold NaN or inf, which 0 · NaN would carry into
    d_weight, so they are read as 0. d_weight and d_bias are summed over the chunks in fp32. Gradients that `mask` does
    not want come back with no elements, and their GEMM is not run.
    """
    d_hidden = hidden.new_empty(hidden.shape if mask[0] else (0,))
    d_weight = weight.new_zeros(weight.shape if mask[1] else (0,), dtype=torch.float32)
    d_bias = weight.new_zeros(weight.shape[:1] if mask[2] else (0,), dtype=torch.float32)
    _accumulate(fill_d_logits, hidden, weight, kept, row_bytes, d_hidden, d_weight, d_bias)
    # The chunk's buffer is gone before d_weight is there twice, in fp32 and in its own dtype.
    return (
        d_hidden.mul_(scale.to(d_hidden.dtype)),
        d_weight.mul_(scale).to(weight.dtype),
        d_bias.mul_(scale).to(weight.dtype),
    )


def _accumulate(
    fill_d_logits: Callable[[int, int, Tensor], None],
    hidden: Tensor,
    weight: Tensor,
    kept: Tensor,
    row_bytes: int,
    d_hidden: Tensor,
    d_weight: Tensor,
    d_bias: Tensor,
) -> None:
    """Fill d_hidden and add to d_weight and d_bias, chunk by chunk; the empty ones are not wanted."""
    chunks = row_chunks(hidden.shape[0], row_bytes)
    # Rows padded to 16 bytes: the GEMMs and the kernels' stores are slow from rows that are not aligned. The padding is
    # zeros: torch's bf16 GEMM on a CPU reads it, and 0 · NaN is NaN.
    vocab = weight.shape[0]
    padded = hidden.new_empty((chunks[0][1] if chunks else 0, -(-vocab // 8) * 8))
    padded[:, vocab:] = 0
    buffer = padded[:, :vocab]
    for start, stop in chunks:
        d_logits = buffer[: stop - start]
        fill_d_logits(start, stop, d_logits)
        if d_hidden.numel():
            torch.mm(d_logits, weight, out=d_hidden[start:stop])
        if d_weight.numel():
            rows = torch.where(kept[start:stop, None], hidden[start:stop], 0.0)
            _add_product(d_weight, d_logits.t(), rows)
        if d_bias.numel():
            d_bias += d_logits.sum(0, dtype=torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left · right, with `total` in fp32 whatever the operands' dtype, as one GEMM."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:  # only Triton's interpreter comes here: a CPU has no GEMM with 16-bit operands and an fp32 result
        total.addmm_(left.float(), right.float())
