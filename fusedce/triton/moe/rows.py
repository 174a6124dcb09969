"""The grouped GEMM from padded rows to rows: the down projection forward, and d_hidden's rows backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import describable, grouped_order, launch_options, operand, round_to
from fusedce.triton.moe.product import ExpertWeight, expert_product, rows_type, weight_type
from fusedce.triton.moe.run import Run
from fusedce.triton.moe.tile_table import RowTiles

STAGE, STAGE_FEW = "moe_rows", "moe_rows_few"


@triton.jit
def rows_fwd_kernel(
    left,
    weight,
    bias_ptr,
    row_slot_ptr,
    top_k_weights_ptr,
    table_ptr,
    first_ptr,
    out,
    num_tiles,
    num_experts,
    width,
    depth,
    left_stride,
    stride_e,
    stride,
    out_stride,
    HAS_BIAS: tl.constexpr,
    PADDED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    K_CONTIGUOUS: tl.constexpr,
    EVEN_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_R: tl.constexpr,
):
    """A program takes one BLOCK_R × BLOCK_N tile after another of out = left · weight[e]ᵀ + bias[e], times the routing
    weights if WEIGHTED.

    Reads both operands from L2, writes the tile once, as padded rows or (not PADDED) in the plan's order; rows that
    serve no slot are 0, rows of padding anything. Row, expert and weight offsets are int64.
    """
    num_n = tl.cdiv(width, BLOCK_N)
    num_r = tl.load(first_ptr + num_experts + 1)
    for tile in tl.range(tl.program_id(0), num_r * num_n, tl.num_programs(0), flatten=DESCRIPTORS):
        tile_r, tile_n = grouped_order(tile, num_r, num_n, GROUP_R)
        expert = tl.load(table_ptr + tile_r)
        offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < width
        acc = expert_product(
            left, weight, tile_r, tile_n, expert, offs_n, mask_n,
            # No expert, no products: the accumulator stays 0. Descriptors read zeros there.
            depth if DESCRIPTORS else tl.where(expert < num_experts, depth, 0), left_stride, stride_e, stride,
            K_CONTIGUOUS, False, EVEN_K, DESCRIPTORS, BLOCK_R, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if HAS_BIAS:
            mask_b = offs_n < tl.where(expert < num_experts, width, 0)
            bias = tl.load(bias_ptr + expert.to(tl.int64) * width + offs_n, mask=mask_b, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        start = tl.load(table_ptr + num_tiles + tile_r)
        offs_r = tl.arange(0, BLOCK_R)
        mask_r = start + offs_r < tl.load(table_ptr + 2 * num_tiles + tile_r)
        if WEIGHTED:
            slot = tl.load(row_slot_ptr + start + offs_r, mask=mask_r, other=-1)
            weights = tl.load(top_k_weights_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)
            acc = acc * weights[:, None]
        if PADDED and DESCRIPTORS:
            out.store([tile_r * BLOCK_R, tile_n * BLOCK_N], round_to(acc, out.dtype))
        else:
            # The tile's first row in int64; inside it 32 bits do, and leave registers to the accumulators.
            first = tile_r * BLOCK_R if PADDED else start
            out_ptrs = out + first.to(tl.int64) * out_stride + offs_r[:, None] * out_stride + offs_n[None, :]
            mask = mask_n[None, :] if PADDED else mask_r[:, None] & mask_n[None, :]
            tl.store(out_ptrs, round_to(acc, out.dtype.element_ty), mask=mask)


KERNEL = rows_fwd_kernel


def signature(dtype: str, tile: GemmTile, padded: bool = True, k_contiguous: bool = True) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    sizes = ("num_tiles", "num_experts", "width", "depth", "left_stride", "stride_e", "stride", "out_stride")
    return {
        "left": rows_type(dtype, tile, tile.block_k),
        "weight": weight_type(dtype, tile, k_contiguous),
        "bias_ptr": f"*{dtype}",
        "row_slot_ptr": "*i32",
        "top_k_weights_ptr": "*fp32",
        **dict.fromkeys(("table_ptr", "first_ptr"), "*i32"),
        "out": rows_type(dtype, tile, tile.block_n) if padded else f"*{dtype}",
        **dict.fromkeys(sizes, "i32"),
        **dict.fromkeys(constexprs(tile), "constexpr"),
    }


def constexprs(
    tile: GemmTile,
    has_bias: bool = True,
    weighted: bool = True,
    *,
    padded: bool = True,
    k_contiguous: bool = True,
    depth: int = 0,
) -> dict[str, int]:
    """The kernel's sizes and switches for a tile; depth: of the products."""
    return {
        "HAS_BIAS": has_bias,
        "PADDED": padded,
        "WEIGHTED": weighted,
        "K_CONTIGUOUS": k_contiguous,
        "EVEN_K": depth % tile.block_k == 0,
        "DESCRIPTORS": tile.tma,
        "BLOCK_R": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_R": tile.group_m,
    }


def expert_rows(
    left: Tensor,
    weight: Tensor,
    tiles: RowTiles,
    run: Run,
    *,
    bias: Tensor | None = None,
    top_k_weights: Tensor | None = None,
    padded: bool = True,
) -> Tensor:
    """left (padded rows, Y) · weight[e] (E,X,Y)ᵀ + bias[e] (E,X), each row times its slot's weight where top_k_weights
    is given: padded rows (·,X), or (R,X) in the plan's order."""
    depth, width = left.shape[1], weight.shape[1]
    reader = ExpertWeight.of(weight)
    out = tiles.padded(left, width) if padded else left.new_empty((tiles.num_rows, width))
    by_tma = reader.describable() and describable(left) and (not padded or describable(out))
    tile = run.tile(STAGE, STAGE_FEW, by_tma)
    if tiles.num_rows:
        with torch.cuda.device_of(left):
            KERNEL[run.grid(tiles, width, tile, tile.block_n)](
                operand(left, tile, (tile.block_m, tile.block_k)), reader.operand(tile), left if bias is None else bias,
                tiles.row_slot, left if top_k_weights is None else top_k_weights, tiles.table, tiles.first,
                operand(out, tile, (tile.block_m, tile.block_n)) if padded else out, tiles.num_tiles,
                tiles.num_experts, width, depth, left.stride(0), *reader.strides, out.stride(0),
                **constexprs(
                    tile, bias is not None, top_k_weights is not None, padded=padded,
                    k_contiguous=reader.k_contiguous, depth=depth,
                ),
                **launch_options(tile, run.machine),
            )  # fmt: skip
    return out
