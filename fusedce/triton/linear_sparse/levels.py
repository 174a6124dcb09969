"""How much of the gradient lies below each threshold, and how many pairs lie above: what the budget is spent by."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.budget import LEVELS, WORD_TILE
from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH
from fusedce.triton.linear_sparse.bounds import pair_bounds

STAGE = None
BLOCK_N, BLOCK_T, TILES = 128, 16, 64


@triton.jit
def levels_kernel(
    mass_ptr,
    row_ptr,
    own_tile_ptr,
    level_ptr,
    lost_ptr,
    count_ptr,
    num_rows,
    num_tiles,
    mass_stride,
    HAS_ENTROPY: tl.constexpr,
    WORD_TILE: tl.constexpr,
    LEVELS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program owns BLOCK_N rows of TILES tiles of words: lost[program, level] = Σ of the pairs' bounds below the
    level, fp32, count[program, level] = how many pairs are worked with it.

    Reads 2 bytes a pair.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < num_rows
    own_tile = tl.load(own_tile_ptr + offs_n, mask=mask_n, other=-1)
    offs_l = tl.arange(0, LEVELS)
    lost = tl.zeros((LEVELS,), tl.float32)
    count = tl.zeros((LEVELS,), tl.int32)
    first = tl.program_id(1) * TILES
    # Levels outside: a sum over the block costs far more than bounds made again, whose masses are in the cache.
    for index in range(LEVELS):
        level = tl.load(level_ptr + index)
        below = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        above = tl.zeros((BLOCK_T, BLOCK_N), tl.int32)
        for start in range(first, tl.minimum(first + TILES, num_tiles), BLOCK_T):
            tile = start + tl.arange(0, BLOCK_T)
            mask = (tile < num_tiles)[:, None] & mask_n[None, :]
            bound = pair_bounds(
                mass_ptr, row_ptr, tile[:, None], offs_n[None, :], mask, mass_stride, HAS_ENTROPY, WORD_TILE
            )
            worked = mask & ((bound >= level) | (own_tile[None, :] == tile[:, None]))
            below += tl.where(worked, 0.0, bound)
            above += worked.to(tl.int32)
        lost += tl.where(offs_l == index, tl.sum(tl.sum(below, 0), 0), 0.0)
        count += tl.where(offs_l == index, tl.sum(tl.sum(above, 0), 0), 0)
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(lost_ptr + program * LEVELS + offs_l, lost)
    tl.store(count_ptr + program * LEVELS + offs_l, count)


KERNEL = levels_kernel


def signature(dtype: str, tile: GemmTile | None = None) -> dict[str, str]:
    """Triton's type of every argument; `dtype` does not matter."""
    return {
        "mass_ptr": "*bf16",
        **dict.fromkeys(("row_ptr", "level_ptr", "lost_ptr"), "*fp32"),
        **dict.fromkeys(("own_tile_ptr", "count_ptr"), "*i32"),
        **dict.fromkeys(("num_rows", "num_tiles", "mass_stride"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, has_entropy: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches."""
    sizes = {"TILES": TILES, "BLOCK_N": BLOCK_N, "BLOCK_T": BLOCK_T}
    return {"HAS_ENTROPY": has_entropy, "WORD_TILE": WORD_TILE, "LEVELS": LEVELS, **sizes}


def below_levels(
    mass: Tensor, numbers: Tensor, own_tile: Tensor, levels: Tensor, has_entropy: bool
) -> tuple[Tensor, Tensor]:
    """lost (LEVELS,) fp64 and counts (LEVELS,) int64 over all pairs; NaN in a row makes lost NaN."""
    num_tiles, num_rows = mass.shape
    grid = (triton.cdiv(num_rows, BLOCK_N), triton.cdiv(num_tiles, TILES))
    lost = mass.new_empty((grid[0] * grid[1], LEVELS), dtype=torch.float32)
    counts = mass.new_empty(lost.shape, dtype=torch.int32)
    if num_rows:
        with torch.cuda.device_of(mass):
            KERNEL[grid](
                mass, numbers, own_tile, levels, lost, counts, num_rows, num_tiles, mass.stride(0),
                **constexprs(None, has_entropy), **ROW_LAUNCH,
            )  # fmt: skip
    return lost.sum(0, dtype=torch.float64), counts.sum(0, dtype=torch.int64)
