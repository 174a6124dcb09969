"""The gradient of routing weights in the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH, round_to
from fusedce.triton.moe.scores import BLOCK_LOGITS, block_sizes, divisor, load_logits, scores_of

STAGE = None


@triton.jit
def route_bwd_kernel(
    d_weights_ptr,
    logits_ptr,
    index_ptr,
    d_logits_ptr,
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
):
    """One program owns BLOCK_N rows and all experts: q·(g − c·Σ q·g)·slope, q = scores / their sum,
    g = scale·d_weights summed over the slots that name the expert, c how many those are, or 1 where the sum is over
    all experts.

    Reads each logit and 12 bytes for each choice, writes each gradient once. Row offsets are int64.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_e = tl.arange(0, BLOCK_E)
    mask_n = offs_n < num_rows
    logits = load_logits(logits_ptr, offs_n, mask_n, num_experts, stride_n, stride_e, BLOCK_E)
    scores = scores_of(logits, num_experts, IS_SOFTMAX, BLOCK_E)
    slots = offs_n.to(tl.int64) * top_k
    upstream = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    count = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    for k in range(top_k):
        expert = tl.load(index_ptr + slots + k, mask=mask_n, other=-1)
        d_weight = tl.load(d_weights_ptr + slots + k, mask=mask_n, other=0.0)
        # Compared in 32 bits, to spare registers, after a test in 64: 2³² is not expert 0.
        expert = tl.where((expert >= 0) & (expert < num_experts), expert, -1).to(tl.int32)
        picked = offs_e[None, :] == expert[:, None]
        upstream += tl.where(picked, scale * d_weight[:, None], 0.0)
        count += tl.where(picked, 1.0, 0.0)
    slope = 1.0 - scores
    if IS_SOFTMAX:
        slope = tl.full(scores.shape, 1.0, tl.float32)
    if RENORMALIZE or not IS_SOFTMAX:
        scores = tl.where(count > 0.0, scores, 0.0)
    share = scores / divisor(tl.sum(scores * count if RENORMALIZE else scores, 1), IS_SOFTMAX, RENORMALIZE)[:, None]
    if RENORMALIZE:
        upstream -= count * tl.sum(share * upstream, 1)[:, None]
    elif IS_SOFTMAX:
        upstream -= tl.sum(share * upstream, 1)[:, None]
    d_logits = share * upstream * slope
    offsets = offs_n.to(tl.int64)[:, None] * num_experts + offs_e[None, :]
    mask = mask_n[:, None] & (offs_e < num_experts)[None, :]
    tl.store(d_logits_ptr + offsets, round_to(d_logits, d_logits_ptr.dtype.element_ty), mask=mask)


KERNEL = route_bwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with logits of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        "d_weights_ptr": "*fp32",
        "logits_ptr": f"*{dtype}",
        "index_ptr": "*i64",
        "d_logits_ptr": f"*{dtype}",
        **dict.fromkeys(("num_rows", "num_experts", "top_k", "stride_n", "stride_e"), "i32"),
        "scale": "fp32",
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(
    tile: GemmTile | None = None, is_softmax: bool = True, renormalize: bool = True, *, num_experts: int = 128
) -> dict[str, int]:
    """The kernel's sizes and switches; a row kernel has no tile."""
    # Half a block: with a whole one, four arrays of its size, compilers spill.
    sizes = block_sizes(num_experts, BLOCK_LOGITS // 2)
    return {"IS_SOFTMAX": is_softmax, "RENORMALIZE": renormalize, **sizes}


def moe_route_backward(
    d_weights: Tensor, logits: Tensor, top_k_index: Tensor, score: str, renormalize: bool, scale: float
) -> Tensor:
    """d_logits (N,E). See `fusedce.eager.moe_route` for the formula."""
    (num_rows, num_experts), top_k = logits.shape, top_k_index.shape[1]
    d_logits = logits.new_empty(logits.shape)
    sizes = constexprs(None, score == "softmax", renormalize, num_experts=num_experts)
    if num_rows:
        with torch.cuda.device_of(logits):
            KERNEL[(triton.cdiv(num_rows, sizes["BLOCK_N"]),)](
                d_weights.contiguous(), logits, top_k_index.contiguous(), d_logits, num_rows, num_experts, top_k,
                logits.stride(0), logits.stride(1), scale, **sizes, **ROW_LAUNCH,
            )  # fmt: skip
    return d_logits
