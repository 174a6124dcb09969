"""The rows that have a gradient, side by side: a copy of hidden that the products over them read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH

STAGE = None
BLOCK_N, BLOCK_D = 8, 256
# Products walk the copied rows in steps of at most so many; those behind the last one are 0.
ROW_STEP = 128


@triton.jit
def live_rows_kernel(
    hidden_ptr,
    order_ptr,
    count_ptr,
    out_ptr,
    num_rows,
    depth,
    hidden_stride,
    ROW_STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program owns BLOCK_N rows of the copy: out[p] = hidden[order[p]] for the first *count_ptr, 0 for those behind
    them up to the next multiple of ROW_STEP; nothing is written further on.

    Reads and writes D elements a row. Offsets are int64: rows × D may pass 2³¹.
    """
    count = tl.load(count_ptr)
    first = tl.program_id(0) * BLOCK_N
    if first < tl.cdiv(count, ROW_STEP) * ROW_STEP:
        offs_n = first + tl.arange(0, BLOCK_N)
        mask_n = offs_n < num_rows
        live = offs_n < count
        row = tl.load(order_ptr + offs_n, mask=live, other=0)
        for start in range(0, depth, BLOCK_D):
            offs_d = start + tl.arange(0, BLOCK_D)
            mask_d = (offs_d < depth)[None, :]
            ptrs = hidden_ptr + row.to(tl.int64)[:, None] * hidden_stride + offs_d[None, :]
            values = tl.load(ptrs, mask=live[:, None] & mask_d, other=0.0)
            out_ptrs = out_ptr + offs_n.to(tl.int64)[:, None] * depth + offs_d[None, :]
            tl.store(out_ptrs, values, mask=mask_n[:, None] & mask_d)


KERNEL = live_rows_kernel


def signature(dtype: str, tile: GemmTile | None = None) -> dict[str, str]:
    """Triton's type of every argument."""
    return {
        **dict.fromkeys(("hidden_ptr", "out_ptr"), f"*{dtype}"),
        "order_ptr": "*i64",
        "count_ptr": "*i32",
        **dict.fromkeys(("num_rows", "depth", "hidden_stride"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None) -> dict[str, int]:
    """The kernel's sizes; a row kernel has no tile."""
    return {"ROW_STEP": ROW_STEP, "BLOCK_N": BLOCK_N, "BLOCK_D": BLOCK_D}


def live_rows(hidden: Tensor, order: Tensor, count: Tensor) -> Tensor:
    """(N, D): hidden[order[p]] for p below count (1,) int32; the rest as in the kernel."""
    num_rows, depth = hidden.shape
    out = hidden.new_empty((num_rows, depth))
    if num_rows:
        with torch.cuda.device_of(hidden):
            KERNEL[(triton.cdiv(num_rows, BLOCK_N),)](
                hidden, order, count, out, num_rows, depth, hidden.stride(0), **constexprs(), **ROW_LAUNCH
            )
    return out
