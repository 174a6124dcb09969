"""The forward: tiles of logits reduced as they are made. Nothing of N × V is kept."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.chunked import row_chunks
from fusedce.configs import GemmTile
from fusedce.options import LogitOptions
from fusedce.rows import row_slopes
from fusedce.triton.common import grouped_order, unit_rows
from fusedce.triton.linear_ce.finish import merge_partials
from fusedce.triton.linear_ce.logits import (
    LOG2_E,
    Head,
    constants,
    head,
    operand_types,
    raw_logits_tile,
    words_but_target,
)
from fusedce.triton.linear_ce.target_logit import target_logit
from fusedce.triton.linear_ce.tile_mass import tile_mass

STAGE, STAGE_WITH_OPTIONS = "linear_ce_fwd", "linear_ce_fwd_options"
# Partial sums of one launch: enough rows for every SM many times over, and small beside the model.
PARTIAL_BYTES = 64 << 20


@triton.jit
def logprob_fwd_kernel(
    hidden,
    weight,
    bias_ptr,
    target_ptr,
    slope_ptr,
    flag_ptr,
    partial_ptr,
    num_rows,
    vocab,
    depth,
    hidden_stride,
    weight_stride,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    IF_FLAGGED: tl.constexpr,
    EVEN_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """A program takes one BLOCK_N × BLOCK_V tile of logits after another and keeps three fp32 numbers a row of it.

    partial[word block, row, 4] = maximum m of the raw logits, Σ 2^g, Σ 2^g·g, with g = (raw − m)·slope2: the row's
    target left out of all three. IF_FLAGGED: nothing is done unless *flag_ptr is set. Reads both operands of a tile
    once, from L2; writes 12 bytes a row and tile.
    """
    num_n = tl.cdiv(num_rows, BLOCK_N)
    num_v = tl.cdiv(vocab, BLOCK_V)
    num_tiles = num_n * num_v
    if IF_FLAGGED:
        num_tiles = tl.where(tl.load(flag_ptr) == 0, 0, num_tiles)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=DESCRIPTORS):
        block_n, block_v = grouped_order(tile, num_n, num_v, GROUP_N)
        raw = raw_logits_tile(
            hidden, weight, bias_ptr, block_n, block_v, num_rows, vocab, depth, hidden_stride, weight_stride,
            softcap, HAS_BIAS, HAS_SOFTCAP, EVEN_D, DESCRIPTORS, BLOCK_N, BLOCK_V, BLOCK_D,
        )  # fmt: skip
        offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < num_rows
        target = tl.load(target_ptr + offs_n, mask=mask_n, other=-1)
        slope2 = tl.load(slope_ptr + offs_n, mask=mask_n, other=0.0) * LOG2_E
        raw = tl.where(words_but_target(block_v, target, vocab, BLOCK_V), raw, -float("inf"))
        tile_max = tl.max(raw, 1)
        # A row that is all −inf is shifted by 0: −inf − (−inf) would be NaN.
        gaps = (raw - tl.where(tile_max == -float("inf"), 0.0, tile_max)[:, None]) * slope2[:, None]
        exps = tl.exp2(gaps)
        partial_ptrs = partial_ptr + (block_v.to(tl.int64) * num_rows + offs_n) * 4
        tl.store(partial_ptrs, tile_max, mask=mask_n)
        tl.store(partial_ptrs + 1, tl.sum(exps, 1), mask=mask_n)
        if HAS_ENTROPY:
            # 2^−200 is 0 in fp32, and 0 · (−200) is 0 where 0 · (−inf) is not.
            tl.store(partial_ptrs + 2, tl.sum(exps * tl.maximum(gaps, -200.0), 1), mask=mask_n)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprob, entropy, lse (N,) and normalizer (N,2), fp32. See `fusedce.eager.linear_ce` for the formula."""
    return results_and_mass(hidden, weight, target, bias, options, with_entropy, None)


def results_and_mass(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    with_entropy: bool,
    mass: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, and mass (tiles of words, N) filled, if there is one: see `tile_mass`."""
    hidden, weight, target = unit_rows(hidden), unit_rows(weight), target.contiguous()
    num_rows = hidden.shape[0]
    slopes = row_slopes(options, num_rows, hidden)
    logprob, lse = (hidden.new_empty(num_rows, dtype=torch.float32) for _ in range(2))
    entropy = hidden.new_empty(num_rows if with_entropy else 0, dtype=torch.float32)
    normalizer = hidden.new_empty((num_rows, 2), dtype=torch.float32)
    whole = head_of(hidden, weight, bias, options)
    raw_target = target_logit(target, whole)
    for start, stop in row_chunks(num_rows, 16 * whole.num_splits, PARTIAL_BYTES):
        rows = slice(start, stop)
        partial = tile_sums(hidden[rows], weight, bias, target[rows], slopes[rows], options, with_entropy)
        merge_partials(
            partial, raw_target[rows], target[rows], slopes[rows], options.ignore_index,
            logprob[rows], entropy[rows], lse[rows], normalizer[rows],
        )  # fmt: skip
        if mass is not None:
            tile_mass(partial, slopes[rows], normalizer[rows], whole.tile.block_n, mass[:, rows])
    return logprob, entropy, lse, normalizer


def head_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, options: LogitOptions) -> Head:
    """The operands with the forward's tile."""
    return head((STAGE, STAGE_WITH_OPTIONS), hidden, weight, bias, options)


def tile_sums(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    slopes: Tensor,
    options: LogitOptions,
    with_entropy: bool,
    flag: Tensor | None = None,
) -> Tensor:
    """Partial sums (splits, rows, 4); without the entropy the third number is left as it is, the fourth always. With a
    flag, nothing is written unless that is set."""
    run = head_of(hidden, weight, bias, options)
    partial = hidden.new_empty((run.num_splits, hidden.shape[0], 4), dtype=torch.float32)
    with torch.cuda.device_of(hidden):
        KERNEL[run.grid()](
            *run.arguments(), target, slopes, target if flag is None else flag, partial, *run.sizes(),
            **run.constants(), HAS_ENTROPY=with_entropy, IF_FLAGGED=flag is not None, **run.launch(),
        )  # fmt: skip
    return partial


KERNEL = logprob_fwd_kernel


def signature(dtype: str, tile: GemmTile) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        **operand_types(dtype, tile),
        "target_ptr": "*i64",
        **dict.fromkeys(("slope_ptr", "partial_ptr"), "*fp32"),
        "flag_ptr": "*i32",
        **dict.fromkeys(constexprs(tile), "constexpr"),
    }


def constexprs(
    tile: GemmTile,
    depth: int = 0,
    has_bias: bool = True,
    has_softcap: bool = True,
    has_entropy: bool = True,
    if_flagged: bool = True,
) -> dict[str, int]:
    """The kernel's sizes and switches for a tile and D."""
    return constants(tile, depth, has_bias, has_softcap) | {"HAS_ENTROPY": has_entropy, "IF_FLAGGED": if_flagged}
