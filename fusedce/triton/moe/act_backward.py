"""The gradient of the pre-activation: a grouped GEMM with down_proj, SwiGLU's backward in the epilogue."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce import arch
from fusedce.configs import GemmTile, tile_for
from fusedce.triton.common import grouped_order, launch_options, round_to, sigmoid
from fusedce.triton.moe.product import expert_product, unit_weight
from fusedce.triton.moe.tile_table import tile_table

STAGE = "moe_act_bwd"


@triton.jit
def act_bwd_kernel(
    d_rows_ptr,
    weight_ptr,
    pre_act_ptr,
    row_slot_ptr,
    top_k_weights_ptr,
    table_ptr,
    d_pre_act_ptr,
    weighted_act_ptr,
    partial_ptr,
    num_tiles,
    num_experts,
    num_rows,
    ffn,
    depth,
    d_rows_stride,
    stride_e,
    stride,
    WANT_PRE: tl.constexpr,
    WANT_ACT: tl.constexpr,
    WANT_WEIGHTS: tl.constexpr,
    K_CONTIGUOUS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_R: tl.constexpr,
):
    """One program owns BLOCK_R rows of one expert and BLOCK_F columns of the activation. With g = d_rows · down[e]:

    WANT_PRE: d_pre_act (R,2F), the SwiGLU gradient of w·g; WANT_ACT: w · act (R,F), for down_proj's gradient;
    WANT_WEIGHTS: partial[tile_f, r] = Σ g·act over its columns. The GEMM is left out where only w · act is wanted.
    Reads pre_act once and the operands from L2; rows that serve no slot are written as 0. Row, expert and weight
    offsets are int64.
    """
    tile_r, tile_f = grouped_order(tl.program_id(0), num_tiles, tl.cdiv(ffn, BLOCK_F), GROUP_R)
    expert = tl.load(table_ptr + tile_r)
    start = tl.load(table_ptr + num_tiles + tile_r)
    end = tl.load(table_ptr + 2 * num_tiles + tile_r)
    if start >= end:
        return
    offs_r = start + tl.arange(0, BLOCK_R)
    offs_f = tile_f * BLOCK_F + tl.arange(0, BLOCK_F)
    mask_r = offs_r < end
    mask_f = offs_f < ffn
    mask = mask_r[:, None] & mask_f[None, :]
    slot = tl.load(row_slot_ptr + offs_r, mask=mask_r, other=-1)
    weights = tl.load(top_k_weights_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)[:, None]
    grad = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    if WANT_PRE or WANT_WEIGHTS:
        grad = expert_product(
            d_rows_ptr, weight_ptr + expert.to(tl.int64) * stride_e, offs_r, mask_r, offs_f, mask_f,
            # No expert, no products: the accumulator stays 0.
            tl.where(expert < num_experts, depth, 0), d_rows_stride, stride, K_CONTIGUOUS, BLOCK_R, BLOCK_F, BLOCK_D,
        )  # fmt: skip
    rows = offs_r.to(tl.int64)[:, None]
    pre_act_offsets = rows * (2 * ffn) + offs_f[None, :]
    gate = tl.load(pre_act_ptr + pre_act_offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pre_act_ptr + pre_act_offsets + ffn, mask=mask, other=0.0).to(tl.float32)
    gate_sigmoid = sigmoid(gate)
    silu = gate * gate_sigmoid
    dtype: tl.constexpr = pre_act_ptr.dtype.element_ty
    if WANT_ACT:
        weighted_act = weights * (silu * up)
        tl.store(weighted_act_ptr + rows * ffn + offs_f[None, :], round_to(weighted_act, dtype), mask=mask)
    if WANT_WEIGHTS:
        total = tl.sum(grad * (silu * up), 1)
        tl.store(partial_ptr + tile_f.to(tl.int64) * num_rows + offs_r, total, mask=mask_r)
    if WANT_PRE:
        d_act = weights * grad
        d_gate = d_act * up * (gate_sigmoid + silu * (1.0 - gate_sigmoid))
        tl.store(d_pre_act_ptr + pre_act_offsets, round_to(d_gate, dtype), mask=mask)
        tl.store(d_pre_act_ptr + pre_act_offsets + ffn, round_to(d_act * silu, dtype), mask=mask)


KERNEL = act_bwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    sizes = ("num_tiles", "num_experts", "num_rows", "ffn", "depth")
    return {
        **dict.fromkeys(("d_rows_ptr", "weight_ptr", "pre_act_ptr"), f"*{dtype}"),
        "row_slot_ptr": "*i32",
        "top_k_weights_ptr": "*fp32",
        "table_ptr": "*i32",
        **dict.fromkeys(("d_pre_act_ptr", "weighted_act_ptr"), f"*{dtype}"),
        "partial_ptr": "*fp32",
        **dict.fromkeys((*sizes, "d_rows_stride", "stride_e", "stride"), "i32"),
        **dict.fromkeys(constexprs(GemmTile(1, 1, 1, 1, 1)), "constexpr"),
    }


def constexprs(
    tile: GemmTile, wanted: tuple[bool, bool, bool] = (True, True, True), k_contiguous: bool = False
) -> dict[str, int]:
    """The kernel's sizes and switches for a tile. wanted: d_pre_act, w · act, partial."""
    want_pre, want_act, want_weights = wanted
    return {
        "WANT_PRE": want_pre,
        "WANT_ACT": want_act,
        "WANT_WEIGHTS": want_weights,
        "K_CONTIGUOUS": k_contiguous,
        "BLOCK_R": tile.block_m,
        "BLOCK_F": tile.block_n,
        "BLOCK_D": tile.block_k,
        "GROUP_R": tile.group_m,
    }


def act_backward(
    d_rows: Tensor,
    down_proj: Tensor,
    pre_act: Tensor,
    top_k_weights: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """d_pre_act (R,2F), w · act (R,F) and partial (tiles of F, R) fp32; what is not `wanted` has no elements."""
    want_pre, want_act, want_weights = wanted
    num_rows, (num_experts, depth, ffn) = row_slot.shape[0], down_proj.shape
    # The products run over D, so a contiguous down_proj (E,D,F) is one that has F side by side.
    weight, stride, k_contiguous = unit_weight(down_proj.mT)
    machine = arch.of_device(d_rows.device)
    tile = tile_for(STAGE, machine, d_rows.element_size())
    table = tile_table(offsets, num_rows, tile.block_m)
    num_f = triton.cdiv(ffn, tile.block_n)
    d_pre_act = pre_act.new_empty((num_rows if want_pre else 0, 2 * ffn))
    weighted_act = pre_act.new_empty((num_rows if want_act else 0, ffn))
    partial = pre_act.new_empty((num_f, num_rows if want_weights else 0), dtype=torch.float32)
    if num_rows and any(wanted):
        with torch.cuda.device_of(d_rows):
            KERNEL[(table.shape[1] * num_f,)](
                d_rows, weight, pre_act, row_slot, top_k_weights, table, d_pre_act, weighted_act, partial,
                table.shape[1], num_experts, num_rows, ffn, depth, d_rows.stride(0), weight.stride(0), stride,
                **constexprs(tile, wanted, k_contiguous), **launch_options(tile, machine),
            )  # fmt: skip
    return d_pre_act, weighted_act, partial
