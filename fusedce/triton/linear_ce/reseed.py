"""New seeds for rows whose exponentials came out too large: their log-sum-exp, from the forward's sums."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH
from fusedce.triton.linear_ce.finish import BLOCK_N, BLOCK_S, merged_splits
from fusedce.triton.linear_ce.logits import LARGEST_SUM, LOG2_E

STAGE = None


@triton.jit
def reseed_kernel(
    partial_ptr,
    seed_ptr,
    rest_ptr,
    slope_ptr,
    flag_ptr,
    out_ptr,
    num_rows,
    num_splits,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program owns BLOCK_N rows: out[row] = log-sum-exp without the target, as a raw logit, where the row's sum
    about seed_ptr[row] was too large, else that seed. The partial sums are read only if *flag_ptr is set.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < num_rows
    slope = tl.load(slope_ptr + offs_n, mask=mask_n, other=1.0)
    seed = tl.load(seed_ptr + offs_n, mask=mask_n, other=0.0)
    rest = tl.load(rest_ptr + offs_n, mask=mask_n, other=0.0)
    num_splits = tl.where(tl.load(flag_ptr) == 0, 0, num_splits)
    largest, sum_exp, _ = merged_splits(
        partial_ptr, offs_n, slope * LOG2_E, num_rows, num_splits, False, BLOCK_N, BLOCK_S
    )
    too_large = (rest > LARGEST_SUM) | (seed == -float("inf"))
    tl.store(out_ptr + offs_n, tl.where(too_large, largest + tl.log(sum_exp) / slope, seed), mask=mask_n)


KERNEL = reseed_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument; `dtype` does not matter, all numbers are fp32 here."""
    return {
        **dict.fromkeys(("partial_ptr", "seed_ptr", "rest_ptr", "slope_ptr", "out_ptr"), "*fp32"),
        "flag_ptr": "*i32",
        **dict.fromkeys(("num_rows", "num_splits"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None) -> dict[str, int]:
    """The kernel's sizes; a row kernel has no tile."""
    return {"BLOCK_N": BLOCK_N, "BLOCK_S": BLOCK_S}


def reseed(partial: Tensor, seed: Tensor, rest: Tensor, slopes: Tensor, flag: Tensor) -> Tensor:
    """(rows,) fp32: the seeds of the second try, from partial sums (splits, rows, 4)."""
    num_splits, num_rows, _ = partial.shape
    out = torch.empty_like(seed)
    with torch.cuda.device_of(partial):
        KERNEL[(triton.cdiv(num_rows, BLOCK_N),)](
            partial, seed, rest, slopes, flag, out, num_rows, num_splits, **constexprs(), **ROW_LAUNCH
        )
    return out
