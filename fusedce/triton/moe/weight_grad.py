"""The grouped GEMM of the weight gradients: each expert's rows are summed over, in order, in fp32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import describable, dot, grouped_order, launch_options, operand, round_to
from fusedce.triton.moe.run import Run
from fusedce.triton.moe.tile_table import RowTiles

STAGE, STAGE_WITH_OPTIONS, STAGE_FEW = "moe_wgrad", "moe_wgrad_add", "moe_wgrad_few"


@triton.jit
def weight_bwd_kernel(
    left,
    right,
    offsets_ptr,
    first_ptr,
    out,
    height,
    width,
    left_stride,
    right_stride,
    out_stride_e,
    out_stride,
    ADD: tl.constexpr,
    STORES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    TILE_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One program owns a BLOCK_M × BLOCK_N tile of one expert's out = Σ_r left[r, :]ᵀ · right[r, :] and walks its
    padded rows. ADD: out += it. STORES: out is a descriptor too.

    Reads both operands from L2, writes the tile once, 0 for an expert without rows. Row and expert offsets are int64.
    """
    num_m = tl.cdiv(height, BLOCK_M)
    num_n = tl.cdiv(width, BLOCK_N)
    expert = tl.program_id(0) // (num_m * num_n)
    tile_m, tile_n = grouped_order(tl.program_id(0) % (num_m * num_n), num_m, num_n, GROUP_M)
    start = tl.load(first_ptr + expert) * TILE_R
    count = tl.load(offsets_ptr + expert + 1) - tl.load(offsets_ptr + expert)
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if DESCRIPTORS:
        for begin in range(0, count, BLOCK_R):
            a = left.load([start + begin, tile_m * BLOCK_M]).T
            acc = dot(a, right.load([start + begin, tile_n * BLOCK_N]), acc)
    else:
        left_ptrs = left + offs_m[:, None]
        right_ptrs = right + offs_n[None, :]
        mask_m = (offs_m < height)[:, None]
        mask_n = (offs_n < width)[None, :]
        offs_r = start.to(tl.int64) + tl.arange(0, BLOCK_R)
        for begin in range(0, count, BLOCK_R):
            mask_r = begin + tl.arange(0, BLOCK_R) < count
            a = tl.load(left_ptrs + offs_r[None, :] * left_stride, mask=mask_m & mask_r[None, :], other=0.0)
            b = tl.load(right_ptrs + offs_r[:, None] * right_stride, mask=mask_r[:, None] & mask_n, other=0.0)
            acc = dot(a, b, acc)
            offs_r += BLOCK_R
    if STORES:
        out.store([expert, tile_m * BLOCK_M, tile_n * BLOCK_N], round_to(acc, out.dtype).reshape(1, BLOCK_M, BLOCK_N))
    else:
        # The tile's corner in int64; inside it 32 bits do, and leave registers to the accumulators.
        corner = out + expert.to(tl.int64) * out_stride_e + tile_m.to(tl.int64) * BLOCK_M * out_stride
        out_ptrs = corner + tl.arange(0, BLOCK_M)[:, None] * out_stride + offs_n[None, :]
        mask = (offs_m < height)[:, None] & (offs_n < width)[None, :]
        if ADD:
            acc += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptrs, round_to(acc, out.dtype.element_ty), mask=mask)


KERNEL = weight_bwd_kernel


def signature(dtype: str, tile: GemmTile, add: bool = False) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    by_tma = {
        "left": f"tensordesc<{dtype}[{tile.block_k}, {tile.block_m}]>",
        "right": f"tensordesc<{dtype}[{tile.block_k}, {tile.block_n}]>",
        "out": f"tensordesc<{dtype}[1, {tile.block_m}, {tile.block_n}]>",
    }
    by_pointer = dict.fromkeys(by_tma, f"*{dtype}")
    sizes = ("height", "width", "left_stride", "right_stride", "out_stride_e", "out_stride")
    return {
        **(by_tma if tile.tma else by_pointer),
        **({"out": "*fp32"} if add else {}),
        **dict.fromkeys(("offsets_ptr", "first_ptr"), "*i32"),
        **dict.fromkeys(sizes, "i32"),
        **dict.fromkeys(constexprs(tile), "constexpr"),
    }


def constexprs(tile: GemmTile, add: bool = True, *, stores: int = 1, tile_r: int = 128) -> dict[str, int]:
    """The kernel's sizes and switches for a tile; its depth goes over the rows, in tiles of tile_r."""
    return {
        "ADD": add,
        "STORES": bool(stores) and tile.tma and not add,
        "DESCRIPTORS": tile.tma,
        "TILE_R": tile_r,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_R": tile.block_k,
        "GROUP_M": tile.group_m,
    }


def weight_grad(
    left: Tensor, right: Tensor, tiles: RowTiles, run: Run, weight: Tensor, main_grad: Tensor | None = None
) -> Tensor:
    """The gradient (E,M,X) of `weight`: Σ over each expert's padded rows r of left[r] (M) ⊗ right[r] (X).

    In the order in which the weight is stored. With main_grad, fp32, it is added there, and the result has no elements.
    """
    if main_grad is not None:
        _launch(left, right, tiles, run, main_grad, add=True)
        return weight.new_empty(0)
    out = torch.empty_like(weight)
    if 1 in out.stride()[1:]:
        return _launch(left, right, tiles, run, out, add=False)
    return out.copy_(_launch(left, right, tiles, run, weight.new_empty(weight.shape), add=False))


def _launch(left: Tensor, right: Tensor, tiles: RowTiles, run: Run, out: Tensor, *, add: bool) -> Tensor:
    """Fill out (E,M,X), one of the last two dimensions dense, or add to it."""
    if out.stride(2) != 1:
        _launch(right, left, tiles, run, out.mT, add=add)
        return out
    num_experts, height, width = out.shape
    tile = run.tile(STAGE_WITH_OPTIONS if add else STAGE, STAGE_FEW, describable(left) and describable(right))
    stores = tile.tma and not add and describable(out)
    grid = (num_experts * triton.cdiv(height, tile.block_m) * triton.cdiv(width, tile.block_n),)
    with torch.cuda.device_of(left):
        KERNEL[grid](
            operand(left, tile, (tile.block_k, tile.block_m)), operand(right, tile, (tile.block_k, tile.block_n)),
            tiles.offsets, tiles.first, operand(out, tile, (1, tile.block_m, tile.block_n)) if stores else out, height,
            width, left.stride(0), right.stride(0), out.stride(0), out.stride(1),
            **constexprs(tile, add, stores=int(stores), tile_r=tiles.block_r), **launch_options(tile, run.machine),
        )  # fmt: skip
    return out
