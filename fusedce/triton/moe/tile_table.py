"""Which expert and rows each tile of a grouped GEMM works on, made on the device: the host never learns the counts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH

STAGE = None


@triton.jit
def tile_table_kernel(
    offsets_ptr,
    table_ptr,
    num_experts,
    num_rows,
    num_tiles,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program owns one expert's tiles: it sums the tiles of the experts before it and writes its own behind them.

    table[3, tile] = expert, first row, end of the expert's rows. Expert number E stands for the rows that serve no
    slot, so that every row of a result is written by someone; it also takes the unused end of the table, with no rows.
    Reads 4·E bytes, writes 12 bytes a tile.
    """
    expert = tl.program_id(0)
    offs_e = tl.arange(0, BLOCK_E)
    starts = tl.load(offsets_ptr + offs_e, mask=offs_e <= num_experts, other=num_rows)
    ends = tl.load(offsets_ptr + offs_e + 1, mask=offs_e < num_experts, other=num_rows)
    tiles = tl.cdiv(ends - starts, BLOCK_R)
    first_tile = tl.sum(tl.where(offs_e < expert, tiles, 0), 0)
    own_tiles = tl.sum(tl.where(offs_e == expert, tiles, 0), 0)
    own_tiles = tl.where(expert == num_experts, num_tiles - first_tile, own_tiles)
    start = tl.sum(tl.where(offs_e == expert, starts, 0), 0)
    end = tl.sum(tl.where(offs_e == expert, ends, 0), 0)
    for begin in range(0, own_tiles, BLOCK_T):
        offs_t = begin + tl.arange(0, BLOCK_T)
        mask_t = offs_t < own_tiles
        ptrs = table_ptr + first_tile + offs_t
        tl.store(ptrs, tl.zeros_like(offs_t) + expert, mask=mask_t)
        # In 64 bits: behind the last rows this may pass 2³¹.
        first_row = tl.minimum(start + offs_t.to(tl.int64) * BLOCK_R, end)
        tl.store(ptrs + num_tiles, first_row.to(tl.int32), mask=mask_t)
        tl.store(ptrs + 2 * num_tiles, tl.zeros_like(offs_t) + end, mask=mask_t)


KERNEL = tile_table_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument; all are integers, whatever `dtype`."""
    return {
        **dict.fromkeys(("offsets_ptr", "table_ptr"), "*i32"),
        **dict.fromkeys(("num_experts", "num_rows", "num_tiles"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, *, block_r: int = 128, num_experts: int = 128) -> dict[str, int]:
    """The kernel's sizes; block_r: rows of a tile of the GEMM that reads the table."""
    return {"BLOCK_R": block_r, "BLOCK_E": triton.next_power_of_2(num_experts + 1), "BLOCK_T": 128}


def tile_table(offsets: Tensor, num_rows: int, block_r: int) -> Tensor:
    """table (3, tiles) int32 for tiles of block_r rows; as many tiles as the worst split of the rows could need."""
    num_experts = offsets.shape[0] - 1
    # Σ ⌈count/block⌉ over at most min(E + 1, rows) groups that have rows
    num_tiles = (num_rows + min(num_experts + 1, num_rows) * (block_r - 1)) // block_r
    table = offsets.new_empty((3, num_tiles))
    if num_tiles:
        sizes = constexprs(block_r=block_r, num_experts=num_experts)
        with torch.cuda.device_of(offsets):
            KERNEL[(num_experts + 1,)](offsets, table, num_experts, num_rows, num_tiles, **sizes, **ROW_LAUNCH)
    return table
