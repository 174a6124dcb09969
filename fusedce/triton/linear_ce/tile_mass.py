"""The probability that each row gives to each tile of words: what the sparse backward decides by."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.budget import WORD_TILE
from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH, round_to
from fusedce.triton.linear_ce.logits import LOG2_E

STAGE = None
BLOCK_N = 128


@triton.jit
def tile_mass_kernel(
    partial_ptr,
    slope_ptr,
    normalizer_ptr,
    mass_ptr,
    num_rows,
    num_splits,
    mass_stride,
    PER_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program owns BLOCK_N rows of one tile of words: mass[tile, row] = Σ over its PER_TILE splits of what their
    words but the target have of the row's probability, cut upwards to bf16.

    Reads 8 bytes a row and split, writes 2 a row and tile. Offsets are int64: splits × rows may pass 2³¹.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(1)
    mask_n = offs_n < num_rows
    slope2 = tl.load(slope_ptr + offs_n, mask=mask_n, other=0.0) * LOG2_E
    shift = tl.load(normalizer_ptr + 2 * offs_n, mask=mask_n, other=0.0)
    log_sum = tl.load(normalizer_ptr + 2 * offs_n + 1, mask=mask_n, other=0.0) * LOG2_E
    mass = tl.zeros((BLOCK_N,), tl.float32)
    for part in tl.static_range(PER_TILE):
        split = tile * PER_TILE + part
        mask = offs_n < tl.where(split < num_splits, num_rows, 0)
        ptrs = partial_ptr + (split.to(tl.int64) * num_rows + offs_n) * 4
        split_max = tl.load(ptrs, mask=mask, other=-float("inf"))
        split_exp = tl.load(ptrs + 1, mask=mask, other=0.0)
        mass += split_exp * tl.exp2((split_max - shift) * slope2 - log_sum)
    # The bits after bf16's are all set first: cutting them then rounds up.
    bits = (mass * (1.0 + 1.0 / 1024)).to(tl.int32, bitcast=True)
    up = ((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    mass = tl.where(mass == mass, up, mass)
    tl.store(mass_ptr + tile.to(tl.int64) * mass_stride + offs_n, round_to(mass, tl.bfloat16), mask=mask_n)


KERNEL = tile_mass_kernel


def signature(dtype: str, tile: GemmTile | None = None) -> dict[str, str]:
    """Triton's type of every argument; `dtype` does not matter."""
    return {
        **dict.fromkeys(("partial_ptr", "slope_ptr", "normalizer_ptr"), "*fp32"),
        "mass_ptr": "*bf16",
        **dict.fromkeys(("num_rows", "num_splits", "mass_stride"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, per_tile: int = 2) -> dict[str, int]:
    """The kernel's sizes. per_tile: the forward's word blocks in one tile of words."""
    return {"PER_TILE": per_tile, "BLOCK_N": BLOCK_N}


def tile_mass(partial: Tensor, slopes: Tensor, normalizer: Tensor, block_v: int, mass: Tensor) -> None:
    """Fill mass (tiles, rows) bf16 from partial sums (splits, rows, 4) over blocks of block_v words."""
    num_splits, num_rows, _ = partial.shape
    with torch.cuda.device_of(partial):
        KERNEL[(triton.cdiv(num_rows, BLOCK_N), mass.shape[0])](
            partial, slopes, normalizer, mass, num_rows, num_splits, mass.stride(0),
            **constexprs(per_tile=WORD_TILE // block_v), **ROW_LAUNCH,
        )  # fmt: skip
