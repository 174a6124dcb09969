"""The grouped GEMM of the weight gradients: each expert's rows are summed over, in order, in fp32."""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import describable, dot, grouped_order, launch_options, num_programs, operand, round_to
from fusedce.triton.moe.run import Run
from fusedce.triton.moe.tile_table import RowTiles

STAGE, STAGE_FEW = "moe_wgrad", "moe_wgrad_few"


@triton.jit
def weight_bwd_kernel(
    left,
    right,
    offsets_ptr,
    first_ptr,
    out,
    num_experts,
    num_tiles,
    height,
    width,
    left_stride,
    right_stride,
    out_stride_e,
    out_stride,
    ADD: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    TILE_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """A program takes one BLOCK_M × BLOCK_N tile of one expert's out = Σ_r left[r, :]ᵀ · right[r, :] after another and
    walks the expert's padded rows; ADD: out += it.

    Reads both operands from L2, writes the tile once, 0 for an expert without rows. Row and expert offsets are int64.
    """
    num_m = tl.cdiv(height, BLOCK_M)
    num_n = tl.cdiv(width, BLOCK_N)
    per_expert = num_m * num_n
    for tile in tl.range(tl.program_id(0), num_experts * per_expert, tl.num_programs(0), flatten=DESCRIPTORS):
        expert = tile // per_expert
        tile_m, tile_n = grouped_order(tile % per_expert, num_m, num_n, GROUP_M)
        start = tl.load(first_ptr + expert) * TILE_R
        count = tl.load(offsets_ptr + expert + 1) - tl.load(offsets_ptr + expert)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if DESCRIPTORS:
            # One step at least, for the loops to be one: past the last row descriptors read 0.
            start = tl.where(count == 0, num_tiles * TILE_R, start)
            for begin in range(0, tl.maximum(count, 1), BLOCK_R):
                a = left.load([start + begin, tile_m * BLOCK_M]).T
                acc = dot(a, right.load([start + begin, tile_n * BLOCK_N]), acc)
        else:
            offs_m = tl.minimum(tile_m * BLOCK_M + tl.arange(0, BLOCK_M), height - 1)
            offs_n = tl.minimum(tile_n * BLOCK_N + tl.arange(0, BLOCK_N), width - 1)
            offs_r = start.to(tl.int64) + tl.arange(0, BLOCK_R)
            for begin in range(0, count, BLOCK_R):
                mask_r = begin + tl.arange(0, BLOCK_R) < count
                a = tl.load(left + offs_r[None, :] * left_stride + offs_m[:, None], mask=mask_r[None, :], other=0.0)
                b = tl.load(right + offs_r[:, None] * right_stride + offs_n[None, :], mask=mask_r[:, None], other=0.0)
                acc = dot(a, b, acc)
                offs_r += BLOCK_R
        if DESCRIPTORS:
            values = round_to(acc, out.dtype).reshape(1, BLOCK_M, BLOCK_N)
            out.store([expert, tile_m * BLOCK_M, tile_n * BLOCK_N], values)
        else:
            offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            out_ptrs = out + expert.to(tl.int64) * out_stride_e + offs_m.to(tl.int64)[:, None] * out_stride
            out_ptrs += offs_n[None, :]
            mask = (offs_m < height)[:, None] & (offs_n < width)[None, :]
            if ADD:
                acc += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_ptrs, round_to(acc, out.dtype.element_ty), mask=mask)


KERNEL = weight_bwd_kernel


def signature(dtype: str, tile: GemmTile) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    by_tma = {
        "left": f"tensordesc<{dtype}[{tile.block_k}, {tile.block_m}]>",
        "right": f"tensordesc<{dtype}[{tile.block_k}, {tile.block_n}]>",
        "out": f"tensordesc<{dtype}[1, {tile.block_m}, {tile.block_n}]>",
    }
    by_pointer = dict.fromkeys(by_tma, f"*{dtype}")
    sizes = ("num_experts", "num_tiles", "height", "width", "left_stride", "right_stride", "out_stride_e", "out_stride")
    return {
        **(by_tma if tile.tma else by_pointer),
        **dict.fromkeys(("offsets_ptr", "first_ptr"), "*i32"),
        **dict.fromkeys(sizes, "i32"),
        **dict.fromkeys(constexprs(tile), "constexpr"),
    }


def constexprs(tile: GemmTile, *, add: bool = False, tile_r: int = 128) -> dict[str, int]:
    """The kernel's sizes and switches for a tile; its depth goes over the rows, in tiles of tile_r."""
    return {
        "ADD": add,
        "DESCRIPTORS": tile.tma,
        "TILE_R": tile_r,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_R": tile.block_k,
        "GROUP_M": tile.group_m,
    }


def weight_grad(left: Tensor, right: Tensor, tiles: RowTiles, run: Run, out: Tensor) -> Tensor:
    """Fill out (E,M,X) with Σ over each expert's padded rows r of left[r] (M) ⊗ right[r] (X); returned.

    out: the last two dimensions dense in either order.
    """
    if out.stride(2) != 1:
        weight_grad(right, left, tiles, run, out.mT)
        return out
    num_experts, height, width = out.shape
    tile = run.tile(STAGE, STAGE_FEW)
    can = all(map(describable, (left, right, out))) and out.dtype == left.dtype
    tile = replace(tile, tma=tile.tma and can)
    num_programs_all = num_experts * triton.cdiv(height, tile.block_m) * triton.cdiv(width, tile.block_n)
    with torch.cuda.device_of(left):
        KERNEL[(num_programs(num_programs_all, tile, run.machine),)](
            operand(left, tile, (tile.block_k, tile.block_m)), operand(right, tile, (tile.block_k, tile.block_n)),
            tiles.offsets, tiles.first, operand(out, tile, (1, tile.block_m, tile.block_n)), num_experts,
            tiles.num_tiles, height, width, left.stride(0), right.stride(0), out.stride(0), out.stride(1),
            **constexprs(tile, tile_r=tiles.block_r), **launch_options(tile, run.machine),
        )  # fmt: skip
    return out
