"""d_weight's product for a chunk of words, over as many rows as the device says."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce import arch
from fusedce.configs import GemmTile, tile_for
from fusedce.triton.common import describable, dot, grouped_order, launch_options, num_programs, operand, round_to

STAGE = "linear_ce_d_weight"


@triton.jit
def d_weight_bwd_kernel(
    d_logits,
    rows,
    count_ptr,
    scale_ptr,
    out,
    vocab,
    depth,
    d_logits_stride,
    DESCRIPTORS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_V: tl.constexpr,
):
    """A program takes one BLOCK_V × BLOCK_D tile after another of out (V, D) = scale · d_logitsᵀ · rows, over the first
    *count_ptr rows, in order, in fp32; 0 without rows, nothing is written where the count is below 0.

    By descriptor the rows behind the last one, up to a multiple of BLOCK_N, are read too, and are 0. Reads both
    operands from L2, writes each element once. Offsets are int64: rows × words and words × D may pass 2³¹.
    """
    count = tl.load(count_ptr)
    scale = tl.load(scale_ptr)
    num_v = tl.cdiv(vocab, BLOCK_V)
    num_d = tl.cdiv(depth, BLOCK_D)
    num_tiles = tl.where(count < 0, 0, num_v * num_d)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=DESCRIPTORS):
        block_v, block_d = grouped_order(tile, num_v, num_d, GROUP_V)
        first_v = block_v * BLOCK_V
        first_d = block_d * BLOCK_D
        acc = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
        if DESCRIPTORS:
            # A loop of no steps could not be joined with the outer one: one step is made, and its result left.
            for start in range(0, tl.maximum(count, 1), BLOCK_N):
                acc = dot(d_logits.load([start, first_v]).T, rows.load([start, first_d]), acc)
            out.store([first_v, first_d], round_to(tl.where(count > 0, acc, 0.0) * scale, out.dtype))
        else:
            offs_v = first_v + tl.arange(0, BLOCK_V)
            offs_d = first_d + tl.arange(0, BLOCK_D)
            mask_v = offs_v < vocab
            mask_d = offs_d < depth
            for start in range(0, count, BLOCK_N):
                offs_n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
                mask_n = offs_n < count
                a_ptrs = d_logits + offs_n[None, :] * d_logits_stride + offs_v[:, None]
                b_ptrs = rows + offs_n[:, None] * depth + offs_d[None, :]
                a = tl.load(a_ptrs, mask=mask_v[:, None] & mask_n[None, :], other=0.0)
                acc = dot(a, tl.load(b_ptrs, mask=mask_n[:, None] & mask_d[None, :], other=0.0), acc)
            out_ptrs = out + offs_v.to(tl.int64)[:, None] * depth + offs_d[None, :]
            tl.store(out_ptrs, round_to(acc * scale, out.dtype.element_ty), mask=mask_v[:, None] & mask_d[None, :])


KERNEL = d_weight_bwd_kernel


def signature(dtype: str, tile: GemmTile) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    by_tma = {
        "d_logits": f"tensordesc<{dtype}[{tile.block_k}, {tile.block_m}]>",
        "rows": f"tensordesc<{dtype}[{tile.block_k}, {tile.block_n}]>",
        "out": f"tensordesc<{dtype}[{tile.block_m}, {tile.block_n}]>",
    }
    return {
        **(by_tma if tile.tma else dict.fromkeys(("d_logits", "rows", "out"), f"*{dtype}")),
        "count_ptr": "*i32",
        "scale_ptr": "*fp32",
        **dict.fromkeys(("vocab", "depth", "d_logits_stride"), "i32"),
        **dict.fromkeys(constexprs(tile), "constexpr"),
    }


def constexprs(tile: GemmTile) -> dict[str, int]:
    """The kernel's sizes for a tile; its depth goes over the rows."""
    return {
        "DESCRIPTORS": tile.tma,
        "BLOCK_V": tile.block_m,
        "BLOCK_D": tile.block_n,
        "BLOCK_N": tile.block_k,
        "GROUP_V": tile.group_m,
    }


def d_weight(d_logits: Tensor, rows: Tensor, count: Tensor, scale: Tensor, out: Tensor) -> None:
    """out (words, D) = scale · d_logitsᵀ (words, N) · rows (N, D), over the first count (1,) int32 rows; untouched
    where that is below 0."""
    machine = arch.of_device(out.device)
    by_tma = all(map(describable, (d_logits, rows, out)))
    tile = tile_for(STAGE, machine, out.element_size(), by_tma)
    tiles = triton.cdiv(out.shape[0], tile.block_m) * triton.cdiv(out.shape[1], tile.block_n)
    with torch.cuda.device_of(out):
        KERNEL[(num_programs(tiles, tile, machine),)](
            operand(d_logits, tile, (tile.block_k, tile.block_m)), operand(rows, tile, (tile.block_k, tile.block_n)),
            count, scale, operand(out, tile, (tile.block_m, tile.block_n)), *out.shape, d_logits.stride(0),
            **constexprs(tile), **launch_options(tile, machine),
        )  # fmt: skip
