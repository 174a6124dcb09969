"""What the kernels of routing share: logits in registers, their scores and order, what the weights are divided by."""

import triton
import triton.language as tl

# Logits a program holds, in all its rows: 16 registers of 128 lanes for each array of that size.
BLOCK_LOGITS = 2048


def block_sizes(num_experts: int, most_logits: int = BLOCK_LOGITS) -> dict[str, int]:
    """Rows and (padded) experts of one program's block of logits."""
    block_e = triton.next_power_of_2(num_experts)
    return {"BLOCK_N": max(most_logits // block_e, 1), "BLOCK_E": block_e}


@triton.jit
def load_logits(logits_ptr, offs_n, mask_n, num_experts, stride_n, stride_e, BLOCK_E: tl.constexpr):
    """Logits (BLOCK_N, BLOCK_E) in fp32, −inf past the experts; rows that mask_n leaves out are 0 and are not read."""
    offs_e = tl.arange(0, BLOCK_E)
    ptrs = logits_ptr + offs_n.to(tl.int64)[:, None] * stride_n + offs_e.to(tl.int64)[None, :] * stride_e
    mask_e = (offs_e < num_experts)[None, :]
    logits = tl.load(ptrs, mask=mask_n[:, None] & mask_e, other=0.0).to(tl.float32)
    return tl.where(mask_e, logits, -float("inf"))


@triton.jit
def scores_of(logits, num_experts, IS_SOFTMAX: tl.constexpr, BLOCK_E: tl.constexpr):
    """exp(logits − row maximum) or sigmoid(logits); 0 past the experts, also in a row without a finite logit."""
    if IS_SOFTMAX:
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        # The maximum passes over NaN, so that without this only the expert that has it would be NaN.
        total = tl.sum(scores, 1)[:, None]
        scores = tl.where(total == total, scores, float("nan"))
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    return tl.where((tl.arange(0, BLOCK_E) < num_experts)[None, :], scores, 0.0)


@triton.jit
def divisor(total, IS_SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr):
    """What divides a row's scores: the sum `total`, or 1 for sigmoid scores that stay as they are; 1 where it is 0."""
    if not IS_SOFTMAX and not RENORMALIZE:
        total = tl.full(total.shape, 1.0, tl.float32)
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def shares_of(scores):
    """Scores over their row's sum; 0 in a row where all are 0."""
    total = tl.sum(scores, 1)
    return scores / tl.where(total == 0.0, 1.0, total)[:, None]


# Below every key of a value: taken already, or no candidate.
TAKEN = tl.constexpr(-0x80000000)


@triton.jit
def sort_keys(values):
    """fp32 values as integers in the same order: −0 as 0, NaN above all, and room for TAKEN below −inf."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(values != values, 0x7FFFFFFF, keys)
