"""The forward: tiles of logits reduced as they are made, by the running-max online log-sum-exp. Nothing of N × V is
kept."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce import arch
from fusedce.configs import GemmTile, tile_for
from fusedce.options import LogitOptions
from fusedce.triton.common import grouped_order, launch_options, unit_rows
from fusedce.triton.linear_ce.finish import merge_partials
from fusedce.triton.linear_ce.logits import logits_tile

STAGE, STAGE_WITH_OPTIONS = "linear_ce_fwd", "linear_ce_fwd_softcap"
# Vocabulary blocks one program walks with its running maximum in registers. Constant, so that a row's bits depend on
# neither N nor the number of SMs.
BLOCKS_PER_SPLIT = 8


@triton.jit
def logprob_fwd_kernel(
    hidden_ptr,
    weight_ptr,
    target_ptr,
    bias_ptr,
    partial_ptr,
    num_rows,
    vocab,
    depth,
    hidden_stride,
    weight_stride,
    inv_temperature,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_N: tl.constexpr,
    BLOCKS_PER_SPLIT: tl.constexpr,
):
    """One program owns BLOCK_N rows and one split of the vocabulary: BLOCKS_PER_SPLIT tiles of logits, one after
    another.

    Reads its rows of hidden once a tile (from L2) and each of its words of weight once; writes four fp32 numbers a row
    and
    split: partial[split, row, 4] = maximum m, Σ e^(z−m), Σ e^(z−m)·(z−m), the target's logit (0 where it is elsewhere).
    Gaps to the maximum, not logits, are summed: they keep their digits where all logits are large.
    """
    num_n = tl.cdiv(num_rows, BLOCK_N)
    num_splits = tl.cdiv(tl.cdiv(vocab, BLOCK_V), BLOCKS_PER_SPLIT)
    block_n, split = grouped_order(tl.program_id(0), num_n, num_splits, GROUP_N)
    offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < num_rows
    target = tl.load(target_ptr + offs_n, mask=mask_n, other=-1)
    running_max = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    sum_exp = tl.zeros((BLOCK_N,), tl.float32)
    sum_gap = tl.zeros((BLOCK_N,), tl.float32)
    target_logit = tl.zeros((BLOCK_N,), tl.float32)
    first_v = split * BLOCKS_PER_SPLIT * BLOCK_V
    for start_v in range(first_v, min(first_v + BLOCKS_PER_SPLIT * BLOCK_V, vocab), BLOCK_V):
        offs_v = start_v + tl.arange(0, BLOCK_V)
        logits = logits_tile(
            hidden_ptr, weight_ptr, bias_ptr, offs_n, offs_v, num_rows, vocab, depth, hidden_stride, weight_stride,
            inv_temperature, softcap, HAS_BIAS, HAS_SOFTCAP, EVEN_D, BLOCK_N, BLOCK_V, BLOCK_D,
        )  # fmt: skip
        # The target is compared in 64 bits, so that 2³² is not word 0.
        target_logit += tl.sum(tl.where(offs_v.to(tl.int64)[None, :] == target[:, None], logits, 0.0), 1)
        new_max = tl.maximum(running_max, tl.max(logits, 1))
        # A row that is all −inf so far is shifted by 0: −inf − (−inf) would be NaN.
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        moved = tl.where(running_max == -float("inf"), 0.0, running_max - shift)
        rescale = tl.exp(moved)
        gaps = logits - shift[:, None]
        exps = tl.exp(gaps)
        # Σ e^(z−m)·(z−m) moves with the maximum: each term by m's change times its weight, then by the rescale.
        sum_gap = (sum_gap + sum_exp * moved) * rescale
        # A word of probability 0 adds 0, also where its logit is −inf.
        sum_gap += tl.sum(tl.where(exps == 0.0, 0.0, exps * gaps), 1)
        sum_exp = sum_exp * rescale + tl.sum(exps, 1)
        running_max = new_max
    partial_ptrs = partial_ptr + (split.to(tl.int64) * num_rows + offs_n) * 4
    tl.store(partial_ptrs, running_max, mask=mask_n)
    tl.store(partial_ptrs + 1, sum_exp, mask=mask_n)
    tl.store(partial_ptrs + 2, sum_gap, mask=mask_n)
    tl.store(partial_ptrs + 3, target_logit, mask=mask_n)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprob, entropy, lse (N,) and normalizer (N,2), fp32. See `fusedce.eager.linear_ce` for the formula."""
    (num_rows, depth), vocab = hidden.shape, weight.shape[0]
    hidden, weight, target = unit_rows(hidden), unit_rows(weight), target.contiguous()
    machine = arch.of_device(hidden.device)
    tile = tile_for(STAGE_WITH_OPTIONS if options.softcap else STAGE, machine, hidden.element_size())
    num_splits = triton.cdiv(triton.cdiv(vocab, tile.block_n), BLOCKS_PER_SPLIT)
    partial = hidden.new_empty((num_splits, num_rows, 4), dtype=torch.float32)
    if num_rows:
        with torch.cuda.device_of(hidden):
            KERNEL[(triton.cdiv(num_rows, tile.block_m) * num_splits,)](
                hidden, weight, target, weight if bias is None else bias.contiguous(), partial, num_rows, vocab, depth,
                hidden.stride(0), weight.stride(0), 1.0 / options.temperature, options.softcap,
                **constexprs(tile, depth, bias is not None, options.softcap != 0.0), **launch_options(tile, machine),
            )  # fmt: skip
    return merge_partials(partial, target, vocab, options.ignore_index)


KERNEL = logprob_fwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        **dict.fromkeys(("hidden_ptr", "weight_ptr"), f"*{dtype}"),
        "target_ptr": "*i64",
        "bias_ptr": f"*{dtype}",
        "partial_ptr": "*fp32",
        **dict.fromkeys(("num_rows", "vocab", "depth", "hidden_stride", "weight_stride"), "i32"),
        **dict.fromkeys(("inv_temperature", "softcap"), "fp32"),
        **dict.fromkeys(constexprs(GemmTile(1, 1, 1, 1, 1)), "constexpr"),
    }


def constexprs(tile: GemmTile, depth: int = 0, has_bias: bool = True, has_softcap: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches for a tile and D."""
    return {
        "HAS_BIAS": has_bias,
        "HAS_SOFTCAP": has_softcap,
        "EVEN_D": depth % tile.block_k == 0,
        "BLOCK_N": tile.block_m,
        "BLOCK_V": tile.block_n,
        "BLOCK_D": tile.block_k,
        "GROUP_N": tile.group_m,
        "BLOCKS_PER_SPLIT": BLOCKS_PER_SPLIT,
    }
