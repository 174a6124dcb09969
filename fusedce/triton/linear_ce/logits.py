"""One tile of logits in registers: the GEMM's inner loop, bias, softcap and temperature. Shared by forward and
backward."""

import triton
import triton.language as tl

from fusedce.triton.common import dot


@triton.jit
def logits_tile(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    offs_n,
    offs_v,
    num_rows,
    vocab,
    depth,
    hidden_stride,
    weight_stride,
    inv_temperature,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The logits of rows offs_n and words offs_v in fp32; −inf past the vocabulary.

    Row and word offsets are int64: rows × D and words × D may pass 2³¹. Rows and words past the end read the last one,
    which costs less than a mask in the inner loop; EVEN_D (D is a multiple of BLOCK_D) does without the last mask.
    """
    mask_v = offs_v < vocab
    offs_n = tl.minimum(offs_n, num_rows - 1)
    offs_v = tl.minimum(offs_v, vocab - 1)
    offs_d = tl.arange(0, BLOCK_D)
    hidden_ptrs = hidden_ptr + offs_n.to(tl.int64)[:, None] * hidden_stride + offs_d[None, :]
    weight_ptrs = weight_ptr + offs_v.to(tl.int64)[None, :] * weight_stride + offs_d[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(0, depth, BLOCK_D):
        if EVEN_D:
            hidden = tl.load(hidden_ptrs)
            weight = tl.load(weight_ptrs)
        else:
            mask_d = offs_d < depth - start
            hidden = tl.load(hidden_ptrs, mask=mask_d[None, :], other=0.0)
            weight = tl.load(weight_ptrs, mask=mask_d[:, None], other=0.0)
        acc = dot(hidden, weight, acc)
        hidden_ptrs += BLOCK_D
        weight_ptrs += BLOCK_D
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_v).to(tl.float32)[None, :]
    if HAS_SOFTCAP:
        # tanh(x) = 1 − 2/(exp(2x) + 1): right at both ends, where exp overflows to inf or vanishes
        acc = softcap * (1.0 - 2.0 / (tl.exp(2.0 * acc / softcap) + 1.0))
    return tl.where(mask_v[None, :], acc * inv_temperature, -float("inf"))


@triton.jit
def logits_slope(logits, inv_temperature, softcap, HAS_SOFTCAP: tl.constexpr):
    """d logits / d plain logits, from the logits: a second tile kept beside them would not fit the registers."""
    slope = inv_temperature
    if HAS_SOFTCAP:
        bent = logits / (softcap * inv_temperature)
        slope = (1.0 - bent * bent) * inv_temperature
    return slope
