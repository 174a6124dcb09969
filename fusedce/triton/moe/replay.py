"""Routing weights of experts that were chosen elsewhere."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH
from fusedce.triton.moe.scores import block_sizes, divisor, load_logits, scores_of

STAGE = None


@triton.jit
def replay_fwd_kernel(
    logits_ptr,
    index_ptr,
    weights_ptr,
    num_rows,
    num_experts,
    top_k,
    stride_n,
    stride_e,
    scale,
    IS_SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program owns BLOCK_N rows and all experts, and looks up the scores of top_k ids: id −1 weighs 0, an id out of
    range NaN, and neither is in a sum.

    Reads each logit once and 8 bytes a slot, writes 4 bytes a slot. Row offsets are int64.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_e = tl.arange(0, BLOCK_E)
    offs_k = tl.arange(0, BLOCK_K)
    mask_n = offs_n < num_rows
    logits = load_logits(logits_ptr, offs_n, mask_n, num_experts, stride_n, stride_e, BLOCK_E)
    scores = scores_of(logits, num_experts, IS_SOFTMAX, BLOCK_E)
    slots = offs_n.to(tl.int64) * top_k
    chosen = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    outside = tl.zeros((BLOCK_N, BLOCK_K), tl.int32)
    for k in range(top_k):
        # In 64 bits, so that 2³² is not expert 0.
        expert = tl.load(index_ptr + slots + k, mask=mask_n, other=-1)
        picked = offs_e.to(tl.int64)[None, :] == expert[:, None]
        score = tl.sum(tl.where(picked, scores, 0.0), 1)
        total += score
        here = (offs_k == k)[None, :]
        chosen = tl.where(here, score[:, None], chosen)
        wrong = ((expert < -1) | (expert >= num_experts))[:, None]
        outside = tl.where(here & wrong, 1, outside)
    total = divisor(total if RENORMALIZE else tl.sum(scores, 1), IS_SOFTMAX, RENORMALIZE)
    weights = tl.where(outside != 0, float("nan"), scale * chosen / total[:, None])
    offsets = slots[:, None] + offs_k[None, :]
    tl.store(weights_ptr + offsets, weights, mask=mask_n[:, None] & (offs_k < top_k)[None, :])


KERNEL = replay_fwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with logits of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        "logits_ptr": f"*{dtype}",
        "index_ptr": "*i64",
        "weights_ptr": "*fp32",
        **dict.fromkeys(("num_rows", "num_experts", "top_k", "stride_n", "stride_e"), "i32"),
        "scale": "fp32",
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(
    tile: GemmTile | None = None,
    is_softmax: bool = True,
    renormalize: bool = True,
    *,
    num_experts: int = 128,
    top_k: int = 8,
) -> dict[str, int]:
    """The kernel's sizes and switches; a row kernel has no tile."""
    switches = {"IS_SOFTMAX": is_softmax, "RENORMALIZE": renormalize}
    return {**switches, **block_sizes(num_experts), "BLOCK_K": triton.next_power_of_2(top_k)}


def moe_replay(logits: Tensor, top_k_index: Tensor, score: str, renormalize: bool, scale: float) -> Tensor:
    """top_k_weights (N,K) fp32. See `fusedce.eager.moe_route` for the formula."""
    (num_rows, num_experts), top_k = logits.shape, top_k_index.shape[1]
    weights = logits.new_empty((num_rows, top_k), dtype=torch.float32)
    sizes = constexprs(None, score == "softmax", renormalize, num_experts=num_experts, top_k=top_k)
    if num_rows:
        with torch.cuda.device_of(logits):
            KERNEL[(triton.cdiv(num_rows, sizes["BLOCK_N"]),)](
                logits, top_k_index.contiguous(), weights, num_rows, num_experts, top_k,
                logits.stride(0), logits.stride(1), scale, **sizes, **ROW_LAUNCH,
            )  # fmt: skip
    return weights
