"""Each row's raw logit of its target, or of several words that it names: one dot product of D numbers a word."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH
from fusedce.triton.linear_ce.logits import Head, capped

STAGE = None
BLOCK_N, BLOCK_D = 8, 256


@triton.jit
def target_logit_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    target_ptr,
    out_ptr,
    num_rows,
    slots,
    vocab,
    depth,
    hidden_stride,
    weight_stride,
    softcap,
    ignore_index,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program owns BLOCK_N targets, of which every `slots` belong to one row of hidden: reads D numbers of hidden
    and of the target's word each, writes one fp32 number: +inf where the target is to be ignored, NaN where it is
    outside the vocabulary. num_rows: the number of targets.

    Offsets are int64: rows × D and words × D may pass 2³¹.
    """
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < num_rows
    target = tl.load(target_ptr + offs_n, mask=mask_n, other=ignore_index)
    inside = (target >= 0) & (target < vocab)
    word = tl.where(inside, target, 0)
    hidden_ptrs = hidden_ptr + (offs_n // slots)[:, None] * hidden_stride
    weight_ptrs = weight_ptr + word[:, None] * weight_stride
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, depth, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        mask = (mask_n & inside)[:, None] & (offs_d < depth)[None, :]
        a = tl.load(hidden_ptrs + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
        acc += a * tl.load(weight_ptrs + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    raw = tl.sum(acc, 1)
    if HAS_BIAS:
        raw += tl.load(bias_ptr + word).to(tl.float32)
    if HAS_SOFTCAP:
        raw = capped(raw, softcap)
    outside = tl.where(target == ignore_index, float("inf"), float("nan"))
    tl.store(out_ptr + offs_n, tl.where(inside & (target != ignore_index), raw, outside), mask=mask_n)


KERNEL = target_logit_kernel


def signature(dtype: str, tile: GemmTile | None = None) -> dict[str, str]:
    """Triton's type of every argument."""
    return {
        **dict.fromkeys(("hidden_ptr", "weight_ptr", "bias_ptr"), f"*{dtype}"),
        "target_ptr": "*i64",
        "out_ptr": "*fp32",
        **dict.fromkeys(("num_rows", "slots", "vocab", "depth", "hidden_stride", "weight_stride"), "i32"),
        "softcap": "fp32",
        "ignore_index": "i32",
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, has_bias: bool = True, has_softcap: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches; a row kernel has no tile."""
    return {"HAS_BIAS": has_bias, "HAS_SOFTCAP": has_softcap, "BLOCK_N": BLOCK_N, "BLOCK_D": BLOCK_D}


def target_logit(target: Tensor, run: Head, slots: int = 1) -> Tensor:
    """(N·slots,) fp32: the raw logit of each target, `slots` of them a row of hidden; +inf for those that take no part,
    NaN for a label out of range."""
    hidden, weight, bias, options = run.hidden, run.weight, run.bias, run.options
    num_targets = target.shape[0]
    out = hidden.new_empty(num_targets, dtype=torch.float32)
    if num_targets:
        with torch.cuda.device_of(hidden):
            KERNEL[(triton.cdiv(num_targets, BLOCK_N),)](
                hidden, weight, weight if bias is None else bias, target, out, num_targets, slots, *weight.shape,
                hidden.stride(0), weight.stride(0), options.softcap, options.ignore_index,
                **constexprs(None, bias is not None, options.softcap != 0.0), **ROW_LAUNCH,
            )  # fmt: skip
    return out
