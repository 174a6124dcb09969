"""The gradients of the rows that have one, back to their places; the others get 0."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH, round_to

STAGE = None
BLOCK_N, BLOCK_D = 8, 256


@triton.jit
def spread_rows_kernel(
    rows_ptr,
    place_ptr,
    count_ptr,
    scale_ptr,
    out_ptr,
    num_rows,
    depth,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program owns BLOCK_N rows of out: scale · rows[place], or 0 where place is below 0; nothing is written where
    the count is below 0.

    Reads 4·D bytes a row that has a place, writes D elements a row. Offsets are int64: rows × D may pass 2³¹.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < tl.where(tl.load(count_ptr) < 0, 0, num_rows)
    place = tl.load(place_ptr + offs_n, mask=mask_n, other=-1)
    scale = tl.load(scale_ptr)
    for start in range(0, depth, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        mask_d = (offs_d < depth)[None, :]
        ptrs = rows_ptr + place.to(tl.int64)[:, None] * depth + offs_d[None, :]
        values = tl.load(ptrs, mask=(place >= 0)[:, None] & mask_d, other=0.0) * scale
        out_ptrs = out_ptr + offs_n.to(tl.int64)[:, None] * depth + offs_d[None, :]
        tl.store(out_ptrs, round_to(values, out_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_d)


KERNEL = spread_rows_kernel


def signature(dtype: str, tile: GemmTile | None = None) -> dict[str, str]:
    """Triton's type of every argument, with a result of `dtype`."""
    return {
        **dict.fromkeys(("rows_ptr", "scale_ptr"), "*fp32"),
        "place_ptr": "*i64",
        "count_ptr": "*i32",
        "out_ptr": f"*{dtype}",
        **dict.fromkeys(("num_rows", "depth"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None) -> dict[str, int]:
    """The kernel's sizes; a row kernel has no tile."""
    return {"BLOCK_N": BLOCK_N, "BLOCK_D": BLOCK_D}


def spread_rows(rows: Tensor, place: Tensor, count: Tensor, scale: Tensor, out: Tensor) -> None:
    """out (N, D) = scale · rows[place] of rows (N, D) fp32, 0 where place (N,) is below 0; untouched where count (1,)
    is below 0."""
    num_rows, depth = out.shape
    if num_rows:
        with torch.cuda.device_of(out):
            KERNEL[(triton.cdiv(num_rows, BLOCK_N),)](
                rows, place, count, scale, out, num_rows, depth, **constexprs(), **ROW_LAUNCH
            )
