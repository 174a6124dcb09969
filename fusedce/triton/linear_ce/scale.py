"""A matrix times one number, times one number for each row: what is left of the backward when the gradients are there.

torch's product of a bf16 matrix with an fp32 number on the GPU is not vectorized.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH, round_to

STAGE = None
BLOCK_N, BLOCK_D = 4, 1024


@triton.jit
def scale_kernel(
    in_ptr,
    out_ptr,
    scale_ptr,
    factor_ptr,
    num_rows,
    depth,
    HAS_SCALE: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program owns a BLOCK_N × BLOCK_D tile of a dense matrix: reads it once, writes it once, rounds it once.

    Offsets are int64: rows × D may pass 2³¹.
    """
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_n = offs_n < num_rows
    offs = offs_n[:, None] * depth + offs_d[None, :]
    mask = mask_n[:, None] & (offs_d < depth)[None, :]
    values = tl.load(in_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        values *= tl.load(factor_ptr + offs_n, mask=mask_n, other=0.0)[:, None]
    if HAS_SCALE:
        values *= tl.load(scale_ptr)
    tl.store(out_ptr + offs, round_to(values, out_ptr.dtype.element_ty), mask=mask)


KERNEL = scale_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument."""
    return {
        **dict.fromkeys(("in_ptr", "out_ptr"), f"*{dtype}"),
        **dict.fromkeys(("scale_ptr", "factor_ptr"), "*fp32"),
        **dict.fromkeys(("num_rows", "depth"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, has_scale: bool = True, has_factor: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches; a row kernel has no tile."""
    return {"HAS_SCALE": has_scale, "HAS_FACTOR": has_factor, "BLOCK_N": BLOCK_N, "BLOCK_D": BLOCK_D}


def scaled(matrix: Tensor, scale: Tensor | None, factor: Tensor | None, out: Tensor) -> Tensor:
    """out = matrix · scale · factor[:, None]; scale () and factor (N,) fp32, or None for 1. `out` may be the matrix."""
    if matrix.numel():
        as_rows = matrix.reshape(matrix.shape[0], -1)
        num_rows, depth = as_rows.shape
        grid = (triton.cdiv(num_rows, BLOCK_N), triton.cdiv(depth, BLOCK_D))
        with torch.cuda.device_of(matrix):
            KERNEL[grid](
                matrix, out, matrix if scale is None else scale, matrix if factor is None else factor,
                num_rows, depth, **constexprs(None, scale is not None, factor is not None), **ROW_LAUNCH,
            )  # fmt: skip
    return out


def linear_ce_sum_backward(
    d_loss: Tensor, d_hidden: Tensor, d_weight: Tensor, d_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward's gradients times d_loss (); new tensors, so that a second backward finds them as they were."""
    scale = d_loss.float()
    grads = (d_hidden, d_weight, d_bias)
    d_hidden, d_weight, d_bias = (scaled(grad, scale, None, torch.empty_like(grad)) for grad in grads)
    return d_hidden, d_weight, d_bias
