"""The merge: a row's partial sums over the splits of the vocabulary, and its target, become its results."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH, log1p
from fusedce.triton.linear_ce.logits import LN_2, LOG2_E

STAGE = None
BLOCK_N, BLOCK_S = 16, 64


@triton.jit
def merged_splits(
    partial_ptr,
    offs_n,
    slope2,
    num_rows,
    num_splits,
    HAS_ENTROPY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The splits of rows offs_n, BLOCK_S at a time, with a running maximum: the maximum m, Σ 2^g and Σ 2^g·g about it.

    Sums move with the maximum: each term by 2^(its change · slope2).
    """
    mask_n = offs_n < num_rows
    running_max = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    rest = tl.zeros((BLOCK_N,), tl.float32)
    sum_gap = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        mask = (offs_s < num_splits)[:, None] & mask_n[None, :]
        ptrs = partial_ptr + (offs_s.to(tl.int64)[:, None] * num_rows + offs_n[None, :]) * 4
        split_max = tl.load(ptrs, mask=mask, other=-float("inf"))
        split_exp = tl.load(ptrs + 1, mask=mask, other=0.0)
        new_max = tl.maximum(running_max, tl.max(split_max, 0))
        # A row that is all −inf so far is shifted by 0: −inf − (−inf) would be NaN.
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        moved = tl.where(running_max == -float("inf"), 0.0, (running_max - shift) * slope2)
        split_moved = tl.where(split_max == -float("inf"), 0.0, (split_max - shift[None, :]) * slope2[None, :])
        if HAS_ENTROPY:
            split_gap = tl.load(ptrs + 2, mask=mask, other=0.0)
            # Far below the maximum, 2^moved is 0 and the gap must not be −inf.
            sum_gap = (sum_gap + rest * tl.maximum(moved, -200.0)) * tl.exp2(moved)
            sum_gap += tl.sum((split_gap + split_exp * tl.maximum(split_moved, -200.0)) * tl.exp2(split_moved), 0)
        rest = rest * tl.exp2(moved) + tl.sum(split_exp * tl.exp2(split_moved), 0)
        running_max = new_max
    return running_max, rest, sum_gap


@triton.jit
def logprob_merge_kernel(
    partial_ptr,
    raw_target_ptr,
    target_ptr,
    slope_ptr,
    logprob_ptr,
    entropy_ptr,
    lse_ptr,
    normalizer_ptr,
    num_rows,
    num_splits,
    ignore_index,
    HAS_ENTROPY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program owns BLOCK_N rows and merges their splits. The target, which the partial sums leave out, comes last:
    log p_y = −log(1 + rest / e^(z_y)) is exact where p_y is near 1, and never above 0.

    Reads 12 bytes a row and split; writes the results and normalizer[row, 2]: the maximum of the raw logits and
    log Σ exp(z − its z).
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < num_rows
    target = tl.load(target_ptr + offs_n, mask=mask_n, other=0)
    slope = tl.load(slope_ptr + offs_n, mask=mask_n, other=0.0)
    raw_target = tl.load(raw_target_ptr + offs_n, mask=mask_n, other=0.0)
    running_max, rest, sum_gap = merged_splits(
        partial_ptr, offs_n, slope * LOG2_E, num_rows, num_splits, HAS_ENTROPY, BLOCK_N, BLOCK_S
    )
    ignored = target == ignore_index
    # Labels out of range are reported elsewhere; their target's logit is NaN, and with it all results.
    new_max = tl.where(running_max > raw_target, running_max, raw_target)
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    moved = tl.where(running_max == -float("inf"), 0.0, (running_max - shift) * (slope * LOG2_E))
    gap = (raw_target - shift) * slope
    of_target = tl.exp2((raw_target - shift) * (slope * LOG2_E))
    sum_gap = (sum_gap + rest * tl.maximum(moved, -200.0)) * tl.exp2(moved)
    rest = rest * tl.exp2(moved)
    total = rest + of_target
    log_sum = tl.where(of_target >= rest, log1p(rest / of_target) + gap, tl.log(total))
    logprob = tl.where(of_target >= rest, -log1p(rest / of_target), gap - log_sum)
    lse = shift * slope + log_sum
    tl.store(logprob_ptr + offs_n, tl.where(ignored, 0.0, logprob), mask=mask_n)
    tl.store(lse_ptr + offs_n, tl.where(ignored, 0.0, lse), mask=mask_n)
    if HAS_ENTROPY:
        entropy = log_sum - (LN_2 * sum_gap + of_target * tl.maximum(gap, -200.0)) / total
        tl.store(entropy_ptr + offs_n, tl.where(ignored, 0.0, entropy), mask=mask_n)
    # Shifted by +inf, every probability of an ignored row is 0.
    tl.store(normalizer_ptr + 2 * offs_n.to(tl.int64), tl.where(ignored, float("inf"), shift), mask=mask_n)
    tl.store(normalizer_ptr + 2 * offs_n.to(tl.int64) + 1, tl.where(ignored, 0.0, log_sum), mask=mask_n)


KERNEL = logprob_merge_kernel


def signature(dtype: str, tile: GemmTile | None = None) -> dict[str, str]:
    """Triton's type of every argument; `dtype` does not matter, all numbers are fp32 here."""
    return {
        **dict.fromkeys(("partial_ptr", "raw_target_ptr"), "*fp32"),
        "target_ptr": "*i64",
        **dict.fromkeys(("slope_ptr", "logprob_ptr", "entropy_ptr", "lse_ptr", "normalizer_ptr"), "*fp32"),
        **dict.fromkeys(("num_rows", "num_splits", "ignore_index"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, has_entropy: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches; a row kernel has no tile."""
    return {"HAS_ENTROPY": has_entropy, "BLOCK_N": BLOCK_N, "BLOCK_S": BLOCK_S}


def merge_partials(
    partial: Tensor,
    raw_target: Tensor,
    target: Tensor,
    slopes: Tensor,
    ignore_index: int,
    logprob: Tensor,
    entropy: Tensor,
    lse: Tensor,
    normalizer: Tensor,
) -> None:
    """Fill the results (N,) and normalizer (N,2) from partial sums (splits, N, 4); an empty entropy is not wanted."""
    num_splits, num_rows, _ = partial.shape
    with torch.cuda.device_of(partial):
        KERNEL[(triton.cdiv(num_rows, BLOCK_N),)](
            partial, raw_target, target, slopes, logprob, entropy, lse, normalizer,
            num_rows, num_splits, ignore_index,
            **constexprs(None, entropy.numel() > 0), **ROW_LAUNCH,
        )  # fmt: skip
