"""What the grouped GEMMs from rows to rows share: how an expert's weight is read, and the loop with one accumulator."""

import triton
import triton.language as tl
from torch import Tensor

from fusedce.triton.common import dot


def unit_weight(weight: Tensor) -> tuple[Tensor, int, bool]:
    """(weight, stride, K_CONTIGUOUS) of weight (E,X,K): which of the last two dimensions has its elements side by side.

    A weight stored as (E,X,K) or as (E,K,X) is read where it lies, also as a view with gaps; any other is copied.
    """
    if weight.stride(2) != 1 and weight.stride(1) != 1:
        weight = weight.contiguous()
    k_contiguous = weight.stride(2) == 1
    return weight, weight.stride(1 if k_contiguous else 2), k_contiguous


@triton.jit
def weight_offsets(offs_n, offs_k, stride, K_CONTIGUOUS: tl.constexpr):
    """Offsets (K, N) into one expert's weight. int64: strides of views are as large as they like."""
    if K_CONTIGUOUS:
        offsets = offs_n.to(tl.int64)[None, :] * stride + offs_k[:, None]
    else:
        offsets = offs_k.to(tl.int64)[:, None] * stride + offs_n[None, :]
    return offsets


@triton.jit
def weight_step(stride, K_CONTIGUOUS: tl.constexpr, BLOCK_K: tl.constexpr):
    """How far the next BLOCK_K of the depth lies."""
    return BLOCK_K if K_CONTIGUOUS else tl.cast(stride, tl.int64) * BLOCK_K


@triton.jit
def expert_product(
    left_ptr,
    weight_ptr,
    offs_r,
    mask_r,
    offs_n,
    mask_n,
    depth,
    left_stride,
    stride,
    K_CONTIGUOUS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Σ_k left[r, k] · weight[n, k] in fp32, weight_ptr already at the expert. Row offsets are int64."""
    offs_k = tl.arange(0, BLOCK_K)
    # Past the expert's rows row 0 is read, whose products the caller does not store: one mask less in the loop.
    rows = tl.where(mask_r, offs_r, 0).to(tl.int64)
    left_ptrs = left_ptr + rows[:, None] * left_stride + offs_k[None, :]
    weight_ptrs = weight_ptr + weight_offsets(offs_n, offs_k, stride, K_CONTIGUOUS)
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for begin in range(0, depth, BLOCK_K):
        mask_k = offs_k < depth - begin
        left = tl.load(left_ptrs, mask=mask_k[None, :], other=0.0)
        weight = tl.load(weight_ptrs, mask=mask_n[None, :] & mask_k[:, None], other=0.0)
        acc = dot(left, weight, acc)
        left_ptrs += BLOCK_K
        weight_ptrs += weight_step(stride, K_CONTIGUOUS, BLOCK_K)
    return acc
