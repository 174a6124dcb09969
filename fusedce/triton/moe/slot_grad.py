"""The gradient of the routing weights: each slot sums its row's partial dot products, in order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH, round_to

STAGE = None


@triton.jit
def slot_bwd_kernel(
    partial_ptr,
    slot_row_ptr,
    out_ptr,
    num_slots,
    num_partial,
    BLOCK_S: tl.constexpr,
):
    """One program owns BLOCK_S slots: out[slot] = Σ_t partial[t, slot_row[slot]]; 0 for a slot that takes no
    part (row −1), NaN for a bad one (−2).

    Reads 4 bytes a slot and partial sum, writes one number a slot. Offsets into partial are int64.
    """
    offs_s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    mask_s = offs_s < num_slots
    row = tl.load(slot_row_ptr + offs_s, mask=mask_s, other=-1)
    ptrs = partial_ptr + row.to(tl.int64)
    acc = tl.zeros((BLOCK_S,), tl.float32)
    for _ in range(num_partial):
        acc += tl.load(ptrs, mask=row >= 0, other=float("nan"))
        ptrs += num_slots
    acc = tl.where(row == -1, 0.0, acc)
    tl.store(out_ptr + offs_s, round_to(acc, out_ptr.dtype.element_ty), mask=mask_s)


KERNEL = slot_bwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument; `dtype` does not matter, all numbers are fp32 here."""
    return {
        "partial_ptr": "*fp32",
        "slot_row_ptr": "*i32",
        "out_ptr": "*fp32",
        **dict.fromkeys(("num_slots", "num_partial"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None) -> dict[str, int]:
    """The kernel's sizes; a row kernel has no tile."""
    return {"BLOCK_S": 256}


def slot_grad(partial: Tensor, slot_row: Tensor, dtype: torch.dtype) -> Tensor:
    """d_top_k_weights (N,K) in `dtype` from partial sums (T,R) fp32."""
    out = partial.new_empty(slot_row.shape, dtype=dtype)
    sizes = constexprs()
    if out.numel():
        with torch.cuda.device_of(partial):
            KERNEL[(triton.cdiv(out.numel(), sizes["BLOCK_S"]),)](
                partial, slot_row, out, out.numel(), partial.shape[0], **sizes, **ROW_LAUNCH
            )
    return out
