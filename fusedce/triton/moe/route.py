"""Routing: the K best experts of each row and their weights."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH
from fusedce.triton.moe.scores import TAKEN, block_sizes, divisor, load_logits, scores_of, sort_keys

STAGE = None


@triton.jit
def route_fwd_kernel(
    logits_ptr,
    correction_ptr,
    weights_ptr,
    index_ptr,
    num_rows,
    num_experts,
    top_k,
    stride_n,
    stride_e,
    scale,
    num_groups,
    top_groups,
    group_best,
    IS_SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """One program owns BLOCK_N rows and all experts, and takes the best expert top_k times: by logits, which are exact,
    or, with a correction or groups, by scores.

    Reads each logit once, writes 12 bytes for each choice. Row offsets are int64: rows × experts may pass 2³¹.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_e = tl.arange(0, BLOCK_E)
    offs_k = tl.arange(0, BLOCK_K)
    mask_n = offs_n < num_rows
    mask_e = offs_e < num_experts
    logits = load_logits(logits_ptr, offs_n, mask_n, num_experts, stride_n, stride_e, BLOCK_E)
    scores = scores_of(logits, num_experts, IS_SOFTMAX, BLOCK_E)
    values = logits
    if HAS_CORRECTION or GROUPED:
        values = scores
        if IS_SOFTMAX:
            values = scores / tl.sum(scores, 1)[:, None]
    if HAS_CORRECTION:
        values += tl.load(correction_ptr + offs_e, mask=mask_e, other=0.0)[None, :]
    keys = tl.where(mask_e[None, :], sort_keys(values), TAKEN)
    if GROUPED:
        group = offs_e // (num_experts // num_groups)
        allowed = best_groups(values, keys, group, num_groups, top_groups, group_best, BLOCK_N, BLOCK_E, BLOCK_G)
        keys = tl.where(allowed != 0, keys, TAKEN)
    chosen = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    # One after the other, so that a replay of the choice sums in the same order.
    total = tl.zeros((BLOCK_N,), tl.float32)
    index = tl.zeros((BLOCK_N, BLOCK_K), tl.int32)
    for k in range(top_k):
        best = tl.argmax(keys, 1, tie_break_left=True)
        picked = offs_e[None, :] == best[:, None]
        score = tl.sum(tl.where(picked, scores, 0.0), 1)
        total += score
        here = (offs_k == k)[None, :]
        chosen = tl.where(here, score[:, None], chosen)
        index = tl.where(here, best[:, None], index)
        keys = tl.where(picked, TAKEN, keys)
    total = divisor(total if RENORMALIZE else tl.sum(scores, 1), IS_SOFTMAX, RENORMALIZE)
    offsets = offs_n.to(tl.int64)[:, None] * top_k + offs_k[None, :]
    mask = mask_n[:, None] & (offs_k < top_k)[None, :]
    tl.store(weights_ptr + offsets, scale * chosen / total[:, None], mask=mask)
    tl.store(index_ptr + offsets, index.to(tl.int64), mask=mask)


@triton.jit
def best_groups(
    values, keys, group, num_groups, top_groups, group_best,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """(BLOCK_N, BLOCK_E) int32: 1 where the expert's group is among the top_groups. group (BLOCK_E,): of each
    expert."""
    offs_e = tl.arange(0, BLOCK_E)
    offs_g = tl.arange(0, BLOCK_G)
    totals = tl.zeros((BLOCK_N, BLOCK_G), tl.float32)
    for g in range(num_groups):
        left = tl.where((group == g)[None, :], keys, TAKEN)
        total = tl.zeros((BLOCK_N,), tl.float32)
        for _ in range(group_best):
            best = tl.argmax(left, 1, tie_break_left=True)
            picked = offs_e[None, :] == best[:, None]
            total += tl.sum(tl.where(picked, values, 0.0), 1)
            left = tl.where(picked, TAKEN, left)
        totals = tl.where((offs_g == g)[None, :], total[:, None], totals)
    group_keys = tl.where((offs_g < num_groups)[None, :], sort_keys(totals), TAKEN)
    allowed = tl.zeros((BLOCK_N, BLOCK_E), tl.int32)
    for _ in range(top_groups):
        best = tl.argmax(group_keys, 1, tie_break_left=True)
        allowed = tl.where(group[None, :] == best[:, None], 1, allowed)
        group_keys = tl.where(offs_g[None, :] == best[:, None], TAKEN, group_keys)
    return allowed


KERNEL = route_fwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with logits of `dtype` ("bf16", "fp16", "fp32")."""
    sizes = ("num_rows", "num_experts", "top_k", "stride_n", "stride_e", "num_groups", "top_groups", "group_best")
    return {
        "logits_ptr": f"*{dtype}",
        **dict.fromkeys(("correction_ptr", "weights_ptr"), "*fp32"),
        "index_ptr": "*i64",
        **dict.fromkeys(sizes, "i32"),
        "scale": "fp32",
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(
    tile: GemmTile | None = None,
    is_softmax: bool = True,
    renormalize: bool = True,
    has_correction: bool = False,
    grouped: bool = False,
    *,
    num_experts: int = 128,
    top_k: int = 8,
    num_groups: int = 8,
) -> dict[str, int]:
    """The kernel's sizes and switches; a row kernel has no tile."""
    return {
        "IS_SOFTMAX": is_softmax,
        "RENORMALIZE": renormalize,
        "HAS_CORRECTION": has_correction,
        "GROUPED": grouped,
        **block_sizes(num_experts),
        "BLOCK_K": triton.next_power_of_2(top_k),
        "BLOCK_G": triton.next_power_of_2(num_groups),
    }


def moe_route(
    logits: Tensor,
    top_k: int,
    correction: Tensor | None,
    score: str,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
    group_best: int,
) -> tuple[Tensor, Tensor]:
    """top_k_weights (N,K) fp32 and top_k_index (N,K) int64. See `fusedce.eager.moe_route` for the formula."""
    num_rows, num_experts = logits.shape
    weights = logits.new_empty((num_rows, top_k), dtype=torch.float32)
    index = logits.new_empty((num_rows, top_k), dtype=torch.int64)
    has_correction, grouped = correction is not None, top_groups < num_groups
    sizes = constexprs(
        None, score == "softmax", renormalize, has_correction, grouped,
        num_experts=num_experts, top_k=top_k, num_groups=num_groups if grouped else 1,
    )  # fmt: skip
    if num_rows:
        with torch.cuda.device_of(logits):
            KERNEL[(triton.cdiv(num_rows, sizes["BLOCK_N"]),)](
                logits, correction.float().contiguous() if correction is not None else weights, weights, index,
                num_rows, num_experts, top_k, logits.stride(0), logits.stride(1), scale,
                num_groups, top_groups, min(group_best, num_experts // num_groups), **sizes, **ROW_LAUNCH,
            )  # fmt: skip
    return weights, index
