"""Rows into padded rows: gathered from their tokens, or copied from the plan's order."""

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
    table_ptr,
    first_ptr,
    out_ptr,
    num_experts,
    num_tiles,
    top_k,
    depth,
    source_stride,
    out_stride,
    GATHER: tl.constexpr,
    TILE_R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program owns BLOCK_R padded rows and BLOCK_D columns: reads each element once and writes it once.

    GATHER: source is (N,D), and a row that of its slot's token; else source is (R,D). Rows past the expert's end and
    rows that serve no slot are written as 0. Row offsets are int64.
    """
    first = tl.program_id(0) * BLOCK_R
    tile = first // TILE_R
    if tile >= tl.load(first_ptr + num_experts + 1):
        return
    inside = first % TILE_R + tl.arange(0, BLOCK_R)
    row = tl.load(table_ptr + num_tiles + tile) + inside
    # The tiles of the rows that serve no slot have no rows here.
    served = row < tl.where(tl.load(table_ptr + tile) < num_experts, tl.load(table_ptr + 2 * num_tiles + tile), 0)
    if GATHER:
        row = tl.load(row_slot_ptr + row, mask=served, other=0) // top_k
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < depth
    source_ptrs = source_ptr + row.to(tl.int64)[:, None] * source_stride + offs_d[None, :]
    values = tl.load(source_ptrs, mask=served[:, None] & mask_d[None, :], other=0.0)
    padded = first.to(tl.int64) + tl.arange(0, BLOCK_R)
    tl.store(out_ptr + padded[:, None] * out_stride + offs_d[None, :], values, mask=mask_d[None, :])


KERNEL = pad_rows_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with rows of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        "source_ptr": f"*{dtype}",
        **dict.fromkeys(("row_slot_ptr", "table_ptr", "first_ptr"), "*i32"),
        "out_ptr": f"*{dtype}",
        **dict.fromkeys(("num_experts", "num_tiles", "top_k", "depth", "source_stride", "out_stride"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, gather: bool = True, *, tile_r: int = 128) -> dict[str, int]:
    """The kernel's sizes; tile_r: rows of a tile of the GEMM that reads the result."""
    return {"GATHER": gather, "TILE_R": tile_r, "BLOCK_R": min(tile_r, 8), "BLOCK_D": 1024}


def pad_rows(source: Tensor, tiles: RowTiles, *, gather: bool) -> Tensor:
    """source (N,D), gathered by token, or source (R,D), as padded rows."""
    source = unit_rows(source)
    depth = source.shape[1]
    out = tiles.padded(source, depth)
    sizes = constexprs(gather=gather, tile_r=tiles.block_r)
    if out.numel():
        grid = (out.shape[0] // sizes["BLOCK_R"], triton.cdiv(depth, sizes["BLOCK_D"]))
        with torch.cuda.device_of(source):
            KERNEL[grid](
                source, tiles.row_slot, tiles.table, tiles.first, out, tiles.num_experts, tiles.num_tiles,
                tiles.top_k, depth, source.stride(0), out.stride(0), **sizes, **ROW_LAUNCH,
            )  # fmt: skip
    return out
