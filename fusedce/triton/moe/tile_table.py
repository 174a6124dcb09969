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
    row_slot_ptr,
    slot_row_ptr,
    table_ptr,
    first_ptr,
    slot_padded_ptr,
    num_experts,
    num_rows,
    num_tiles,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program owns one tile: it counts the tiles of all experts to find whose rows it has, and places their slots.

    table[3, tile] = expert, first row, end of the expert's rows; first[e] = the expert's first tile. Expert number E
    stands for the rows that serve no slot, so that every row of a result is written by someone, and first[E + 1] is the
    number of tiles: what lies behind them in the table is not written. slot_padded[slot] = the padded row of the slot,
    or slot_row[slot] where that is negative. Reads 4·E bytes and 8 a row, writes 12 bytes and 4 a row.
    """
    tile = tl.program_id(0)
    inside = tl.arange(0, BLOCK_R)
    slots = tile * BLOCK_R + inside
    without = tl.load(slot_row_ptr + slots, mask=slots < num_rows, other=0)
    tl.store(slot_padded_ptr + slots, without, mask=without < 0)
    offs_e = tl.arange(0, BLOCK_E)
    # Offsets past the rows are a caller's mistake, which must not reach other memory.
    starts = tl.minimum(tl.load(offsets_ptr + offs_e, mask=offs_e <= num_experts, other=num_rows), num_rows)
    ends = tl.minimum(tl.load(offsets_ptr + offs_e + 1, mask=offs_e < num_experts, other=num_rows), num_rows)
    tiles = tl.cdiv(ends - starts, BLOCK_R)
    last = tl.cumsum(tiles, 0)
    if tile == 0:
        tl.store(first_ptr + offs_e, last - tiles, mask=offs_e <= num_experts)
        tl.store(first_ptr + num_experts + 1, tl.sum(tiles, 0))
    own = (last > tile) & (last - tiles <= tile)
    if tile < tl.sum(tiles, 0):
        start = tl.sum(tl.where(own, starts + (tile - (last - tiles)) * BLOCK_R, 0), 0)
        end = tl.sum(tl.where(own, ends, 0), 0)
        tl.store(table_ptr + tile, tl.sum(tl.where(own, offs_e, 0), 0))
        tl.store(table_ptr + num_tiles + tile, start)
        tl.store(table_ptr + 2 * num_tiles + tile, end)
        slot = tl.load(row_slot_ptr + start + inside, mask=start + inside < end, other=-1)
        tl.store(slot_padded_ptr + slot, slots, mask=slot >= 0)


KERNEL = tile_table_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument; all are integers, whatever `dtype`."""
    pointers = ("offsets_ptr", "row_slot_ptr", "slot_row_ptr", "table_ptr", "first_ptr", "slot_padded_ptr")
    return {
        **dict.fromkeys(pointers, "*i32"),
        **dict.fromkeys(("num_experts", "num_rows", "num_tiles"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, *, block_r: int = 128, num_experts: int = 128) -> dict[str, int]:
    """The kernel's sizes; block_r: rows of a tile of the GEMMs that read the table."""
    return {"BLOCK_R": block_r, "BLOCK_E": triton.next_power_of_2(num_experts + 1)}


@dataclass(frozen=True)
class RowTiles:
    """The tiles of one plan. table (3, num_tiles) and first (E + 2,) int32: see the kernel.

    slot_padded (N,K) int32: slot_row with padded rows. num_tiles: as many as the worst split of the rows could need;
    how many there are is first[E + 1].
    """

    table: Tensor
    first: Tensor
    slot_padded: Tensor
    offsets: Tensor
    row_slot: Tensor
    block_r: int

    @property
    def top_k(self) -> int:
        return self.slot_padded.shape[1]

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


def row_tiles(offsets: Tensor, row_slot: Tensor, slot_row: Tensor, block_r: int) -> RowTiles:
    """The tiles of a plan, of block_r rows each."""
    offsets, row_slot, slot_row = offsets.contiguous(), row_slot.contiguous(), slot_row.contiguous()
    num_rows, num_experts = row_slot.shape[0], offsets.shape[0] - 1
    # Σ ⌈count/block⌉ over at most min(E + 1, rows) groups that have rows
    num_tiles = (num_rows + min(num_experts + 1, num_rows) * (block_r - 1)) // block_r
    table, first = offsets.new_empty((3, num_tiles)), offsets.new_empty(num_experts + 2)
    # The kernel walks the rows; a plan with fewer rows than slots has slots that it does not come by.
    slot_padded = torch.empty_like(slot_row) if num_rows == slot_row.numel() else slot_row.clone()
    if num_tiles:
        with torch.cuda.device_of(offsets):
            KERNEL[(num_tiles,)](
                offsets, row_slot, slot_row, table, first, slot_padded, num_experts, num_rows, num_tiles,
                **constexprs(block_r=block_r, num_experts=num_experts), **ROW_LAUNCH,
            )  # fmt: skip
    return RowTiles(table, first, slot_padded, offsets, row_slot, block_r)
