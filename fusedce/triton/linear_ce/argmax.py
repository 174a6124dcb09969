"""The largest logit's word: tiles of logits reduced to a number and an id as they are made."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.chunked import row_chunks
from fusedce.configs import GemmTile
from fusedce.options import LogitOptions
from fusedce.triton.common import grouped_order, unit_rows
from fusedce.triton.linear_ce.forward import PARTIAL_BYTES, head_of
from fusedce.triton.linear_ce.logits import constants, operand_types, raw_logits_tile

STAGE, STAGE_WITH_OPTIONS = "linear_ce_fwd", "linear_ce_fwd_options"  # as `head_of` has it
NO_WORD = tl.constexpr(2**31 - 1)


@triton.jit
def argmax_fwd_kernel(
    hidden,
    weight,
    bias_ptr,
    largest_ptr,
    word_ptr,
    num_rows,
    vocab,
    depth,
    hidden_stride,
    weight_stride,
    HAS_BIAS: tl.constexpr,
    EVEN_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """A program takes one BLOCK_N × BLOCK_V tile of logits after another and keeps the largest number of each row of it
    and the lowest word that has it: largest[word block, row] fp32 and word[word block, row] int32.

    NaN counts as +inf. Reads both operands of a tile once, from L2; writes 8 bytes a row and tile.
    """
    num_n = tl.cdiv(num_rows, BLOCK_N)
    num_v = tl.cdiv(vocab, BLOCK_V)
    for tile in tl.range(tl.program_id(0), num_n * num_v, tl.num_programs(0), flatten=DESCRIPTORS):
        block_n, block_v = grouped_order(tile, num_n, num_v, GROUP_N)
        raw = raw_logits_tile(
            hidden, weight, bias_ptr, block_n, block_v, num_rows, vocab, depth, hidden_stride, weight_stride,
            0.0, HAS_BIAS, False, EVEN_D, DESCRIPTORS, BLOCK_N, BLOCK_V, BLOCK_D,
        )  # fmt: skip
        offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_v = (block_v * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
        # Words past the vocabulary may hold NaN too. At −inf they come after every word, of equal ones the lowest.
        number = tl.where(offs_v < vocab, tl.where(raw == raw, raw, float("inf")), -float("inf"))
        largest = tl.max(number, 1)
        # Two reductions of one number each: one of pairs would keep twice the tile in registers.
        first = tl.min(tl.where(number == largest[:, None], offs_v, NO_WORD), 1)
        offs = block_v.to(tl.int64) * num_rows + offs_n
        tl.store(largest_ptr + offs, largest, mask=offs_n < num_rows)
        tl.store(word_ptr + offs, first, mask=offs_n < num_rows)


KERNEL = argmax_fwd_kernel


def signature(dtype: str, tile: GemmTile) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    operands = operand_types(dtype, tile)
    del operands["softcap"]
    return {
        **operands,
        "largest_ptr": "*fp32",
        "word_ptr": "*i32",
        **dict.fromkeys(constexprs(tile), "constexpr"),
    }


def constexprs(tile: GemmTile, depth: int = 0, has_bias: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches for a tile and D. A softcap moves no logit past another."""
    sizes = constants(tile, depth, has_bias, False)
    del sizes["HAS_SOFTCAP"]
    return sizes


def linear_argmax(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(N,) int64: the lowest id among a row's largest logits; −1 for a row with NaN or +inf."""
    hidden, weight = unit_rows(hidden), unit_rows(weight)
    words = hidden.new_empty(hidden.shape[0], dtype=torch.int64)
    num_splits = head_of(hidden, weight, bias, LogitOptions()).num_splits
    for start, stop in row_chunks(hidden.shape[0], 8 * num_splits, PARTIAL_BYTES):
        run = head_of(hidden[start:stop], weight, bias, LogitOptions())
        largest = hidden.new_empty((num_splits, stop - start), dtype=torch.float32)
        word = torch.empty_like(largest, dtype=torch.int32)
        *sizes, _ = run.sizes()
        with torch.cuda.device_of(hidden):
            KERNEL[run.grid()](
                *run.arguments(), largest, word, *sizes,
                **constexprs(run.tile, hidden.shape[1], bias is not None), **run.launch(),
            )  # fmt: skip
        most = largest.amax(0)
        first = torch.where(largest == most, word, NO_WORD.value).amin(0)
        words[start:stop] = torch.where(most == torch.inf, -1, first)
    return words
