"""What a shard of the vocabulary knows of each row: the forward's partial sums, merged, and the target's logit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.chunked import row_chunks
from fusedce.configs import GemmTile
from fusedce.options import LogitOptions
from fusedce.rows import row_slopes
from fusedce.triton.common import ROW_LAUNCH, unit_rows
from fusedce.triton.linear_ce.finish import BLOCK_N, BLOCK_S, merged_splits
from fusedce.triton.linear_ce.forward import PARTIAL_BYTES, head_of, tile_sums
from fusedce.triton.linear_ce.logits import LN_2, LOG2_E
from fusedce.triton.linear_ce.target_logit import target_logit

STAGE = None


@triton.jit
def parts_kernel(
    partial_ptr,
    raw_target_ptr,
    target_ptr,
    slope_ptr,
    out_ptr,
    num_rows,
    num_splits,
    vocab,
    HAS_ENTROPY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program owns BLOCK_N rows: out[row] = maximum, Σ e^g, Σ e^g·g over the shard's words but the target; the
    target's raw logit, −inf where it is elsewhere. Reads 12 bytes a row and split.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < num_rows
    slope = tl.load(slope_ptr + offs_n, mask=mask_n, other=0.0)
    target = tl.load(target_ptr + offs_n, mask=mask_n, other=-1)
    largest, rest, sum_gap = merged_splits(
        partial_ptr, offs_n, slope * LOG2_E, num_rows, num_splits, HAS_ENTROPY, BLOCK_N, BLOCK_S
    )
    raw_target = tl.load(raw_target_ptr + offs_n, mask=mask_n, other=0.0)
    out_ptrs = out_ptr + 4 * offs_n.to(tl.int64)
    tl.store(out_ptrs, largest, mask=mask_n)
    tl.store(out_ptrs + 1, rest, mask=mask_n)
    tl.store(out_ptrs + 2, sum_gap * LN_2, mask=mask_n)
    tl.store(out_ptrs + 3, tl.where((target >= 0) & (target < vocab), raw_target, -float("inf")), mask=mask_n)


KERNEL = parts_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument; `dtype` does not matter, all numbers are fp32 here."""
    return {
        **dict.fromkeys(("partial_ptr", "raw_target_ptr", "slope_ptr", "out_ptr"), "*fp32"),
        "target_ptr": "*i64",
        **dict.fromkeys(("num_rows", "num_splits", "vocab"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, has_entropy: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches; a row kernel has no tile."""
    return {"HAS_ENTROPY": has_entropy, "BLOCK_N": BLOCK_N, "BLOCK_S": BLOCK_S}


def linear_parts(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    with_entropy: bool,
) -> Tensor:
    """(N,4) fp32; see `fusedce.rows.merge_parts`."""
    hidden, weight, target = unit_rows(hidden), unit_rows(weight), target.contiguous()
    num_rows, vocab = hidden.shape[0], weight.shape[0]
    slopes = row_slopes(options, num_rows, hidden)
    out = hidden.new_empty((num_rows, 4), dtype=torch.float32)
    whole = head_of(hidden, weight, bias, options)
    raw_target = target_logit(target, whole)
    for start, stop in row_chunks(num_rows, 16 * whole.num_splits, PARTIAL_BYTES):
        rows = slice(start, stop)
        partial = tile_sums(hidden[rows], weight, bias, target[rows], slopes[rows], options, with_entropy)
        with torch.cuda.device_of(hidden):
            KERNEL[(triton.cdiv(stop - start, BLOCK_N),)](
                partial, raw_target[rows], target[rows], slopes[rows], out[rows], stop - start, partial.shape[0], vocab,
                **constexprs(None, with_entropy), **ROW_LAUNCH,
            )  # fmt: skip
    return out
