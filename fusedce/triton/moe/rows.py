"""The grouped GEMM from rows to rows: the down projection forward, and d_hidden's rows backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce import arch
from fusedce.configs import GemmTile, tile_for
from fusedce.triton.common import grouped_order, launch_options, round_to
from fusedce.triton.moe.product import expert_product, unit_weight
from fusedce.triton.moe.tile_table import tile_table

STAGE = "moe_rows"


@triton.jit
def rows_fwd_kernel(
    left_ptr,
    weight_ptr,
    row_slot_ptr,
    top_k_weights_ptr,
    table_ptr,
    out_ptr,
    num_tiles,
    num_experts,
    width,
    depth,
    stride_e,
    stride,
    WEIGHTED: tl.constexpr,
    K_CONTIGUOUS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_R: tl.constexpr,
):
    """One program owns a BLOCK_R × BLOCK_N tile of out = left · weight[e]ᵀ, times the routing weights if WEIGHTED.

    Reads both operands from L2, writes the tile once; rows that serve no slot are 0. Row, expert and weight offsets are
    int64.
    """
    tile_r, tile_n = grouped_order(tl.program_id(0), num_tiles, tl.cdiv(width, BLOCK_N), GROUP_R)
    expert = tl.load(table_ptr + tile_r)
    start = tl.load(table_ptr + num_tiles + tile_r)
    end = tl.load(table_ptr + 2 * num_tiles + tile_r)
    if start >= end:
        return
    offs_r = start + tl.arange(0, BLOCK_R)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_r = offs_r < end
    mask_n = offs_n < width
    acc = expert_product(
        left_ptr, weight_ptr + expert.to(tl.int64) * stride_e, offs_r, mask_r, offs_n, mask_n,
        # No expert, no products: the accumulator stays 0.
        tl.where(expert < num_experts, depth, 0), depth, stride, K_CONTIGUOUS, BLOCK_R, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if WEIGHTED:
        slot = tl.load(row_slot_ptr + offs_r, mask=mask_r, other=-1)
        weights = tl.load(top_k_weights_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)
        acc = acc * weights[:, None]
    out_ptrs = out_ptr + offs_r.to(tl.int64)[:, None] * width + offs_n[None, :]
    tl.store(out_ptrs, round_to(acc, out_ptr.dtype.element_ty), mask=mask_r[:, None] & mask_n[None, :])


KERNEL = rows_fwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    sizes = ("num_tiles", "num_experts", "width", "depth", "stride_e", "stride")
    return {
        **dict.fromkeys(("left_ptr", "weight_ptr"), f"*{dtype}"),
        "row_slot_ptr": "*i32",
        "top_k_weights_ptr": "*fp32",
        "table_ptr": "*i32",
        "out_ptr": f"*{dtype}",
        **dict.fromkeys(sizes, "i32"),
        **dict.fromkeys(constexprs(GemmTile(1, 1, 1, 1, 1)), "constexpr"),
    }


def constexprs(tile: GemmTile, weighted: bool = True, k_contiguous: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches for a tile."""
    return {
        "WEIGHTED": weighted,
        "K_CONTIGUOUS": k_contiguous,
        "BLOCK_R": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_R": tile.group_m,
    }


def expert_rows(
    left: Tensor, weight: Tensor, offsets: Tensor, row_slot: Tensor, top_k_weights: Tensor | None = None
) -> Tensor:
    """out (R,X) = left (R,Y) · weight[e] (E,X,Y)ᵀ, each row times its slot's weight where top_k_weights is given.

    left: contiguous. weight: any strides, see `unit_weight`.
    """
    (num_rows, depth), (num_experts, width, _) = left.shape, weight.shape
    weight, stride, k_contiguous = unit_weight(weight)
    machine = arch.of_device(left.device)
    tile = tile_for(STAGE, machine, left.element_size())
    table = tile_table(offsets, num_rows, tile.block_m)
    out = left.new_empty((num_rows, width))
    weighted = top_k_weights is not None
    if num_rows:
        grid = (table.shape[1] * triton.cdiv(width, tile.block_n),)
        with torch.cuda.device_of(left):
            KERNEL[grid](
                left, weight, row_slot, top_k_weights if weighted else left, table, out, table.shape[1], num_experts,
                width, depth, weight.stride(0), stride,
                **constexprs(tile, weighted, k_contiguous), **launch_options(tile, machine),
            )  # fmt: skip
    return out
