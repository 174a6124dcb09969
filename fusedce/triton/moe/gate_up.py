"""The first grouped GEMM: an expert's rows, gathered, times its gate and up projections, SwiGLU in the epilogue."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce import arch
from fusedce.configs import GemmTile, tile_for
from fusedce.triton.common import dot, grouped_order, launch_options, round_to, sigmoid, unit_rows
from fusedce.triton.moe.product import unit_weight, weight_offsets, weight_step
from fusedce.triton.moe.tile_table import tile_table

STAGE = "moe_gate_up"


@triton.jit
def gate_up_fwd_kernel(
    hidden_ptr,
    weight_ptr,
    row_slot_ptr,
    table_ptr,
    pre_act_ptr,
    act_ptr,
    num_tiles,
    num_experts,
    top_k,
    ffn,
    depth,
    hidden_stride,
    stride_e,
    stride,
    K_CONTIGUOUS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_R: tl.constexpr,
):
    """One program owns BLOCK_R rows of one expert and BLOCK_F columns of gate and of up, in two accumulators.

    Reads the rows' tokens where they lie in hidden, and both weight tiles, from L2; writes pre_act (R,2F) and act (R,F)
    once. Rows that serve no slot are written as 0. Row, expert and weight offsets are int64.
    """
    tile_r, tile_f = grouped_order(tl.program_id(0), num_tiles, tl.cdiv(ffn, BLOCK_F), GROUP_R)
    expert = tl.load(table_ptr + tile_r)
    start = tl.load(table_ptr + num_tiles + tile_r)
    end = tl.load(table_ptr + 2 * num_tiles + tile_r)
    if start >= end:
        return
    offs_r = start + tl.arange(0, BLOCK_R)
    offs_f = tile_f * BLOCK_F + tl.arange(0, BLOCK_F)
    offs_d = tl.arange(0, BLOCK_D)
    mask_r = offs_r < end
    mask_f = offs_f < ffn
    # No expert, no products: the accumulators stay 0.
    depth = tl.where(expert < num_experts, depth, 0)
    # Past the expert's rows token 0 is read, whose products are not stored: one mask less in the loop.
    token = (tl.load(row_slot_ptr + offs_r, mask=mask_r, other=0) // top_k).to(tl.int64)
    hidden_ptrs = hidden_ptr + token[:, None] * hidden_stride + offs_d[None, :]
    gate_ptrs = weight_ptr + expert.to(tl.int64) * stride_e + weight_offsets(offs_f, offs_d, stride, K_CONTIGUOUS)
    up_ptrs = gate_ptrs + (tl.cast(ffn, tl.int64) * stride if K_CONTIGUOUS else ffn)
    gate = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    up = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    for begin in range(0, depth, BLOCK_D):
        mask_d = offs_d < depth - begin
        hidden = tl.load(hidden_ptrs, mask=mask_d[None, :], other=0.0)
        mask_w = mask_f[None, :] & mask_d[:, None]
        gate = dot(hidden, tl.load(gate_ptrs, mask=mask_w, other=0.0), gate)
        up = dot(hidden, tl.load(up_ptrs, mask=mask_w, other=0.0), up)
        hidden_ptrs += BLOCK_D
        gate_ptrs += weight_step(stride, K_CONTIGUOUS, BLOCK_D)
        up_ptrs += weight_step(stride, K_CONTIGUOUS, BLOCK_D)
    act = gate * sigmoid(gate) * up
    mask = mask_r[:, None] & mask_f[None, :]
    rows = offs_r.to(tl.int64)[:, None]
    dtype: tl.constexpr = act_ptr.dtype.element_ty
    pre_act_ptrs = pre_act_ptr + rows * (2 * ffn) + offs_f[None, :]
    tl.store(pre_act_ptrs, round_to(gate, dtype), mask=mask)
    tl.store(pre_act_ptrs + ffn, round_to(up, dtype), mask=mask)
    tl.store(act_ptr + rows * ffn + offs_f[None, :], round_to(act, dtype), mask=mask)


KERNEL = gate_up_fwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    sizes = ("num_tiles", "num_experts", "top_k", "ffn", "depth")
    return {
        **dict.fromkeys(("hidden_ptr", "weight_ptr"), f"*{dtype}"),
        **dict.fromkeys(("row_slot_ptr", "table_ptr"), "*i32"),
        **dict.fromkeys(("pre_act_ptr", "act_ptr"), f"*{dtype}"),
        **dict.fromkeys((*sizes, "hidden_stride", "stride_e", "stride"), "i32"),
        **dict.fromkeys(constexprs(GemmTile(1, 1, 1, 1, 1)), "constexpr"),
    }


def constexprs(tile: GemmTile, k_contiguous: int = 1) -> dict[str, int]:
    """The kernel's sizes for a tile. k_contiguous: 1, or 0 for weights stored as (E,D,2F); those spill some."""
    return {
        "K_CONTIGUOUS": k_contiguous,
        "BLOCK_R": tile.block_m,
        "BLOCK_F": tile.block_n,
        "BLOCK_D": tile.block_k,
        "GROUP_R": tile.group_m,
    }


def gate_up(
    hidden: Tensor, gate_up_proj: Tensor, offsets: Tensor, row_slot: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """pre_act (R,2F) = hidden[row_slot // K] · gate_up_proj[e]ᵀ and act (R,F) = silu(gate) · up."""
    hidden = unit_rows(hidden)
    num_rows, (num_experts, ffn2, depth) = row_slot.shape[0], gate_up_proj.shape
    weight, stride, k_contiguous = unit_weight(gate_up_proj)
    machine = arch.of_device(hidden.device)
    tile = tile_for(STAGE, machine, hidden.element_size())
    table = tile_table(offsets, num_rows, tile.block_m)
    pre_act, act = hidden.new_empty((num_rows, ffn2)), hidden.new_empty((num_rows, ffn2 // 2))
    if num_rows:
        grid = (table.shape[1] * triton.cdiv(ffn2 // 2, tile.block_n),)
        with torch.cuda.device_of(hidden):
            KERNEL[grid](
                hidden, weight, row_slot, table, pre_act, act, table.shape[1], num_experts, top_k, ffn2 // 2, depth,
                hidden.stride(0), weight.stride(0), stride,
                **constexprs(tile, k_contiguous), **launch_options(tile, machine),
            )  # fmt: skip
    return pre_act, act
