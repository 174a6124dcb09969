"""Routing: the K largest logits of each row and their weights."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH
from fusedce.triton.moe.scores import block_sizes, divisor, load_logits, scores_of

STAGE = None


@triton.jit
def route_fwd_kernel(
    logits_ptr,
    weights_ptr,
    index_ptr,
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
    """One program owns BLOCK_N rows and all experts, and takes the largest logit top_k times.

    Reads each logit once, writes 12 bytes for each choice. Row offsets are int64: rows × experts may pass 2³¹.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_e = tl.arange(0, BLOCK_E)
    offs_k = tl.arange(0, BLOCK_K)
    logits = load_logits(logits_ptr, offs_n, num_rows, num_experts, stride_n, stride_e, BLOCK_E)
    scores = scores_of(logits, num_experts, IS_SOFTMAX, BLOCK_E)
    # The logits as integers in the same order: NaN above all, and room below −inf for what is taken already or padding.
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = tl.where(logits != logits, 0x7FFFFFFF, keys)
    keys = tl.where((offs_e < num_experts)[None, :], keys, -0x80000000)
    chosen = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    index = tl.zeros((BLOCK_N, BLOCK_K), tl.int32)
    for k in range(top_k):
        best = tl.argmax(keys, 1, tie_break_left=True)
        picked = offs_e[None, :] == best[:, None]
        score = tl.sum(tl.where(picked, scores, 0.0), 1)
        here = (offs_k == k)[None, :]
        chosen = tl.where(here, score[:, None], chosen)
        index = tl.where(here, best[:, None], index)
        keys = tl.where(picked, -0x80000000, keys)
    total = divisor(chosen if RENORMALIZE else scores, IS_SOFTMAX, RENORMALIZE)
    offsets = offs_n.to(tl.int64)[:, None] * top_k + offs_k[None, :]
    mask = (offs_n < num_rows)[:, None] & (offs_k < top_k)[None, :]
    tl.store(weights_ptr + offsets, scale * chosen / total[:, None], mask=mask)
    tl.store(index_ptr + offsets, index.to(tl.int64), mask=mask)


KERNEL = route_fwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with logits of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        "logits_ptr": f"*{dtype}",
        "weights_ptr": "*fp32",
        "index_ptr": "*i64",
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
    return {
        "IS_SOFTMAX": is_softmax,
        "RENORMALIZE": renormalize,
        **block_sizes(num_experts),
        "BLOCK_K": triton.next_power_of_2(top_k),
    }


def moe_route(logits: Tensor, top_k: int, score: str, renormalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    """top_k_weights (N,K) fp32 and top_k_index (N,K) int64. See `fusedce.eager.moe` for the formula."""
    num_rows, num_experts = logits.shape
    weights = logits.new_empty((num_rows, top_k), dtype=torch.float32)
    index = logits.new_empty((num_rows, top_k), dtype=torch.int64)
    sizes = constexprs(None, score == "softmax", renormalize, num_experts=num_experts, top_k=top_k)
    if num_rows:
        with torch.cuda.device_of(logits):
            KERNEL[(triton.cdiv(num_rows, sizes["BLOCK_N"]),)](
                logits,
                weights,
                index,
                num_rows,
                num_experts,
                top_k,
                logits.stride(0),
                logits.stride(1),
                scale,
                **sizes,
                **ROW_LAUNCH,
            )
    return weights, index
