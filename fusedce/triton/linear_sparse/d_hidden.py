"""d_hidden's product over a chunk of words, added to the chunks before, for as many rows as the device says."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce import arch
from fusedce.configs import GemmTile, tile_for
from fusedce.triton.common import describable, dot, grouped_order, launch_options, num_programs, operand

STAGE = "linear_ce_d_hidden"


@triton.jit
def halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of x."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def store_quarters(out_ptrs, mask_n, columns, acc, IS_FIRST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out (+)= acc, a quarter of the columns at a time; out_ptrs: the first quarter's; columns: how many there are.

    Two quarters of what is there are on their way while one is added: read one after another they are a tenth of the
    kernel's time, all at once they do not fit the registers.
    """
    left, right = halves(acc, ROWS, COLUMNS)
    part_0, part_1 = halves(left, ROWS, COLUMNS // 2)
    part_2, part_3 = halves(right, ROWS, COLUMNS // 2)
    step: tl.constexpr = COLUMNS // 4
    offs = tl.arange(0, step)[None, :]
    mask_0 = mask_n & (offs < columns)
    mask_1 = mask_n & (offs < columns - step)
    mask_2 = mask_n & (offs < columns - 2 * step)
    mask_3 = mask_n & (offs < columns - 3 * step)
    if IS_FIRST:
        tl.store(out_ptrs, part_0, mask=mask_0)
        tl.store(out_ptrs + step, part_1, mask=mask_1)
        tl.store(out_ptrs + 2 * step, part_2, mask=mask_2)
        tl.store(out_ptrs + 3 * step, part_3, mask=mask_3)
    else:
        old_0 = tl.load(out_ptrs, mask=mask_0, other=0.0)
        old_1 = tl.load(out_ptrs + step, mask=mask_1, other=0.0)
        tl.store(out_ptrs, part_0 + old_0, mask=mask_0)
        old_2 = tl.load(out_ptrs + 2 * step, mask=mask_2, other=0.0)
        tl.store(out_ptrs + step, part_1 + old_1, mask=mask_1)
        old_3 = tl.load(out_ptrs + 3 * step, mask=mask_3, other=0.0)
        tl.store(out_ptrs + 2 * step, part_2 + old_2, mask=mask_2)
        tl.store(out_ptrs + 3 * step, part_3 + old_3, mask=mask_3)


@triton.jit
def d_hidden_bwd_kernel(
    d_logits,
    weight,
    count_ptr,
    out_ptr,
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
    """A program takes one BLOCK_N × BLOCK_D tile after another of out (N, D) fp32 (+)= d_logits · weight, the first
    *count_ptr rows of it.

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
        offs_n = (first_n + tl.arange(0, BLOCK_N)).to(tl.int64)
        mask_n = (offs_n < count)[:, None]
        acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        if DESCRIPTORS:
            for start in range(0, vocab, BLOCK_V):
                acc = dot(d_logits.load([first_n, start]), weight.load([start, first_d]), acc)
            out_ptrs = out_ptr + offs_n[:, None] * depth + first_d + tl.arange(0, BLOCK_D // 4)[None, :]
            store_quarters(out_ptrs, mask_n, depth - first_d, acc, IS_FIRST, BLOCK_N, BLOCK_D)
        else:
            offs_d = first_d + tl.arange(0, BLOCK_D)
            mask_d = (offs_d < depth)[None, :]
            for start in range(0, vocab, BLOCK_V):
                offs_v = start + tl.arange(0, BLOCK_V)
                mask_v = offs_v < vocab
                a_ptrs = d_logits + offs_n[:, None] * d_logits_stride + offs_v[None, :]
                b_ptrs = weight + offs_v.to(tl.int64)[:, None] * weight_stride + offs_d[None, :]
                a = tl.load(a_ptrs, mask=mask_n & mask_v[None, :], other=0.0)
                acc = dot(a, tl.load(b_ptrs, mask=mask_v[:, None] & mask_d, other=0.0), acc)
            out_ptrs = out_ptr + offs_n[:, None] * depth + offs_d[None, :]
            if not IS_FIRST:
                acc += tl.load(out_ptrs, mask=mask_n & mask_d, other=0.0)
            tl.store(out_ptrs, acc, mask=mask_n & mask_d)


KERNEL = d_hidden_bwd_kernel


def signature(dtype: str, tile: GemmTile) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    by_tma = {
        "d_logits": f"tensordesc<{dtype}[{tile.block_m}, {tile.block_k}]>",
        "weight": f"tensordesc<{dtype}[{tile.block_k}, {tile.block_n}]>",
    }
    return {
        **(by_tma if tile.tma else dict.fromkeys(("d_logits", "weight"), f"*{dtype}")),
        "count_ptr": "*i32",
        "out_ptr": "*fp32",
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


def add_d_hidden(d_logits: Tensor, weight: Tensor, count: Tensor, out: Tensor, is_first: bool) -> None:
    """out (N, D) fp32 (+)= d_logits (N, words) · weight (words, D), over the first count (1,) int32 rows."""
    num_rows, depth = out.shape
    machine = arch.of_device(weight.device)
    tile = tile_for(STAGE, machine, weight.element_size(), describable(d_logits) and describable(weight))
    tiles = triton.cdiv(num_rows, tile.block_m) * triton.cdiv(depth, tile.block_n)
    with torch.cuda.device_of(weight):
        KERNEL[(num_programs(tiles, tile, machine),)](
            operand(d_logits, tile, (tile.block_m, tile.block_k)), operand(weight, tile, (tile.block_k, tile.block_n)),
            count, out, *weight.shape,
            d_logits.stride(0), weight.stride(0), **constexprs(tile, is_first), **launch_options(tile, machine),
        )  # fmt: skip
