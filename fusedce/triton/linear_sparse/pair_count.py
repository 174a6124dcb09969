"""How many pairs are worked: of each tile of words in each block of rows, and of each row in each range of tiles."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.budget import WORD_TILE
from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH
from fusedce.triton.linear_sparse.bounds import pair_bounds, row_weights

STAGE = None
BLOCK_N, TILES = 256, 32


@triton.jit
def pair_count_kernel(
    mass_ptr,
    row_ptr,
    own_tile_ptr,
    threshold_ptr,
    of_tile_ptr,
    of_row_ptr,
    num_rows,
    num_tiles,
    mass_stride,
    HAS_ENTROPY: tl.constexpr,
    WORD_TILE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program owns BLOCK_N rows of TILES tiles of words: of_tile[tile, row block] and of_row[row, range of tiles],
    int32. With a threshold below 0 no pair is worked.

    Reads 2 bytes a pair.
    """
    block = tl.program_id(0)
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    threshold = tl.load(threshold_ptr)
    mask_n = offs_n < num_rows
    mask_on = offs_n < tl.where(threshold < 0.0, 0, num_rows)
    own_tile = tl.load(own_tile_ptr + offs_n, mask=mask_n, other=-1)
    weight, surprise, entropy = row_weights(row_ptr, offs_n, mask_n, HAS_ENTROPY)
    of_row = tl.zeros((BLOCK_N,), tl.int32)
    first = tl.program_id(1) * TILES
    for tile in range(first, tl.minimum(first + TILES, num_tiles)):
        bound = pair_bounds(
            mass_ptr, weight, surprise, entropy, tile, offs_n, mask_on, mass_stride, HAS_ENTROPY, WORD_TILE
        )
        worked = (mask_on & ((bound >= threshold) | (own_tile == tile))).to(tl.int32)
        of_row += worked
        tl.store(of_tile_ptr + tile * tl.num_programs(0) + block, tl.sum(worked, 0))
    tl.store(of_row_ptr + offs_n.to(tl.int64) * tl.num_programs(1) + tl.program_id(1), of_row, mask=mask_n)


KERNEL = pair_count_kernel


def signature(dtype: str, tile: GemmTile | None = None) -> dict[str, str]:
    """Triton's type of every argument; `dtype` does not matter."""
    return {
        "mass_ptr": "*bf16",
        **dict.fromkeys(("row_ptr", "threshold_ptr"), "*fp32"),
        **dict.fromkeys(("own_tile_ptr", "of_tile_ptr", "of_row_ptr"), "*i32"),
        **dict.fromkeys(("num_rows", "num_tiles", "mass_stride"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, has_entropy: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches."""
    return {"HAS_ENTROPY": has_entropy, "WORD_TILE": WORD_TILE, "TILES": TILES, "BLOCK_N": BLOCK_N}


def pair_counts(
    mass: Tensor, numbers: Tensor, own_tile: Tensor, threshold: Tensor, has_entropy: bool
) -> tuple[Tensor, Tensor]:
    """of_tile (tiles, row blocks) and of_row (N, ranges), int32. threshold: (1,), below 0 for no pair at all."""
    num_tiles, num_rows = mass.shape
    grid = (triton.cdiv(num_rows, BLOCK_N), triton.cdiv(num_tiles, TILES))
    of_tile = own_tile.new_empty((num_tiles, grid[0]))
    of_row = own_tile.new_empty((num_rows, grid[1]))
    if num_rows:
        with torch.cuda.device_of(mass):
            KERNEL[grid](
                mass, numbers, own_tile, threshold, of_tile, of_row, num_rows, num_tiles, mass.stride(0),
                **constexprs(None, has_entropy), **ROW_LAUNCH,
            )  # fmt: skip
    return of_tile, of_row
