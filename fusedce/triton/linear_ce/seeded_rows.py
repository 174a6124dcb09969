"""A chunk's rows after the seeded exponentials: sums become log-probs, and upstream gradients become row factors."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH, log1p
from fusedce.triton.linear_ce.logits import LARGEST_SUM, LOG2_E

STAGE = None
BLOCK_N, BLOCK_S = 16, 64


@triton.jit
def seeded_sums_kernel(
    partial_ptr,
    raw_target_ptr,
    seed_ptr,
    target_ptr,
    slope_ptr,
    logprob_ptr,
    lse_ptr,
    rest_ptr,
    flag_ptr,
    num_rows,
    num_splits,
    ignore_index,
    IF_FLAGGED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program owns BLOCK_N rows and sums their splits in order: rest = Σ e over all words but the target.

    Reads 4 bytes a row and split; writes logprob, lse and rest, and sets *flag_ptr where a sum is too large to go on.
    IF_FLAGGED: nothing is done unless that is set.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if IF_FLAGGED:
        num_rows = tl.where(tl.load(flag_ptr) == 0, 0, num_rows)
        num_splits = tl.where(num_rows == 0, 0, num_splits)
    mask_n = offs_n < num_rows
    rest = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        ptrs = partial_ptr + offs_s.to(tl.int64)[:, None] * num_rows + offs_n[None, :]
        rest += tl.sum(tl.load(ptrs, mask=(offs_s < num_splits)[:, None] & mask_n[None, :], other=0.0), 0)
    target = tl.load(target_ptr + offs_n, mask=mask_n, other=ignore_index)
    slope = tl.load(slope_ptr + offs_n, mask=mask_n, other=0.0)
    raw_target = tl.load(raw_target_ptr + offs_n, mask=mask_n, other=0.0)
    seed = tl.load(seed_ptr + offs_n, mask=mask_n, other=0.0)
    ignored = target == ignore_index
    gap = tl.where(raw_target == seed, 0.0, (raw_target - seed) * slope)
    of_target = tl.exp2(gap * LOG2_E)
    likely = of_target >= rest
    logprob = tl.where(likely, -log1p(rest / of_target), gap - tl.log(rest + of_target))
    lse = raw_target * slope - logprob
    # Where the target has no probability, the rest is everything, and the seed is its log-sum-exp.
    lse = tl.where(raw_target == -float("inf"), seed * slope + tl.log(rest), lse)
    tl.store(logprob_ptr + offs_n, tl.where(ignored, 0.0, logprob), mask=mask_n)
    tl.store(lse_ptr + offs_n, tl.where(ignored, 0.0, lse), mask=mask_n)
    tl.store(rest_ptr + offs_n, tl.where(ignored, 0.0, rest), mask=mask_n)
    # −inf as a seed gives inf or NaN, which is no label out of range.
    too_large = (rest > LARGEST_SUM) | (seed == -float("inf"))
    if tl.max((too_large & mask_n).to(tl.int32), 0) > 0:
        tl.store(flag_ptr, 1)


KERNEL = seeded_sums_kernel


def signature(dtype: str, tile: GemmTile | None = None) -> dict[str, str]:
    """Triton's type of every argument; `dtype` does not matter, all numbers are fp32 here."""
    return {
        **dict.fromkeys(("partial_ptr", "raw_target_ptr", "seed_ptr"), "*fp32"),
        "target_ptr": "*i64",
        **dict.fromkeys(("slope_ptr", "logprob_ptr", "lse_ptr", "rest_ptr"), "*fp32"),
        "flag_ptr": "*i32",
        **dict.fromkeys(("num_rows", "num_splits", "ignore_index"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, if_flagged: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches; a row kernel has no tile."""
    return {"IF_FLAGGED": if_flagged, "BLOCK_N": BLOCK_N, "BLOCK_S": BLOCK_S}


def seeded_sums(
    partial: Tensor,
    raw_target: Tensor,
    seed: Tensor,
    target: Tensor,
    slopes: Tensor,
    ignore_index: int,
    logprob: Tensor,
    lse: Tensor,
    rest: Tensor,
    flag: Tensor,
    is_redo: bool,
) -> None:
    """Fill logprob, lse, rest (rows,) and perhaps set flag, from partial sums (splits, rows); a redo only if it is
    set."""
    num_splits, num_rows = partial.shape
    with torch.cuda.device_of(partial):
        KERNEL[(triton.cdiv(num_rows, BLOCK_N),)](
            partial, raw_target, seed, target, slopes, logprob, lse, rest, flag, num_rows, num_splits, ignore_index,
            **constexprs(None, is_redo), **ROW_LAUNCH,
        )  # fmt: skip
