"""Padded rows: where each expert's rows start at a multiple of the tile, so that a tile has rows of one expert only.

The operands that the grouped GEMMs make for each other are padded: tile t holds rows [t·block_r, (t+1)·block_r) of
them, first the rows start[t] … end[t] − 1 of the plan, then zeros. So no tile is cut by a mask, neither where rows are
the height of a product nor where they are summed over. Which expert and rows a tile has is found on the device: the
host never learns the counts.
"""

from dataclasses import dataclass

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
    first_ptr,
    num_experts,
    num_rows,
    num_tiles,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program owns one expert's tiles: it sums the tiles of the experts before it and writes its own behind them.

    table[3, tile] = expert, first row, end of the expert's rows; first[e] = the expert's first tile. Expert number E
    stands for the rows that serve no slot, so that every row of a result is written by someone, and first[E + 1] is the
    number of tiles: what lies behind them in the table is not written. Reads 4·E bytes, writes 12 bytes a tile.
    """
    expert = tl.program_id(0)
    offs_e = tl.arange(0, BLOCK_E)
    starts = tl.load(offsets_ptr + offs_e, mask=offs_e <= num_experts, other=num_rows)
    ends = tl.load(offsets_ptr + offs_e + 1, mask=offs_e < num_experts, other=num_rows)
    tiles = tl.cdiv(ends - starts, BLOCK_R)
    first_tile = tl.sum(tl.where(offs_e < expert, tiles, 0), 0)
    own_tiles = tl.sum(tl.where(offs_e == expert, tiles, 0), 0)
    start = tl.sum(tl.where(offs_e == expert, starts, 0), 0)
    end = tl.sum(tl.where(offs_e == expert, ends, 0), 0)
    tl.store(first_ptr + expert, first_tile)
    if expert == num_experts:
        tl.store(first_ptr + expert + 1, first_tile + own_tiles)
    for begin in range(0, own_tiles, BLOCK_T):
        offs_t = begin + tl.arange(0, BLOCK_T)
        mask_t = offs_t < own_tiles
        ptrs = table_ptr + first_tile + offs_t
        tl.store(ptrs, tl.zeros_like(offs_t) + expert, mask=mask_t)
        tl.store(ptrs + num_tiles, start + offs_t * BLOCK_R, mask=mask_t)
        tl.store(ptrs + 2 * num_tiles, tl.zeros_like(offs_t) + end, mask=mask_t)


KERNEL = tile_table_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument; all are integers, whatever `dtype`."""
    return {
        **dict.fromkeys(("offsets_ptr", "table_ptr", "first_ptr"), "*i32"),
        **dict.fromkeys(("num_experts", "num_rows", "num_tiles"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, *, block_r: int = 128, num_experts: int = 128) -> dict[str, int]:
    """The kernel's sizes; block_r: rows of a tile of the GEMMs that read the table."""
    return {"BLOCK_R": block_r, "BLOCK_E": triton.next_power_of_2(num_experts + 1), "BLOCK_T": 128}


@dataclass(frozen=True)
class RowTiles:
    """The tiles of one plan. table (3, num_tiles) and first (E + 2,) int32: see the kernel.

    num_tiles: as many as the worst split of the rows could need; how many there are is first[E + 1].
    """

    table: Tensor
    first: Tensor
    offsets: Tensor
    row_slot: Tensor
    top_k: int
    block_r: int

    @property
    def num_experts(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def num_rows(self) -> int:
        return self.row_slot.shape[0]

    @property
    def num_tiles(self) -> int:
        return self.table.shape[1]

    def padded(self, like: Tensor, columns: int) -> Tensor:
        """An empty (num_tiles·block_r, columns) in like's dtype, its rows 16 bytes apart or a multiple."""
        multiple = 16 // like.element_size()
        whole = like.new_empty((self.num_tiles * self.block_r, -(-columns // multiple) * multiple))
        return whole[:, :columns]


def row_tiles(offsets: Tensor, row_slot: Tensor, top_k: int, block_r: int) -> RowTiles:
    """The tiles of a plan, of block_r rows each."""
    num_rows, num_experts = row_slot.shape[0], offsets.shape[0] - 1
    # Σ ⌈count/block⌉ over at most min(E + 1, rows) groups that have rows
    num_tiles = (num_rows + min(num_experts + 1, num_rows) * (block_r - 1)) // block_r
    table, first = offsets.new_empty((3, num_tiles)), offsets.new_empty(num_experts + 2)
    sizes = constexprs(block_r=block_r, num_experts=num_experts)
    with torch.cuda.device_of(offsets):
        KERNEL[(num_experts + 1,)](offsets, table, first, num_experts, num_rows, num_tiles, **sizes, **ROW_LAUNCH)
    return RowTiles(table, first, offsets, row_slot, top_k, block_r)
