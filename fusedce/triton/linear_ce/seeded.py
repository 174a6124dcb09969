"""The loss with its gradients in one pass over the logits: exponentials about a seed that is known beforehand.

The seed of a row is its target's logit, one dot product. A tile's epilogue writes E = e^(z − z_y), in bf16, and its
sums; the logits never exist. With S = 1 + Σ E everything follows: log p_y = −log S, p_j = E_j / S, and the row's factor
1/S goes into d_hidden's rows and into the copy of hidden that d_weight's GEMM reads. So both are plain GEMMs over E.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.options import LogitOptions
from fusedce.triton.common import grouped_order, operand, round_to
from fusedce.triton.linear_ce.logits import (
    LOG2_E,
    cap_slope,
    constants,
    head,
    operand_types,
    raw_logits_tile,
    words_but_target,
)

STAGE, STAGE_WITH_OPTIONS = "linear_ce_seeded", "linear_ce_seeded_options"


@triton.jit
def seeded_exp_kernel(
    hidden,
    weight,
    bias_ptr,
    target_ptr,
    slope_ptr,
    seed_ptr,
    flag_ptr,
    partial_ptr,
    out,
    num_rows,
    vocab,
    depth,
    hidden_stride,
    weight_stride,
    softcap,
    out_stride,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IF_FLAGGED: tl.constexpr,
    EVEN_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """A program takes one BLOCK_N × BLOCK_V tile after another: out = e · slope of the softcap and
    partial[word block, row] = Σ e, with e = 2^((raw − seed)·slope2), and 0 at the target.

    IF_FLAGGED: nothing is done unless *flag_ptr is set. Writes each element once; reads both operands of the tile from
    L2. Offsets into the chunk are int64: rows × V may pass 2³¹.
    """
    num_n = tl.cdiv(num_rows, BLOCK_N)
    num_v = tl.cdiv(vocab, BLOCK_V)
    num_tiles = num_n * num_v
    if IF_FLAGGED:
        num_tiles = tl.where(tl.load(flag_ptr) == 0, 0, num_tiles)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=DESCRIPTORS):
        block_n, block_v = grouped_order(tile, num_n, num_v, GROUP_N)
        raw = raw_logits_tile(
            hidden, weight, bias_ptr, block_n, block_v, num_rows, vocab, depth, hidden_stride, weight_stride,
            softcap, HAS_BIAS, HAS_SOFTCAP, EVEN_D, DESCRIPTORS, BLOCK_N, BLOCK_V, BLOCK_D,
        )  # fmt: skip
        offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < num_rows
        target = tl.load(target_ptr + offs_n, mask=mask_n, other=-1)
        slope2 = tl.load(slope_ptr + offs_n, mask=mask_n, other=0.0) * LOG2_E
        seed = tl.load(seed_ptr + offs_n, mask=mask_n, other=0.0)
        exps = tl.exp2((raw - seed[:, None]) * slope2[:, None])
        exps = tl.where(words_but_target(block_v, target, vocab, BLOCK_V), exps, 0.0)
        tl.store(partial_ptr + block_v.to(tl.int64) * num_rows + offs_n, tl.sum(exps, 1), mask=mask_n)
        if HAS_SOFTCAP:
            exps *= cap_slope(raw, softcap)
        if DESCRIPTORS:
            out.store([block_n * BLOCK_N, block_v * BLOCK_V], round_to(exps, out.dtype))
        else:
            # The tile's corner in int64; inside it 32 bits do, and leave registers to the accumulators.
            corner = out + block_n.to(tl.int64) * BLOCK_N * out_stride + block_v * BLOCK_V
            out_ptrs = corner + tl.arange(0, BLOCK_N)[:, None] * out_stride + tl.arange(0, BLOCK_V)[None, :]
            mask = mask_n[:, None] & (block_v * BLOCK_V + tl.arange(0, BLOCK_V) < vocab)[None, :]
            tl.store(out_ptrs, round_to(exps, out.dtype.element_ty), mask=mask)


KERNEL = seeded_exp_kernel


def signature(dtype: str, tile: GemmTile) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        **operand_types(dtype, tile),
        "target_ptr": "*i64",
        **dict.fromkeys(("slope_ptr", "seed_ptr", "partial_ptr"), "*fp32"),
        "flag_ptr": "*i32",
        "out": f"tensordesc<{dtype}[{tile.block_m}, {tile.block_n}]>" if tile.tma else f"*{dtype}",
        "out_stride": "i32",
        **dict.fromkeys(constexprs(tile), "constexpr"),
    }


def constexprs(
    tile: GemmTile, depth: int = 0, has_bias: bool = True, has_softcap: bool = True, if_flagged: bool = True
) -> dict[str, int]:
    """The kernel's sizes and switches for a tile and D."""
    return constants(tile, depth, has_bias, has_softcap) | {"IF_FLAGGED": if_flagged}


def seeded_exp(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    slopes: Tensor,
    seed: Tensor,
    options: LogitOptions,
    out: Tensor,
    flag: Tensor | None = None,
    partial: Tensor | None = None,
) -> Tensor:
    """Fill out (rows, V) and partial (splits, rows), the sums of e, which is made if there is none, and returned.

    With a flag, both only where that is set.
    """
    run = head((STAGE, STAGE_WITH_OPTIONS), rows, weight, bias, options, out)
    if partial is None:
        partial = rows.new_empty((run.num_splits, rows.shape[0]), dtype=torch.float32)
    with torch.cuda.device_of(rows):
        KERNEL[run.grid()](
            *run.arguments(), target, slopes, seed, target if flag is None else flag, partial,
            operand(out, run.tile, (run.tile.block_m, run.tile.block_n)), *run.sizes(), out.stride(0),
            **run.constants(), IF_FLAGGED=flag is not None, **run.launch(),
        )  # fmt: skip
    return partial
