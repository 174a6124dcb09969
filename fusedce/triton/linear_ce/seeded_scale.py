"""A chunk's rows before the two GEMMs: each row's factor goes into hidden, its target's gradient into the
exponentials."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH, round_to
from fusedce.triton.linear_ce.logits import LOG2_E, cap_slope

STAGE = None
BLOCK_N, BLOCK_D = 8, 256
# A factor of 0 beside a gradient at the target would lose the latter; 2^−40 of it is nothing beside rounding.
SMALLEST_PART = tl.constexpr(2.0**-40)


@triton.jit
def seeded_scale_kernel(
    rows_ptr,
    exp_ptr,
    target_ptr,
    raw_target_ptr,
    seed_ptr,
    slope_ptr,
    rest_ptr,
    d_logprob_ptr,
    d_lse_ptr,
    factor_ptr,
    num_rows,
    depth,
    exp_stride,
    softcap,
    ignore_index,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program owns BLOCK_N rows. d_raw_j = factor · E_j for all words: factor = (d_lse − d_logprob) / (T·S), and
    E_y is set so that the target gets (d_lse·p_y + d_logprob·(1 − p_y)) / T. rows[row] *= factor.

    Reads and writes D elements a row. Offsets into the chunk's exponentials are int64: rows × V may pass 2³¹.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < num_rows
    target = tl.load(target_ptr + offs_n, mask=mask_n, other=ignore_index)
    slope = tl.load(slope_ptr + offs_n, mask=mask_n, other=0.0)
    raw_target = tl.load(raw_target_ptr + offs_n, mask=mask_n, other=0.0)
    seed = tl.load(seed_ptr + offs_n, mask=mask_n, other=0.0)
    rest = tl.load(rest_ptr + offs_n, mask=mask_n, other=0.0)
    d_logprob = tl.load(d_logprob_ptr + offs_n, mask=mask_n, other=0.0)
    d_lse = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_LSE:
        d_lse = tl.load(d_lse_ptr + offs_n, mask=mask_n, other=0.0)
    kept = target != ignore_index
    of_target = tl.exp2(tl.where(raw_target == seed, 0.0, (raw_target - seed) * (slope * LOG2_E)))
    total = rest + of_target
    on_target = d_lse * of_target + d_logprob * rest
    on_probs = d_lse - d_logprob
    least = tl.abs(on_target / total) * SMALLEST_PART
    on_probs = tl.where(tl.abs(on_probs) < least, least, on_probs)
    factor = tl.where(kept, on_probs / total * slope, 0.0)
    entry = tl.where(on_probs == 0.0, 0.0, on_target / on_probs)
    if HAS_SOFTCAP:
        entry *= cap_slope(raw_target, softcap)
    inside = kept & (raw_target == raw_target)
    # Outside the vocabulary nothing is written; the factor is NaN there.
    entry_ptrs = exp_ptr + offs_n.to(tl.int64) * exp_stride + tl.where(inside, target, 0)
    tl.store(entry_ptrs, round_to(entry, exp_ptr.dtype.element_ty), mask=inside)
    tl.store(factor_ptr + offs_n, factor, mask=mask_n)
    for start in range(0, depth, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        mask = mask_n[:, None] & (offs_d < depth)[None, :]
        ptrs = rows_ptr + offs_n.to(tl.int64)[:, None] * depth + offs_d[None, :]
        values = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32) * factor[:, None]
        tl.store(ptrs, round_to(values, rows_ptr.dtype.element_ty), mask=mask)


KERNEL = seeded_scale_kernel


def signature(dtype: str, tile: GemmTile | None = None) -> dict[str, str]:
    """Triton's type of every argument."""
    floats = ("raw_target_ptr", "seed_ptr", "slope_ptr", "rest_ptr", "d_logprob_ptr", "d_lse_ptr", "factor_ptr")
    return {
        **dict.fromkeys(("rows_ptr", "exp_ptr"), f"*{dtype}"),
        "target_ptr": "*i64",
        **dict.fromkeys(floats, "*fp32"),
        **dict.fromkeys(("num_rows", "depth", "exp_stride"), "i32"),
        "softcap": "fp32",
        "ignore_index": "i32",
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, has_softcap: bool = True, has_lse: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches; a row kernel has no tile."""
    return {"HAS_SOFTCAP": has_softcap, "HAS_LSE": has_lse, "BLOCK_N": BLOCK_N, "BLOCK_D": BLOCK_D}


def seeded_scale(
    rows: Tensor,
    exps: Tensor,
    target: Tensor,
    raw_target: Tensor,
    seed: Tensor,
    slopes: Tensor,
    rest: Tensor,
    d_logprob: Tensor,
    d_lse: Tensor | None,
    softcap: float,
    ignore_index: int,
    factor: Tensor,
) -> None:
    """rows (R,D) *= factor, exps[row, target] = its entry; fills factor (R,). rows must be dense."""
    with torch.cuda.device_of(rows):
        KERNEL[(triton.cdiv(rows.shape[0], BLOCK_N),)](
            rows, exps, target, raw_target, seed, slopes, rest, d_logprob, d_logprob if d_lse is None else d_lse,
            factor, *rows.shape, exps.stride(0), softcap, ignore_index,
            **constexprs(None, softcap != 0.0, d_lse is not None), **ROW_LAUNCH,
        )  # fmt: skip
