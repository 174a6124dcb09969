"""The grouped GEMM of the weight gradients: each expert's rows are summed over, in order, in fp32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce import arch
from fusedce.configs import GemmTile, tile_for
from fusedce.triton.common import dot, grouped_order, launch_options, round_to

STAGE = "moe_wgrad"


@triton.jit
def weight_bwd_kernel(
    left_ptr,
    right_ptr,
    row_slot_ptr,
    offsets_ptr,
    out_ptr,
    top_k,
    height,
    width,
    left_stride,
    right_stride,
    GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One program owns a BLOCK_M × BLOCK_N tile of one expert's out = Σ_r left[r, :]ᵀ · right[r, :] and walks its rows.

    GATHER: right is hidden, and row r of it the token of r's slot. Reads both operands from L2, writes the tile once,
    0 for an expert without rows. Row and expert offsets are int64.
    """
    num_m = tl.cdiv(height, BLOCK_M)
    num_n = tl.cdiv(width, BLOCK_N)
    expert = tl.program_id(0) // (num_m * num_n)
    tile_m, tile_n = grouped_order(tl.program_id(0) % (num_m * num_n), num_m, num_n, GROUP_M)
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = offs_m < height
    mask_n = offs_n < width
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(start, end, BLOCK_R):
        offs_r = begin + tl.arange(0, BLOCK_R)
        mask_r = offs_r < end
        right_row = offs_r
        if GATHER:
            right_row = tl.load(row_slot_ptr + offs_r, mask=mask_r, other=0) // top_k
        left_ptrs = left_ptr + offs_r.to(tl.int64)[None, :] * left_stride + offs_m[:, None]
        right_ptrs = right_ptr + right_row.to(tl.int64)[:, None] * right_stride + offs_n[None, :]
        left = tl.load(left_ptrs, mask=mask_m[:, None] & mask_r[None, :], other=0.0)
        right = tl.load(right_ptrs, mask=mask_r[:, None] & mask_n[None, :], other=0.0)
        acc = dot(left, right, acc)
    out_rows = expert.to(tl.int64) * height + offs_m
    out_ptrs = out_ptr + out_rows[:, None] * width + offs_n[None, :]
    tl.store(out_ptrs, round_to(acc, out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


KERNEL = weight_bwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        **dict.fromkeys(("left_ptr", "right_ptr"), f"*{dtype}"),
        **dict.fromkeys(("row_slot_ptr", "offsets_ptr"), "*i32"),
        "out_ptr": f"*{dtype}",
        **dict.fromkeys(("top_k", "height", "width", "left_stride", "right_stride"), "i32"),
        **dict.fromkeys(constexprs(GemmTile(1, 1, 1, 1, 1)), "constexpr"),
    }


def constexprs(tile: GemmTile, gather: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches for a tile; its depth goes over the rows."""
    return {
        "GATHER": gather,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_R": tile.block_k,
        "GROUP_M": tile.group_m,
    }


def weight_grad(left: Tensor, right: Tensor, offsets: Tensor, row_slot: Tensor, top_k: int, *, gather: bool) -> Tensor:
    """out (E,M,X) = Σ over each expert's rows r of left[r] (M) ⊗ right[r] (X); gather: right[row_slot[r] // top_k]."""
    num_experts, height, width = offsets.shape[0] - 1, left.shape[1], right.shape[1]
    machine = arch.of_device(left.device)
    tile = tile_for(STAGE, machine, left.element_size())
    out = left.new_empty((num_experts, height, width))
    grid = (num_experts * triton.cdiv(height, tile.block_m) * triton.cdiv(width, tile.block_n),)
    with torch.cuda.device_of(left):
        KERNEL[grid](
            left, right, row_slot, offsets, out, top_k, height, width, left.stride(0), right.stride(0),
            **constexprs(tile, gather), **launch_options(tile, machine),
        )  # fmt: skip
    return out
