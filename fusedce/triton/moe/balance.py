"""What the losses on a router are made of: partial sums over blocks of tokens, then one sum over the blocks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH
from fusedce.triton.moe.scores import block_sizes, load_logits, scores_of, shares_of

STAGE = None


@triton.jit
def balance_fwd_kernel(
    logits_ptr,
    index_ptr,
    mask_ptr,
    load_ptr,
    share_ptr,
    square_ptr,
    length,
    num_experts,
    top_k,
    stride_n,
    stride_e,
    IS_SOFTMAX: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program owns BLOCK_N tokens of one sequence and all experts, and sums over its tokens: no atomics.

    Reads each logit once and 8 bytes a slot, writes 8 bytes an expert. A token whose mask is 0 is not read. Row and
    partial offsets are int64.
    """
    block = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    offs_l = block * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_e = tl.arange(0, BLOCK_E)
    offs_n = sequence * length + offs_l
    mask_n = offs_l < length
    kept = tl.where(mask_n, 1.0, 0.0)
    if HAS_MASK:
        kept = tl.load(mask_ptr + offs_n, mask=mask_n, other=0.0)
        mask_n = kept != 0.0
    logits = load_logits(logits_ptr, offs_n, mask_n, num_experts, stride_n, stride_e, BLOCK_E)
    share = shares_of(scores_of(logits, num_experts, IS_SOFTMAX, BLOCK_E)) * kept[:, None]
    largest = tl.max(logits, 1)
    lse = largest + tl.log(tl.sum(tl.exp(logits - largest[:, None]), 1))
    count = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    for k in range(top_k):
        # In 64 bits, so that 2³² is not expert 0.
        expert = tl.load(index_ptr + offs_n * top_k + k, mask=mask_n, other=-1)
        count += tl.where(offs_e.to(tl.int64)[None, :] == expert[:, None], kept[:, None], 0.0)
    partial = sequence * tl.num_programs(0) + block
    offsets = partial * num_experts + offs_e
    mask_e = offs_e < num_experts
    tl.store(load_ptr + offsets, tl.sum(count, 0), mask=mask_e)
    tl.store(share_ptr + offsets, tl.sum(share, 0), mask=mask_e)
    tl.store(square_ptr + partial, tl.sum(lse * lse * kept, 0))


KERNEL = balance_fwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with logits of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        "logits_ptr": f"*{dtype}",
        "index_ptr": "*i64",
        **dict.fromkeys(("mask_ptr", "load_ptr", "share_ptr", "square_ptr"), "*fp32"),
        **dict.fromkeys(("length", "num_experts", "top_k", "stride_n", "stride_e"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(
    tile: GemmTile | None = None, is_softmax: bool = True, has_mask: bool = True, *, num_experts: int = 128
) -> dict[str, int]:
    """The kernel's sizes and switches; a row kernel has no tile."""
    return {"IS_SOFTMAX": is_softmax, "HAS_MASK": has_mask, **block_sizes(num_experts)}


def moe_balance(
    logits: Tensor, top_k_index: Tensor, mask: Tensor | None, num_sequences: int, score: str
) -> tuple[Tensor, Tensor, Tensor]:
    """load (B,E), share (B,E), square (B,), fp32. See `fusedce.eager.moe_route` for the formula."""
    (num_rows, num_experts), length = logits.shape, logits.shape[0] // num_sequences
    sizes = constexprs(None, score == "softmax", mask is not None, num_experts=num_experts)
    num_blocks = triton.cdiv(length, sizes["BLOCK_N"])
    load, share = (logits.new_empty((num_sequences, num_blocks, num_experts), dtype=torch.float32) for _ in range(2))
    square = logits.new_empty((num_sequences, num_blocks), dtype=torch.float32)
    if num_rows:
        with torch.cuda.device_of(logits):
            KERNEL[(num_blocks, num_sequences)](
                logits, top_k_index.contiguous(), square if mask is None else mask.float().contiguous(),
                load, share, square, length, num_experts, top_k_index.shape[1],
                logits.stride(0), logits.stride(1), **sizes, **ROW_LAUNCH,
            )  # fmt: skip
    return load.sum(1), share.sum(1), square.sum(1)
