"""Tokens to rows: each row copies the token of its slot."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH, unit_rows

STAGE = None


@triton.jit
def dispatch_fwd_kernel(
    hidden_ptr,
    row_slot_ptr,
    rows_ptr,
    top_k,
    depth,
    hidden_stride,
    BLOCK_D: tl.constexpr,
):
    """One program owns BLOCK_D elements of one row: reads and writes each once, 0 where the row serves no slot.

    Row offsets are int64: rows × D may pass 2³¹.
    """
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < depth
    slot = tl.load(row_slot_ptr + row)
    token = (slot // top_k).to(tl.int64)
    served = offs_d < tl.where(slot < 0, 0, depth)
    values = tl.load(hidden_ptr + token * hidden_stride + offs_d, mask=served, other=0.0)
    tl.store(rows_ptr + row * depth + offs_d, values, mask=mask_d)


KERNEL = dispatch_fwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with rows of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        "hidden_ptr": f"*{dtype}",
        "row_slot_ptr": "*i32",
        "rows_ptr": f"*{dtype}",
        **dict.fromkeys(("top_k", "depth", "hidden_stride"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None) -> dict[str, int]:
    """The kernel's sizes; a row kernel has no tile."""
    return {"BLOCK_D": 1024}


def moe_dispatch(hidden: Tensor, row_slot: Tensor, slot_row: Tensor) -> Tensor:
    """rows (R,D). See `fusedce.eager.moe`."""
    hidden = unit_rows(hidden)
    num_rows, depth = row_slot.shape[0], hidden.shape[1]
    rows = hidden.new_empty((num_rows, depth))
    sizes = constexprs()
    if rows.numel():
        with torch.cuda.device_of(hidden):
            KERNEL[(num_rows, triton.cdiv(depth, sizes["BLOCK_D"]))](
                hidden, row_slot.contiguous(), rows, slot_row.shape[1], depth, hidden.stride(0), **sizes, **ROW_LAUNCH
            )
    return rows
