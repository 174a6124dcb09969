"""The merge: one program gathers a row's partial sums over the splits of the vocabulary, in order, into its results."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH

STAGE = None
BLOCK_N = 128


@triton.jit
def logprob_merge_kernel(
    partial_ptr,
    target_ptr,
    logprob_ptr,
    entropy_ptr,
    lse_ptr,
    normalizer_ptr,
    num_rows,
    num_splits,
    vocab,
    ignore_index,
    BLOCK_N: tl.constexpr,
):
    """One program owns BLOCK_N rows and walks their splits in order, with the same running maximum as the forward.

    Reads 16 bytes a row and split; writes logprob, entropy, lse and normalizer[row, 2] = maximum, log-sum.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < num_rows
    target = tl.load(target_ptr + offs_n, mask=mask_n, other=0)
    running_max = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    sum_exp = tl.zeros((BLOCK_N,), tl.float32)
    sum_gap = tl.zeros((BLOCK_N,), tl.float32)
    target_logit = tl.zeros((BLOCK_N,), tl.float32)
    partial_ptrs = partial_ptr + offs_n.to(tl.int64) * 4
    for _ in range(num_splits):
        split_max = tl.load(partial_ptrs, mask=mask_n, other=0.0)
        split_exp = tl.load(partial_ptrs + 1, mask=mask_n, other=1.0)
        split_gap = tl.load(partial_ptrs + 2, mask=mask_n, other=0.0)
        target_logit += tl.load(partial_ptrs + 3, mask=mask_n, other=0.0)
        new_max = tl.maximum(running_max, split_max)
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        moved = tl.where(running_max == -float("inf"), 0.0, running_max - shift)
        split_moved = tl.where(split_max == -float("inf"), 0.0, split_max - shift)
        sum_gap = (sum_gap + sum_exp * moved) * tl.exp(moved)
        sum_gap += (split_gap + split_exp * split_moved) * tl.exp(split_moved)
        sum_exp = sum_exp * tl.exp(moved) + split_exp * tl.exp(split_moved)
        running_max = new_max
        partial_ptrs += num_rows * 4
    shift = tl.where(running_max == -float("inf"), 0.0, running_max)
    log_sum = tl.log(sum_exp)
    ignored = target == ignore_index
    # Labels out of range are reported elsewhere; their rows are NaN, so that nothing plausible comes out of them.
    log_sum = tl.where(ignored | ((target >= 0) & (target < vocab)), log_sum, float("nan"))
    logprob = (target_logit - shift) - log_sum
    entropy = log_sum - sum_gap / sum_exp
    tl.store(logprob_ptr + offs_n, tl.where(ignored, 0.0, logprob), mask=mask_n)
    tl.store(entropy_ptr + offs_n, tl.where(ignored, 0.0, entropy), mask=mask_n)
    tl.store(lse_ptr + offs_n, tl.where(ignored, 0.0, shift + log_sum), mask=mask_n)
    tl.store(normalizer_ptr + 2 * offs_n.to(tl.int64), shift, mask=mask_n)
    tl.store(normalizer_ptr + 2 * offs_n.to(tl.int64) + 1, log_sum, mask=mask_n)


KERNEL = logprob_merge_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument; `dtype` does not matter, all numbers are fp32 here."""
    return {
        "partial_ptr": "*fp32",
        "target_ptr": "*i64",
        **dict.fromkeys(("logprob_ptr", "entropy_ptr", "lse_ptr", "normalizer_ptr"), "*fp32"),
        **dict.fromkeys(("num_rows", "num_splits", "vocab", "ignore_index"), "i32"),
        "BLOCK_N": "constexpr",
    }


def constexprs(tile: GemmTile | None = None) -> dict[str, int]:
    """The kernel's sizes; a row kernel has no tile."""
    return {"BLOCK_N": BLOCK_N}


def merge_partials(
    partial: Tensor, target: Tensor, vocab: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprob, entropy, lse (N,) and normalizer (N,2) from partial sums (splits, N, 4), all fp32."""
    num_splits, num_rows, _ = partial.shape
    logprob, entropy, lse = (partial.new_empty(num_rows) for _ in range(3))
    normalizer = partial.new_empty((num_rows, 2))
    if num_rows:
        with torch.cuda.device_of(partial):
            KERNEL[(triton.cdiv(num_rows, BLOCK_N),)](
                partial,
                target,
                logprob,
                entropy,
                lse,
                normalizer,
                num_rows,
                num_splits,
                vocab,
                ignore_index,
                **constexprs(),
                **ROW_LAUNCH,
            )
    return logprob, entropy, lse, normalizer
