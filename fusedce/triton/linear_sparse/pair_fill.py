"""The lists of pairs: by tile of words, rows in order, and by row, tiles in order. Integers only, so the order is
fixed."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.budget import WORD_TILE
from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH
from fusedce.triton.linear_sparse.bounds import pair_bounds, row_weights
from fusedce.triton.linear_sparse.pair_count import BLOCK_N, TILES

STAGE = None


@triton.jit
def pair_fill_kernel(
    mass_ptr,
    row_ptr,
    own_tile_ptr,
    threshold_ptr,
    of_tile_ptr,
    of_row_ptr,
    pair_row_ptr,
    row_pair_ptr,
    row_tile_ptr,
    num_rows,
    num_tiles,
    mass_stride,
    HAS_ENTROPY: tl.constexpr,
    WORD_TILE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program owns the pairs of BLOCK_N rows and TILES tiles of words, as in `pair_count`, whose counts have become
    the places where each one's begin. pair_row[pair] = row; row_pair[place] = pair and row_tile[place] = its tile.

    Reads 2 bytes a pair, writes 12 a worked one.
    """
    block = tl.program_id(0)
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    threshold = tl.load(threshold_ptr)
    mask_n = offs_n < tl.where(threshold < 0.0, 0, num_rows)
    own_tile = tl.load(own_tile_ptr + offs_n, mask=mask_n, other=-1)
    place = tl.load(of_row_ptr + offs_n.to(tl.int64) * tl.num_programs(1) + tl.program_id(1), mask=mask_n, other=0)
    weight, surprise, entropy = row_weights(row_ptr, offs_n, mask_n, HAS_ENTROPY)
    first = tl.program_id(1) * TILES
    last = tl.where(threshold < 0.0, first, tl.minimum(first + TILES, num_tiles))
    for tile in range(first, last):
        bound = pair_bounds(
            mass_ptr, weight, surprise, entropy, tile, offs_n, mask_n, mass_stride, HAS_ENTROPY, WORD_TILE
        )
        worked = mask_n & ((bound >= threshold) | (own_tile == tile))
        rank = tl.cumsum(worked.to(tl.int32), 0)
        pair = tl.load(of_tile_ptr + tile * tl.num_programs(0) + block) + rank - 1
        tl.store(pair_row_ptr + pair, offs_n, mask=worked)
        tl.store(row_pair_ptr + place, pair, mask=worked)
        tl.store(row_tile_ptr + place, tl.zeros_like(pair) + tile, mask=worked)
        place += worked.to(tl.int32)


KERNEL = pair_fill_kernel


def signature(dtype: str, tile: GemmTile | None = None) -> dict[str, str]:
    """Triton's type of every argument; `dtype` does not matter."""
    integers = ("own_tile_ptr", "of_tile_ptr", "of_row_ptr", "pair_row_ptr", "row_pair_ptr", "row_tile_ptr")
    return {
        "mass_ptr": "*bf16",
        **dict.fromkeys(("row_ptr", "threshold_ptr"), "*fp32"),
        **dict.fromkeys(integers, "*i32"),
        **dict.fromkeys(("num_rows", "num_tiles", "mass_stride"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, has_entropy: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches; the blocks are those of `pair_count`."""
    return {"HAS_ENTROPY": has_entropy, "WORD_TILE": WORD_TILE, "TILES": TILES, "BLOCK_N": BLOCK_N}


def fill_pairs(
    mass: Tensor,
    numbers: Tensor,
    own_tile: Tensor,
    threshold: Tensor,
    has_entropy: bool,
    of_tile: Tensor,
    of_row: Tensor,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """pair_row, row_pair and row_tile (capacity,) int32, from where each count's pairs begin (`pair_count`)."""
    num_tiles, num_rows = mass.shape
    lists = own_tile.new_empty((3, capacity)).unbind(0)
    if num_rows:
        with torch.cuda.device_of(mass):
            KERNEL[(triton.cdiv(num_rows, BLOCK_N), triton.cdiv(num_tiles, TILES))](
                mass, numbers, own_tile, threshold, of_tile, of_row, *lists, num_rows, num_tiles, mass.stride(0),
                **constexprs(None, has_entropy), **ROW_LAUNCH,
            )  # fmt: skip
    return lists[0], lists[1], lists[2]
