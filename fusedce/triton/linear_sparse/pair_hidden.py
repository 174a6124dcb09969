"""d_hidden of the pairs: each row's large words, one after another, each a number times a row of weight."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce import arch
from fusedce.budget import WORD_TILE
from fusedce.configs import GemmTile
from fusedce.triton.common import FP_FUSION, round_to

STAGE = None
# A row is too little work for more warps; with so many programs a unit, loads of some rows hide behind others'.
LAUNCH = {"num_warps": 4, **FP_FUSION}
PROGRAMS_A_UNIT = 16
MOST_BLOCK_D = 2048


@triton.jit
def pair_hidden_bwd_kernel(
    pairs_ptr,
    weight_ptr,
    row_pair_ptr,
    row_tile_ptr,
    row_start_ptr,
    word_threshold_ptr,
    count_ptr,
    scale_ptr,
    out_ptr,
    dropped_ptr,
    num_rows,
    depth,
    weight_stride,
    num_ranges,
    WORD_TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program takes one row after another: out[row] = scale · Σ d · weight[word] over the words of its pairs with |d|
    from the word threshold on, pair by pair, the largest first; dropped[row] = Σ |d| of the others. Nothing is done
    where the count is below 0.

    Reads WORD_TILE numbers a pair and D a word, from L2 where words are frequent. Offsets are int64.
    """
    threshold = tl.load(word_threshold_ptr)
    scale = tl.load(scale_ptr)
    last_row = tl.where(tl.load(count_ptr) < 0, 0, num_rows)
    offs_w = tl.arange(0, WORD_TILE)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < depth
    for row in range(tl.program_id(0), last_row, tl.num_programs(0)):
        acc = tl.zeros((BLOCK_D,), tl.float32)
        dropped = 0.0
        start = tl.load(row_start_ptr + row * num_ranges)
        end = tl.load(row_start_ptr + (row + 1) * num_ranges)
        for place in range(start, end):
            pair_ptr = pairs_ptr + tl.load(row_pair_ptr + place).to(tl.int64) * WORD_TILE
            first_word = tl.load(row_tile_ptr + place) * WORD_TILE
            size = tl.abs(tl.load(pair_ptr + offs_w).to(tl.float32))
            largest, word = tl.max(size, 0, return_indices=True)
            while largest >= threshold:
                weight_ptrs = weight_ptr + (first_word + word).to(tl.int64) * weight_stride + offs_d
                d = tl.load(pair_ptr + word).to(tl.float32)
                acc += d * tl.load(weight_ptrs, mask=mask_d, other=0.0).to(tl.float32)
                size = tl.where(offs_w == word, -1.0, size)
                largest, word = tl.max(size, 0, return_indices=True)
            dropped += tl.sum(tl.maximum(size, 0.0), 0)
        out_ptrs = out_ptr + (tl.zeros((BLOCK_D,), tl.int64) + row) * depth + offs_d
        tl.store(out_ptrs, round_to(acc * scale, out_ptr.dtype.element_ty), mask=mask_d)
        # Every block of D has the same number.
        tl.store(dropped_ptr + row, dropped)


KERNEL = pair_hidden_bwd_kernel


def signature(dtype: str, tile: GemmTile | None = None) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        **dict.fromkeys(("pairs_ptr", "weight_ptr", "out_ptr"), f"*{dtype}"),
        **dict.fromkeys(("row_pair_ptr", "row_tile_ptr", "row_start_ptr", "count_ptr"), "*i32"),
        **dict.fromkeys(("word_threshold_ptr", "scale_ptr", "dropped_ptr"), "*fp32"),
        **dict.fromkeys(("num_rows", "depth", "weight_stride", "num_ranges"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, depth: int = MOST_BLOCK_D) -> dict[str, int]:
    """The kernel's sizes for D."""
    return {"WORD_TILE": WORD_TILE, "BLOCK_D": min(triton.next_power_of_2(depth), MOST_BLOCK_D)}


def pair_hidden(
    pairs: Tensor,
    weight: Tensor,
    lists: tuple[Tensor, Tensor, Tensor],
    num_ranges: int,
    word_threshold: Tensor,
    count: Tensor,
    scale: Tensor,
    out: Tensor,
) -> Tensor:
    """Fill out (N, D); returns dropped (N,) fp32. lists: row_pair, row_tile, and row_starts (N · num_ranges + 1,),
    where those of each row begin. With a count (1,) below 0 nothing is written, and dropped is 0."""
    num_rows, depth = out.shape
    dropped = out.new_zeros(num_rows, dtype=torch.float32)
    if num_rows:
        sizes = constexprs(depth=depth)
        programs = min(num_rows, PROGRAMS_A_UNIT * arch.of_device(out.device).num_units)
        with torch.cuda.device_of(out):
            KERNEL[(programs, triton.cdiv(depth, sizes["BLOCK_D"]))](
                pairs, weight, *lists, word_threshold, count, scale, out, dropped, num_rows, depth,
                weight.stride(0), num_ranges, **sizes, **LAUNCH,
            )  # fmt: skip
    return dropped
