"""The gradient of a bias: each expert sums its rows, in order, in fp32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH, round_to
from fusedce.triton.moe.tile_table import RowTiles

STAGE = None


@triton.jit
def bias_bwd_kernel(
    rows_ptr,
    row_slot_ptr,
    top_k_weights_ptr,
    offsets_ptr,
    first_ptr,
    out_ptr,
    width,
    rows_stride,
    WEIGHTED: tl.constexpr,
    TILE_R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program owns BLOCK_N columns of one expert: out[e, n] = Σ_r rows[r, n], each row times its slot's weight
    where WEIGHTED.

    Reads each element once; writes 0 for an expert without rows. Row offsets are int64.
    """
    expert = tl.program_id(0)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < width
    first = tl.load(offsets_ptr + expert)
    count = tl.load(offsets_ptr + expert + 1) - first
    start = tl.load(first_ptr + expert).to(tl.int64) * TILE_R
    total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for begin in range(0, count, BLOCK_R):
        inside = begin + tl.arange(0, BLOCK_R)
        mask_r = inside < count
        ptrs = rows_ptr + (start + inside)[:, None] * rows_stride + offs_n[None, :]
        values = tl.load(ptrs, mask=mask_r[:, None] & mask_n[None, :], other=0.0).to(tl.float32)
        if WEIGHTED:
            slot = tl.load(row_slot_ptr + first + inside, mask=mask_r, other=0)
            values *= tl.load(top_k_weights_ptr + slot, mask=mask_r, other=0.0).to(tl.float32)[:, None]
        total += values
    out_ptrs = out_ptr + expert.to(tl.int64) * width + offs_n
    tl.store(out_ptrs, round_to(tl.sum(total, 0), out_ptr.dtype.element_ty), mask=mask_n)


KERNEL = bias_bwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with rows of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        "rows_ptr": f"*{dtype}",
        "row_slot_ptr": "*i32",
        "top_k_weights_ptr": "*fp32",
        **dict.fromkeys(("offsets_ptr", "first_ptr"), "*i32"),
        "out_ptr": f"*{dtype}",
        **dict.fromkeys(("width", "rows_stride"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, weighted: bool = True, *, tile_r: int = 128) -> dict[str, int]:
    """The kernel's sizes; tile_r: rows of a tile of the GEMMs around it."""
    return {"WEIGHTED": weighted, "TILE_R": tile_r, "BLOCK_R": 32, "BLOCK_N": 64}


def bias_grad(rows: Tensor, tiles: RowTiles, top_k_weights: Tensor | None = None) -> Tensor:
    """(E,X) in rows' dtype: the sum of each expert's padded rows (·,X), each times its slot's weight where
    top_k_weights is given."""
    num_experts, width = tiles.num_experts, rows.shape[1]
    out = rows.new_empty((num_experts, width))
    sizes = constexprs(weighted=top_k_weights is not None, tile_r=tiles.block_r)
    with torch.cuda.device_of(rows):
        KERNEL[(num_experts, triton.cdiv(width, sizes["BLOCK_N"]))](
            rows, tiles.row_slot, tiles.first if top_k_weights is None else top_k_weights, tiles.offsets, tiles.first,
            out, width, rows.stride(0), **sizes, **ROW_LAUNCH,
        )  # fmt: skip
    return out
