"""The search for a label or expert id that is none."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH

STAGE = None


@triton.jit
def first_outside_kernel(
    values_ptr,
    seen_ptr,
    size,
    ignore,
    num_rows,
    HAS_IGNORE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program walks all rows: the first whose value is neither in [0, size) nor `ignore`, and that value, go to
    seen (2,), unless something was seen before.

    Reads 8 bytes a row. Alone, because a second program could not be told which of them found the first.
    """
    offs_n = tl.arange(0, BLOCK_N)
    found = tl.full((BLOCK_N,), num_rows, tl.int64)
    for start in range(0, num_rows, BLOCK_N):
        rows = start + offs_n
        values = tl.load(values_ptr + rows, mask=rows < num_rows, other=0)
        outside = (values < 0) | (values >= size)
        if HAS_IGNORE:
            outside &= values != ignore
        found = tl.minimum(found, tl.where(outside & (rows < num_rows), rows, num_rows))
    first = tl.min(found, 0)
    if (first < num_rows) & (tl.load(seen_ptr) < 0):
        tl.store(seen_ptr, first)
        tl.store(seen_ptr + 1, tl.load(values_ptr + first))


KERNEL = first_outside_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument; all are integers, whatever `dtype`."""
    return {
        **dict.fromkeys(("values_ptr", "seen_ptr"), "*i64"),
        **dict.fromkeys(("size", "ignore", "num_rows"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, has_ignore: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches; a row kernel has no tile."""
    return {"HAS_IGNORE": has_ignore, "BLOCK_N": 2048}


def first_outside(values: Tensor, size: int, ignore: int | None, seen: Tensor) -> None:
    """See `fusedce.outside.first_outside`."""
    with torch.cuda.device_of(values):
        KERNEL[(1,)](
            values.contiguous(), seen, size, 0 if ignore is None else ignore, values.shape[0],
            **constexprs(has_ignore=ignore is not None), **ROW_LAUNCH,
        )  # fmt: skip
