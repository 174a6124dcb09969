"""Rows into padded rows: each token, or each row of the plan, is read once and written where its rows are."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH, unit_rows
from fusedce.triton.moe.tile_table import RowTiles

STAGE = None


@triton.jit
def pad_rows_kernel(
    source_ptr,
    row_slot_ptr,
    slot_padded_ptr,
    table_ptr,
    first_ptr,
    out_ptr,
    num_sources,
    num_experts,
    num_tiles,
    depth,
    source_stride,
    out_stride,
    BY_TOKEN: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The first num_sources programs own a row of the source each, the others a tile; all of them BLOCK_D columns.

    BY_TOKEN: source is (N,D), and a token goes to its TOP_K slots' rows; else source is (R,D). A tile's program writes
    zeros behind its expert's rows, and in the tiles of the rows that serve no slot. Reads each element once, writes
    each once. Row offsets are int64.
    """
    owner = tl.program_id(0)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < depth
    if owner < num_sources:
        values = tl.load(source_ptr + owner.to(tl.int64) * source_stride + offs_d, mask=mask_d, other=0.0)
        for k in range(TOP_K):
            slot = owner * TOP_K + k
            if not BY_TOKEN:
                slot = tl.load(row_slot_ptr + owner)
            padded = tl.load(slot_padded_ptr + slot, mask=slot >= 0, other=-1).to(tl.int64)
            tl.store(out_ptr + padded * out_stride + offs_d, values, mask=offs_d < tl.where(padded < 0, 0, depth))
    else:
        tile = owner - num_sources
        if tile < tl.load(first_ptr + num_experts + 1):
            start = tl.load(table_ptr + num_tiles + tile)
            end = tl.load(table_ptr + 2 * num_tiles + tile)
            used = tl.where(tl.load(table_ptr + tile) < num_experts, end - start, 0)
            zeros = tl.zeros((BLOCK_D,), out_ptr.dtype.element_ty)
            for inside in range(used, TILE_R):
                padded = tile.to(tl.int64) * TILE_R + inside
                tl.store(out_ptr + padded * out_stride + offs_d, zeros, mask=mask_d)


KERNEL = pad_rows_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with rows of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        "source_ptr": f"*{dtype}",
        **dict.fromkeys(("row_slot_ptr", "slot_padded_ptr", "table_ptr", "first_ptr"), "*i32"),
        "out_ptr": f"*{dtype}",
        **dict.fromkeys(("num_sources", "num_experts", "num_tiles", "depth", "source_stride", "out_stride"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(
    tile: GemmTile | None = None, by_token: bool = True, *, top_k: int = 8, tile_r: int = 128
) -> dict[str, int]:
    """The kernel's sizes; tile_r: rows of a tile of the GEMM that reads the result."""
    return {"BY_TOKEN": by_token, "TOP_K": top_k if by_token else 1, "TILE_R": tile_r, "BLOCK_D": 1024}


def pad_rows(source: Tensor, tiles: RowTiles, *, by_token: bool) -> Tensor:
    """source (N,D), of tokens, or source (R,D) as padded rows."""
    source = unit_rows(source)
    num_sources, depth = source.shape
    out = tiles.padded(source, depth)
    sizes = constexprs(by_token=by_token, top_k=tiles.top_k, tile_r=tiles.block_r)
    if out.numel():
        with torch.cuda.device_of(source):
            KERNEL[(num_sources + tiles.num_tiles, triton.cdiv(depth, sizes["BLOCK_D"]))](
                source, tiles.row_slot, tiles.slot_padded, tiles.table, tiles.first, out, num_sources,
                tiles.num_experts, tiles.num_tiles, depth, source.stride(0), out.stride(0), **sizes, **ROW_LAUNCH,
            )  # fmt: skip
    return out
