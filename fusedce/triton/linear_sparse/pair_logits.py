"""The logits' gradient of the pairs that are worked: each tile of words against its own rows, gathered."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce import arch
from fusedce.budget import WORD_TILE
from fusedce.configs import GemmTile, tile_for
from fusedce.triton.common import dot, launch_options, round_to
from fusedce.triton.linear_ce.backward import d_raw_tile
from fusedce.triton.linear_ce.logits import capped
from fusedce.triton.linear_sparse.dense import Problem

STAGE, STAGE_WITH_OPTIONS = "linear_ce_pairs", "linear_ce_pairs_options"


@triton.jit
def pair_logits_bwd_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    target_ptr,
    row_ptr,
    table_ptr,
    pair_row_ptr,
    word_threshold_ptr,
    out_ptr,
    words_ptr,
    num_blocks,
    vocab,
    depth,
    hidden_stride,
    weight_stride,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    WORD_TILE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program owns BLOCK_P pairs of one tile of words and BLOCK_V of its words: out[pair, word of the tile] = the
    gradient of the loss in that plain logit, 0 past the vocabulary; words[pair, word block] = how many of them are from
    the word threshold on.

    table[3, block]: tile, first pair, end of the tile's pairs; a block without pairs ends at once. Offsets are int64.
    """
    block = tl.program_id(0)
    tile = tl.load(table_ptr + block)
    first = tl.load(table_ptr + num_blocks + block)
    end = tl.load(table_ptr + 2 * num_blocks + block)
    if first < end:
        offs_p = first + tl.arange(0, BLOCK_P)
        mask_p = offs_p < end
        row = tl.load(pair_row_ptr + offs_p, mask=mask_p, other=0)
        block_v = tile * (WORD_TILE // BLOCK_V) + tl.program_id(1)
        offs_v = block_v * BLOCK_V + tl.arange(0, BLOCK_V)
        # Words past the end read the last one, which costs less than a mask.
        word = tl.minimum(offs_v, vocab - 1)
        offs_d = tl.arange(0, BLOCK_D)
        hidden_ptrs = hidden_ptr + row.to(tl.int64)[:, None] * hidden_stride + offs_d[None, :]
        weight_ptrs = weight_ptr + word.to(tl.int64)[None, :] * weight_stride + offs_d[:, None]
        acc = tl.zeros((BLOCK_P, BLOCK_V), tl.float32)
        for start in range(0, depth, BLOCK_D):
            mask_d = offs_d < depth - start
            a = tl.load(hidden_ptrs, mask=mask_d[None, :], other=0.0)
            acc = dot(a, tl.load(weight_ptrs, mask=mask_d[:, None], other=0.0), acc)
            hidden_ptrs += BLOCK_D
            weight_ptrs += BLOCK_D
        if HAS_BIAS:
            acc += tl.load(bias_ptr + word).to(tl.float32)[None, :]
        if HAS_SOFTCAP:
            acc = capped(acc, softcap)
        target = tl.load(target_ptr + row, mask=mask_p, other=-1)
        d_raw = d_raw_tile(
            acc, row_ptr, row, mask_p, target, block_v, vocab, softcap, HAS_SOFTCAP, HAS_ENTROPY, BLOCK_V
        )
        d_raw = tl.where((offs_v < vocab)[None, :], d_raw, 0.0)
        rounded = round_to(d_raw, out_ptr.dtype.element_ty)
        in_tile = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
        out_ptrs = out_ptr + offs_p.to(tl.int64)[:, None] * WORD_TILE + in_tile[None, :]
        tl.store(out_ptrs, rounded, mask=mask_p[:, None])
        # Counted as they are stored, since that is how they are gathered.
        large = tl.abs(rounded.to(tl.float32)) >= tl.load(word_threshold_ptr)
        words_ptrs = words_ptr + offs_p * (WORD_TILE // BLOCK_V) + tl.program_id(1)
        tl.store(words_ptrs, tl.sum(large.to(tl.int32), 1), mask=mask_p)


KERNEL = pair_logits_bwd_kernel


def signature(dtype: str, tile: GemmTile | None = None) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        **dict.fromkeys(("hidden_ptr", "weight_ptr", "bias_ptr", "out_ptr"), f"*{dtype}"),
        "target_ptr": "*i64",
        **dict.fromkeys(("row_ptr", "word_threshold_ptr"), "*fp32"),
        **dict.fromkeys(("table_ptr", "pair_row_ptr", "words_ptr"), "*i32"),
        **dict.fromkeys(("num_blocks", "vocab", "depth", "hidden_stride", "weight_stride"), "i32"),
        "softcap": "fp32",
        **dict.fromkeys(constexprs(GemmTile(1, 1, 1, 1, 1)), "constexpr"),
    }


def constexprs(
    tile: GemmTile, has_bias: bool = True, has_softcap: bool = True, has_entropy: bool = True
) -> dict[str, int]:
    """The kernel's sizes and switches for a tile."""
    return {
        "HAS_BIAS": has_bias,
        "HAS_SOFTCAP": has_softcap,
        "HAS_ENTROPY": has_entropy,
        "WORD_TILE": WORD_TILE,
        "BLOCK_P": tile.block_m,
        "BLOCK_V": tile.block_n,
        "BLOCK_D": tile.block_k,
    }


def block_table(offsets: Tensor, capacity: int, block_p: int) -> Tensor:
    """table (3, blocks) int32: tile, first pair and end of each block of block_p pairs of one tile of words; as many
    blocks as the worst split could need, those that are not needed without pairs.

    offsets: (tiles + 1,) int32, where each tile's pairs begin.
    """
    num_tiles = offsets.shape[0] - 1
    num_blocks = capacity // block_p + min(num_tiles, capacity)
    blocks = (offsets.diff() + block_p - 1) // block_p
    ends = blocks.cumsum(0, dtype=torch.int32)
    index = torch.arange(num_blocks, dtype=torch.int32, device=offsets.device)
    tile = torch.searchsorted(ends, index, right=True, out_int32=True).clamp(max=num_tiles - 1)
    first = offsets[:-1].index_select(0, tile) + (index - (ends - blocks).index_select(0, tile)) * block_p
    return torch.stack((tile, first, offsets[1:].index_select(0, tile)))


def pair_logits(problem: Problem, offsets: Tensor, pair_row: Tensor, word_threshold: Tensor, out: Tensor) -> Tensor:
    """Fill out (pairs, WORD_TILE); returns (1,) int64, how many of its words are from the word threshold on.

    offsets: (tiles + 1,) int32, where each tile's pairs begin; pair_row: (pairs,) int32, the row of each.
    """
    hidden, weight, options = problem.hidden, problem.weight, problem.options
    machine = arch.of_device(hidden.device)
    has_bias, has_softcap = problem.bias is not None, options.softcap != 0.0
    tile = tile_for((STAGE, STAGE_WITH_OPTIONS)[has_bias or has_softcap], machine, hidden.element_size())
    table = block_table(offsets, out.shape[0], tile.block_m)
    words = pair_row.new_zeros((out.shape[0], WORD_TILE // tile.block_n))
    with torch.cuda.device_of(hidden):
        KERNEL[(table.shape[1], WORD_TILE // tile.block_n)](
            hidden, weight, weight if problem.bias is None else problem.bias, problem.target, problem.numbers,
            table, pair_row, word_threshold, out, words, table.shape[1], *weight.shape, hidden.stride(0),
            weight.stride(0), options.softcap,
            **constexprs(tile, has_bias, has_softcap, problem.has_entropy), **launch_options(tile, machine),
        )  # fmt: skip
    return words.sum(dtype=torch.int64)[None]
