"""The gradient, in the logits, of what the losses on a router are made of."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH, round_to
from fusedce.triton.moe.scores import block_sizes, load_logits, scores_of, shares_of

STAGE = None


@triton.jit
def balance_bwd_kernel(
    d_share_ptr,
    d_square_ptr,
    logits_ptr,
    mask_ptr,
    d_logits_ptr,
    length,
    num_experts,
    stride_n,
    stride_e,
    IS_SOFTMAX: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program owns BLOCK_N tokens of one sequence and all experts: mask · (q·(g − Σ q·g)·slope + 2·lse·g₂·p), q the
    normalized scores, p the softmax.

    Reads each logit once, writes each gradient once, 0 for a token whose mask is 0, which is not read. Row offsets are
    int64.
    """
    sequence = tl.program_id(1).to(tl.int64)
    offs_l = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_e = tl.arange(0, BLOCK_E)
    mask_e = offs_e < num_experts
    offs_n = sequence * length + offs_l
    inside = offs_l < length
    kept = tl.where(inside, 1.0, 0.0)
    if HAS_MASK:
        kept = tl.load(mask_ptr + offs_n, mask=inside, other=0.0)
    logits = load_logits(logits_ptr, offs_n, kept != 0.0, num_experts, stride_n, stride_e, BLOCK_E)
    exps = tl.exp(logits - tl.max(logits, 1)[:, None])
    total = tl.sum(exps, 1)
    lse = tl.max(logits, 1) + tl.log(total)
    scores = scores_of(logits, num_experts, IS_SOFTMAX, BLOCK_E)
    share = shares_of(scores)
    g = tl.load(d_share_ptr + sequence * num_experts + offs_e, mask=mask_e, other=0.0)[None, :]
    d_logits = share * (g - tl.sum(share * g, 1)[:, None])
    if not IS_SOFTMAX:
        d_logits *= 1.0 - scores
    d_logits += (2.0 * tl.load(d_square_ptr + sequence) * lse / total)[:, None] * exps
    # Rows that are left out hold finite numbers: the product is 0.
    d_logits *= kept[:, None]
    offsets = offs_n[:, None] * num_experts + offs_e[None, :]
    tl.store(
        d_logits_ptr + offsets,
        round_to(d_logits, d_logits_ptr.dtype.element_ty),
        mask=inside[:, None] & mask_e[None, :],
    )


KERNEL = balance_bwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with logits of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        **dict.fromkeys(("d_share_ptr", "d_square_ptr"), "*fp32"),
        "logits_ptr": f"*{dtype}",
        "mask_ptr": "*fp32",
        "d_logits_ptr": f"*{dtype}",
        **dict.fromkeys(("length", "num_experts", "stride_n", "stride_e"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(
    tile: GemmTile | None = None, is_softmax: bool = True, has_mask: bool = True, *, num_experts: int = 128
) -> dict[str, int]:
    """The kernel's sizes and switches; a row kernel has no tile."""
    return {"IS_SOFTMAX": is_softmax, "HAS_MASK": has_mask, **block_sizes(num_experts)}


def moe_balance_backward(
    d_share: Tensor, d_square: Tensor, logits: Tensor, mask: Tensor | None, num_sequences: int, score: str
) -> Tensor:
    """d_logits (N,E). See `fusedce.eager.moe_route` for the formula."""
    (num_rows, num_experts), length = logits.shape, logits.shape[0] // num_sequences
    sizes = constexprs(None, score == "softmax", mask is not None, num_experts=num_experts)
    d_logits = logits.new_empty(logits.shape)
    d_share = d_share.contiguous()
    if num_rows:
        with torch.cuda.device_of(logits):
            KERNEL[(triton.cdiv(length, sizes["BLOCK_N"]), num_sequences)](
                d_share, d_square.contiguous(), logits, d_share if mask is None else mask.float().contiguous(),
                d_logits, length, num_experts, logits.stride(0), logits.stride(1), **sizes, **ROW_LAUNCH,
            )  # fmt: skip
    return d_logits
