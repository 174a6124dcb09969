"""d_hidden's product over a chunk of words, added to those of the chunks before, for as many rows as the device says."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce import arch
from fusedce.configs import GemmTile, tile_for
from fusedce.triton.common import dot, grouped_order, launch_options, num_programs, operand

STAGE = "linear_ce_d_hidden"


@triton.jit
def halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of x."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def add_to(out, first_row, first_column, part, IS_FIRST: tl.constexpr):
    """out[first_row:, first_column:] += part, or = part."""
    if not IS_FIRST:
        part += out.load([first_row, first_column])
    out.store([first_row, first_column], part)


@triton.jit
def d_hidden_bwd_kernel(
    d_logits,
    weight,
    count_ptr,
    out,
    vocab,
    depth,
    d_logits_stride,
    weight_stride,
    IS_FIRST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """A program takes one BLOCK_N × BLOCK_D tile after another of out (N, D) fp32 (+)= d_logits · weight, over the first
    *count_ptr rows; the tile that they end in is written to its end.

    Each element has one program, which adds once. Reads both operands from L2, reads and writes 4 bytes an element.
    Offsets are int64: rows × words and rows × D may pass 2³¹.
    """
    count = tl.load(count_ptr)
    num_n = tl.cdiv(count, BLOCK_N)
    num_d = tl.cdiv(depth, BLOCK_D)
    for tile in tl.range(tl.program_id(0), num_n * num_d, tl.num_programs(0), flatten=DESCRIPTORS):
        block_n, block_d = grouped_order(tile, num_n, num_d, GROUP_N)
        first_n = block_n * BLOCK_N
        first_d = block_d * BLOCK_D
        acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        if DESCRIPTORS:
            for start in range(0, vocab, BLOCK_V):
                acc = dot(d_logits.load([first_n, start]), weight.load([start, first_d]), acc)
            # In quarters: one of fp32 in shared memory leaves three buffers to the operands.
            left, right = halves(acc, BLOCK_N, BLOCK_D)
            part_0, part_1 = halves(left, BLOCK_N, BLOCK_D // 2)
            part_2, part_3 = halves(right, BLOCK_N, BLOCK_D // 2)
            add_to(out, first_n, first_d, part_0, IS_FIRST)
            add_to(out, first_n, first_d + BLOCK_D // 4, part_1, IS_FIRST)
            add_to(out, first_n, first_d + BLOCK_D // 2, part_2, IS_FIRST)
            add_to(out, first_n, first_d + 3 * (BLOCK_D // 4), part_3, IS_FIRST)
        else:
            offs_n = (first_n + tl.arange(0, BLOCK_N)).to(tl.int64)
            offs_d = first_d + tl.arange(0, BLOCK_D)
            mask_n = (offs_n < count)[:, None]
            mask_d = (offs_d < depth)[None, :]
            for start in range(0, vocab, BLOCK_V):
                offs_v = start + tl.arange(0, BLOCK_V)
                mask_v = offs_v < vocab
                a_ptrs = d_logits + offs_n[:, None] * d_logits_stride + offs_v[None, :]
                b_ptrs = weight + offs_v.to(tl.int64)[:, None] * weight_stride + offs_d[None, :]
                a = tl.load(a_ptrs, mask=mask_n & mask_v[None, :], other=0.0)
                acc = dot(a, tl.load(b_ptrs, mask=mask_v[:, None] & mask_d, other=0.0), acc)
            out_ptrs = out + offs_n[:, None] * depth + offs_d[None, :]
            if not IS_FIRST:
                acc += tl.load(out_ptrs, mask=mask_n & mask_d, other=0.0)
            tl.store(out_ptrs, acc, mask=mask_n & mask_d)


KERNEL = d_hidden_bwd_kernel


def signature(dtype: str, tile: GemmTile) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    by_tma = {
        "d_logits": f"tensordesc<{dtype}[{tile.block_m}, {tile.block_k}]>",
        "weight": f"tensordesc<{dtype}[{tile.block_k}, {tile.block_n}]>",
        "out": f"tensordesc<fp32[{tile.block_m}, {tile.block_n // 4}]>",
    }
    return {
        **(by_tma if tile.tma else {**dict.fromkeys(("d_logits", "weight"), f"*{dtype}"), "out": "*fp32"}),
        "count_ptr": "*i32",
        **dict.fromkeys(("vocab", "depth", "d_logits_stride", "weight_stride"), "i32"),
        **dict.fromkeys(constexprs(tile), "constexpr"),
    }


def constexprs(tile: GemmTile, is_first: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches for a tile; its depth goes over the words."""
    return {
        "IS_FIRST": is_first,
        "DESCRIPTORS": tile.tma,
        "BLOCK_N": tile.block_m,
        "BLOCK_D": tile.block_n,
        "BLOCK_V": tile.block_k,
        "GROUP_N": tile.group_m,
    }


def add_d_hidden(d_logits: Tensor, weight: Tensor, count: Tensor, out: Tensor, by_tma: bool, is_first: bool) -> None:
    """out (N, D) fp32 (+)= d_logits (N, words) · weight (words, D), over the first count (1,) int32 rows. by_tma: all
    three can be described."""
    num_rows, depth = out.shape
    machine = arch.of_device(weight.device)
    tile = tile_for(STAGE, machine, weight.element_size(), by_tma)
    tiles = triton.cdiv(num_rows, tile.block_m) * triton.cdiv(depth, tile.block_n)
    with torch.cuda.device_of(weight):
        KERNEL[(num_programs(tiles, tile, machine),)](
            operand(d_logits, tile, (tile.block_m, tile.block_k)), operand(weight, tile, (tile.block_k, tile.block_n)),
            count, operand(out, tile, (tile.block_m, tile.block_n // 4)), *weight.shape,
            d_logits.stride(0), weight.stride(0), **constexprs(tile, is_first), **launch_options(tile, machine),
        )  # fmt: skip
