"""Rows to tokens: each token sums its K rows, in slot order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH, round_to, unit_rows

STAGE = None


@triton.jit
def combine_fwd_kernel(
    rows_ptr,
    slot_row_ptr,
    out_ptr,
    depth,
    rows_stride,
    TOP_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program owns BLOCK_D elements of one token: reads its K rows once, sums them in fp32, writes once.

    A slot with row −1 adds nothing, with −2 NaN. Row offsets are int64: rows × D may pass 2³¹.
    """
    token = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < depth
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for k in range(TOP_K):
        row = tl.load(slot_row_ptr + token * TOP_K + k).to(tl.int64)
        has_row = offs_d < tl.where(row < 0, 0, depth)
        acc += tl.load(rows_ptr + row * rows_stride + offs_d, mask=has_row, other=0.0).to(tl.float32)
        acc += tl.where(row < -1, float("nan"), 0.0)
    tl.store(out_ptr + token * depth + offs_d, round_to(acc, out_ptr.dtype.element_ty), mask=mask_d)


KERNEL = combine_fwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with rows of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        "rows_ptr": f"*{dtype}",
        "slot_row_ptr": "*i32",
        "out_ptr": f"*{dtype}",
        **dict.fromkeys(("depth", "rows_stride"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, *, top_k: int = 8) -> dict[str, int]:
    """The kernel's sizes; a row kernel has no tile."""
    return {"TOP_K": top_k, "BLOCK_D": 1024}


def moe_combine(rows: Tensor, row_slot: Tensor, slot_row: Tensor) -> Tensor:
    """(N,D). See `fusedce.eager.moe`."""
    rows = unit_rows(rows)
    (num_tokens, top_k), depth = slot_row.shape, rows.shape[1]
    out = rows.new_empty((num_tokens, depth))
    sizes = constexprs(top_k=top_k)
    if out.numel():
        with torch.cuda.device_of(rows):
            KERNEL[(num_tokens, triton.cdiv(depth, sizes["BLOCK_D"]))](
                rows, slot_row.contiguous(), out, depth, rows.stride(0), **sizes, **ROW_LAUNCH
            )
    return out
