"""d_weight of the pairs: each tile of words sums over its own rows, gathered, in order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce import arch
from fusedce.budget import WORD_TILE
from fusedce.configs import GemmTile, tile_for
from fusedce.triton.common import dot, launch_options, round_to

STAGE = "linear_ce_pair_weight"


@triton.jit
def pair_weight_bwd_kernel(
    pairs_ptr,
    hidden_ptr,
    pair_row_ptr,
    offsets_ptr,
    count_ptr,
    scale_ptr,
    out_ptr,
    vocab,
    depth,
    hidden_stride,
    WORD_TILE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One program owns BLOCK_V words of one tile and BLOCK_D columns: out = scale · Σ pairs[pair, word] · hidden[row],
    over the tile's pairs in order, in fp32; 0 without any. Nothing is written where the count is below 0.

    Reads both operands from L2, writes each element once. Offsets are int64.
    """
    tile = tl.program_id(0) // (WORD_TILE // BLOCK_V)
    in_tile = tl.program_id(0) % (WORD_TILE // BLOCK_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_v = tile * WORD_TILE + in_tile
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < depth
    is_off = tl.load(count_ptr) < 0
    start = tl.load(offsets_ptr + tile)
    end = tl.where(is_off, start, tl.load(offsets_ptr + tile + 1))
    last_v = tl.where(is_off, 0, vocab)
    acc = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
    for first in range(start, end, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        mask_p = offs_p < end
        row = tl.load(pair_row_ptr + offs_p, mask=mask_p, other=0)
        a_ptrs = pairs_ptr + offs_p.to(tl.int64)[None, :] * WORD_TILE + in_tile[:, None]
        b_ptrs = hidden_ptr + row.to(tl.int64)[:, None] * hidden_stride + offs_d[None, :]
        a = tl.load(a_ptrs, mask=mask_p[None, :], other=0.0)
        acc = dot(a, tl.load(b_ptrs, mask=mask_p[:, None] & mask_d[None, :], other=0.0), acc)
    out_ptrs = out_ptr + offs_v.to(tl.int64)[:, None] * depth + offs_d[None, :]
    values = round_to(acc * tl.load(scale_ptr), out_ptr.dtype.element_ty)
    tl.store(out_ptrs, values, mask=(offs_v < last_v)[:, None] & mask_d[None, :])


KERNEL = pair_weight_bwd_kernel


def signature(dtype: str, tile: GemmTile | None = None) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        **dict.fromkeys(("pairs_ptr", "hidden_ptr", "out_ptr"), f"*{dtype}"),
        **dict.fromkeys(("pair_row_ptr", "offsets_ptr", "count_ptr"), "*i32"),
        "scale_ptr": "*fp32",
        **dict.fromkeys(("vocab", "depth", "hidden_stride"), "i32"),
        **dict.fromkeys(constexprs(GemmTile(1, 1, 1, 1, 1)), "constexpr"),
    }


def constexprs(tile: GemmTile) -> dict[str, int]:
    """The kernel's sizes for a tile; its depth goes over the pairs."""
    return {"WORD_TILE": WORD_TILE, "BLOCK_V": tile.block_m, "BLOCK_D": tile.block_n, "BLOCK_P": tile.block_k}


def pair_weight(
    pairs: Tensor, hidden: Tensor, pair_row: Tensor, offsets: Tensor, count: Tensor, scale: Tensor, out: Tensor
) -> None:
    """Fill out (V, D), unless count (1,) is below 0. offsets: (tiles + 1,) int32, where each tile's pairs begin."""
    machine = arch.of_device(out.device)
    tile = tile_for(STAGE, machine, out.element_size())
    blocks = (offsets.shape[0] - 1) * (WORD_TILE // tile.block_m)
    with torch.cuda.device_of(out):
        KERNEL[(blocks, triton.cdiv(out.shape[1], tile.block_n))](
            pairs, hidden, pair_row, offsets, count, scale, out, *out.shape, hidden.stride(0),
            **constexprs(tile), **launch_options(tile, machine),
        )  # fmt: skip
