"""d_bias: sums over rows of the logits' gradient, of all words of a chunk or of the pairs of each tile of words."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.budget import WORD_TILE
from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH, round_to

STAGE = None
BLOCK_N, BLOCK_V = 32, 64


@triton.jit
def d_bias_bwd_kernel(
    values_ptr,
    offsets_ptr,
    count_ptr,
    scale_ptr,
    out_ptr,
    vocab,
    values_stride,
    IN_PAIRS: tl.constexpr,
    WORD_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program owns BLOCK_V words: out = scale · Σ values over the first *count_ptr rows, in order, in fp32. Nothing
    is written where the count is below 0.

    IN_PAIRS: values are (pairs, WORD_TILE), and a tile of words sums over its own pairs, offsets[tile] and following.
    Reads each value once. Offsets are int64: rows × words may pass 2³¹.
    """
    count = tl.load(count_ptr)
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < tl.where(count < 0, 0, vocab)
    first = 0
    last = count
    column = offs_v
    if IN_PAIRS:
        tile = tl.program_id(0) * BLOCK_V // WORD_TILE
        first = tl.load(offsets_ptr + tile)
        last = tl.where(count < 0, first, tl.load(offsets_ptr + tile + 1))
        column = offs_v % WORD_TILE
    total = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(first, last, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        ptrs = values_ptr + offs_n.to(tl.int64)[:, None] * values_stride + column[None, :]
        total += tl.sum(tl.load(ptrs, mask=(offs_n < last)[:, None] & mask_v[None, :], other=0.0).to(tl.float32), 0)
    tl.store(out_ptr + offs_v, round_to(total * tl.load(scale_ptr), out_ptr.dtype.element_ty), mask=mask_v)


KERNEL = d_bias_bwd_kernel


def signature(dtype: str, tile: GemmTile | None = None) -> dict[str, str]:
    """Triton's type of every argument, with values and a result of `dtype`."""
    return {
        **dict.fromkeys(("values_ptr", "out_ptr"), f"*{dtype}"),
        **dict.fromkeys(("offsets_ptr", "count_ptr"), "*i32"),
        "scale_ptr": "*fp32",
        **dict.fromkeys(("vocab", "values_stride"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, in_pairs: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches."""
    return {"IN_PAIRS": in_pairs, "WORD_TILE": WORD_TILE, "BLOCK_N": BLOCK_N, "BLOCK_V": BLOCK_V}


def d_bias(values: Tensor, offsets: Tensor | None, count: Tensor, scale: Tensor, out: Tensor) -> None:
    """out (words,) from values (N, words), or, with offsets (tiles + 1,) int32, from values (pairs, WORD_TILE)."""
    with torch.cuda.device_of(values):
        KERNEL[(triton.cdiv(out.shape[0], BLOCK_V),)](
            values, count if offsets is None else offsets, count, scale, out, out.shape[0], values.stride(0),
            **constexprs(in_pairs=offsets is not None), **ROW_LAUNCH,
        )  # fmt: skip
