"""The gradient of the pre-activation: a grouped GEMM with down_proj, the activation's backward in the epilogue."""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.options import ExpertOptions
from fusedce.triton.common import describable, grouped_order, laid_out_as, launch_options, operand, round_to
from fusedce.triton.moe.activation import gated
from fusedce.triton.moe.product import ExpertWeight, expert_product, rows_type, weight_type
from fusedce.triton.moe.run import Run
from fusedce.triton.moe.tile_table import RowTiles

STAGE, STAGE_FEW = "moe_act_bwd", "moe_act_bwd_few"


@triton.jit
def act_bwd_kernel(
    left,
    weight,
    pre_act,
    row_slot_ptr,
    top_k_weights_ptr,
    table_ptr,
    first_ptr,
    d_pre_act,
    weighted_act,
    partial_ptr,
    num_tiles,
    num_experts,
    num_rows,
    ffn,
    depth,
    left_stride,
    stride_e,
    stride,
    d_pre_act_stride,
    weighted_act_stride,
    limit,
    KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WANT_PRE: tl.constexpr,
    WANT_ACT: tl.constexpr,
    WANT_WEIGHTS: tl.constexpr,
    K_CONTIGUOUS: tl.constexpr,
    EVEN_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_R: tl.constexpr,
):
    """A program takes one tile after another: BLOCK_R padded rows of one expert, BLOCK_N columns of the activation.

    With g = d_rows · down[e]: WANT_PRE: d_pre_act (padded rows, 2F), the activation's gradient of w·g, gate and up in
    the weight's order; WANT_ACT: w · act (padded rows, F), for down_proj's gradient; WANT_WEIGHTS: partial[tile_n, r] =
    Σ g·act over its columns. The GEMM is left out where only w · act is wanted. Reads pre_act once and the operands
    from L2; rows of padding and rows that serve no slot are written as 0. Row, expert and weight offsets are int64.
    """
    num_n = tl.cdiv(ffn, BLOCK_N)
    num_r = tl.load(first_ptr + num_experts + 1)
    for tile in tl.range(tl.program_id(0), num_r * num_n, tl.num_programs(0), flatten=DESCRIPTORS):
        tile_r, tile_n = grouped_order(tile, num_r, num_n, GROUP_R)
        expert = tl.load(table_ptr + tile_r)
        offs_f = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        grad = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        if WANT_PRE or WANT_WEIGHTS:
            grad = expert_product(
                left, weight, tile_r, tile_n, expert, tl.minimum(offs_f, ffn - 1),
                # No expert, no products: the accumulator stays 0. Descriptors read zeros there.
                depth if DESCRIPTORS else tl.where(expert < num_experts, depth, 0), left_stride, stride_e, stride,
                K_CONTIGUOUS, False, EVEN_K, DESCRIPTORS, BLOCK_R, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        start = tl.load(table_ptr + num_tiles + tile_r)
        rows = start + tl.arange(0, BLOCK_R)
        mask_r = rows < tl.load(table_ptr + 2 * num_tiles + tile_r)
        slot = tl.load(row_slot_ptr + rows, mask=mask_r, other=-1)
        weights = tl.load(top_k_weights_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)
        if DESCRIPTORS:
            # In two halves: a whole tile's slopes beside the accumulator have no registers.
            left_grad, right_grad = grad.reshape(BLOCK_R, 2, BLOCK_N // 2).permute(0, 2, 1).split()
            total = _epilogue(
                left_grad, pre_act, d_pre_act, weighted_act, start, tile_r, tile_n * BLOCK_N, slot, weights, ffn,
                d_pre_act_stride, weighted_act_stride, limit, KIND, INTERLEAVED, WANT_PRE, WANT_ACT, DESCRIPTORS,
            )  # fmt: skip
            total += _epilogue(
                right_grad, pre_act, d_pre_act, weighted_act, start, tile_r, tile_n * BLOCK_N + BLOCK_N // 2, slot,
                weights, ffn, d_pre_act_stride, weighted_act_stride, limit, KIND, INTERLEAVED, WANT_PRE, WANT_ACT,
                DESCRIPTORS,
            )  # fmt: skip
        else:
            total = _epilogue(
                grad, pre_act, d_pre_act, weighted_act, start, tile_r, tile_n * BLOCK_N, slot, weights, ffn,
                d_pre_act_stride, weighted_act_stride, limit, KIND, INTERLEAVED, WANT_PRE, WANT_ACT, DESCRIPTORS,
            )  # fmt: skip
        if WANT_WEIGHTS:
            tl.store(partial_ptr + tile_n.to(tl.int64) * num_rows + rows, total, mask=mask_r)


@triton.jit
def _epilogue(
    grad,
    pre_act,
    d_pre_act,
    weighted_act,
    start,
    tile_r,
    first_f,
    slot,
    weights,
    ffn,
    d_pre_act_stride,
    weighted_act_stride,
    limit,
    KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WANT_PRE: tl.constexpr,
    WANT_ACT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Some columns of a tile, from first_f on: stores d_pre_act and w · act, returns Σ g·act of each row."""
    BLOCK_R: tl.constexpr = grad.shape[0]
    BLOCK_F: tl.constexpr = grad.shape[1]
    offs_f = first_f + tl.arange(0, BLOCK_F)
    mask_f = (offs_f < ffn)[None, :]
    served = (slot >= 0)[:, None]
    if DESCRIPTORS:
        gate = pre_act.load([start, 0, first_f]).reshape(BLOCK_R, BLOCK_F).to(tl.float32)
        up = pre_act.load([start, 1, first_f]).reshape(BLOCK_R, BLOCK_F).to(tl.float32)
        dtype: tl.constexpr = pre_act.dtype
    else:
        rows = start.to(tl.int64) + tl.arange(0, BLOCK_R)
        pre_act_ptrs = pre_act + rows[:, None] * (2 * ffn) + offs_f[None, :]
        gate = tl.load(pre_act_ptrs, mask=served & mask_f, other=0.0).to(tl.float32)
        up = tl.load(pre_act_ptrs + ffn, mask=served & mask_f, other=0.0).to(tl.float32)
        dtype: tl.constexpr = pre_act.dtype.element_ty
    # Else the compiler makes the activation twice, once in the layout of the store of w · act.
    gate, up = laid_out_as(gate, grad), laid_out_as(up, grad)
    # The rows of padding have their neighbours' pre-activation, and 0 · inf.
    gate, up, grad = tl.where(served, gate, 0.0), tl.where(served, up, 0.0), tl.where(served, grad, 0.0)
    act, by_gate, by_up = gated(gate, up, limit, KIND, dtype == tl.float32)
    padded = tile_r.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    if WANT_ACT:
        values = round_to(weights[:, None] * act, dtype)
        if DESCRIPTORS:
            weighted_act.store([tile_r * BLOCK_R, first_f], values)
        else:
            tl.store(weighted_act + padded[:, None] * weighted_act_stride + offs_f[None, :], values, mask=mask_f)
    if WANT_PRE:
        d_act = weights[:, None] * grad
        d_gate, d_up = round_to(d_act * by_gate, dtype), round_to(d_act * by_up, dtype)
        if INTERLEAVED:
            d_both = tl.interleave(d_gate, d_up)
            if DESCRIPTORS:
                d_pre_act.store([tile_r * BLOCK_R, 2 * first_f], d_both)
            else:
                offs_b = 2 * first_f + tl.arange(0, 2 * BLOCK_F)
                d_pre_ptrs = d_pre_act + padded[:, None] * d_pre_act_stride + offs_b[None, :]
                tl.store(d_pre_ptrs, d_both, mask=(offs_b < 2 * ffn)[None, :])
        elif DESCRIPTORS:
            d_pre_act.store([tile_r * BLOCK_R, 0, first_f], d_gate.reshape(BLOCK_R, 1, BLOCK_F))
            d_pre_act.store([tile_r * BLOCK_R, 1, first_f], d_up.reshape(BLOCK_R, 1, BLOCK_F))
        else:
            d_pre_ptrs = d_pre_act + padded[:, None] * d_pre_act_stride + offs_f[None, :]
            tl.store(d_pre_ptrs, d_gate, mask=mask_f)
            tl.store(d_pre_ptrs + ffn, d_up, mask=mask_f)
    return tl.sum(grad * act, 1)


KERNEL = act_bwd_kernel


def signature(dtype: str, tile: GemmTile, interleaved: bool = False, k_contiguous: bool = False) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    sizes = ("num_tiles", "num_experts", "num_rows", "ffn", "depth", "left_stride", "stride_e", "stride")
    return {
        "left": rows_type(dtype, tile, tile.block_k),
        "weight": weight_type(dtype, tile, k_contiguous),
        "pre_act": f"tensordesc<{dtype}[{tile.block_m}, 1, {tile.block_n // 2}]>" if tile.tma else f"*{dtype}",
        "row_slot_ptr": "*i32",
        "top_k_weights_ptr": "*fp32",
        **dict.fromkeys(("table_ptr", "first_ptr"), "*i32"),
        "d_pre_act": _d_pre_act_type(dtype, tile, interleaved),
        "weighted_act": rows_type(dtype, tile, tile.block_n // 2),
        "partial_ptr": "*fp32",
        **dict.fromkeys((*sizes, "d_pre_act_stride", "weighted_act_stride"), "i32"),
        "limit": "fp32",
        **dict.fromkeys(constexprs(tile), "constexpr"),
    }


def _d_pre_act_block(tile: GemmTile, interleaved: bool) -> tuple[int, ...]:
    return (tile.block_m, tile.block_n) if interleaved else (tile.block_m, 1, tile.block_n // 2)


def _d_pre_act_type(dtype: str, tile: GemmTile, interleaved: bool) -> str:
    block = ", ".join(map(str, _d_pre_act_block(tile, interleaved)))
    return f"tensordesc<{dtype}[{block}]>" if tile.tma else f"*{dtype}"


def constexprs(
    tile: GemmTile,
    want_pre: bool = True,
    want_act: bool = True,
    want_weights: bool = True,
    interleaved: bool = False,
    *,
    activation: str = "swiglu",
    k_contiguous: bool = False,
    depth: int = 0,
) -> dict[str, int | str]:
    """The kernel's sizes and switches for a tile; depth: D."""
    return {
        "KIND": activation,
        "INTERLEAVED": interleaved,
        "WANT_PRE": want_pre,
        "WANT_ACT": want_act,
        "WANT_WEIGHTS": want_weights,
        "K_CONTIGUOUS": k_contiguous,
        "EVEN_K": depth % tile.block_k == 0,
        "DESCRIPTORS": tile.tma,
        "BLOCK_R": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_R": tile.group_m,
    }


def act_backward(
    left: Tensor,
    down_proj: Tensor,
    pre_act: Tensor,
    top_k_weights: Tensor,
    tiles: RowTiles,
    run: Run,
    options: ExpertOptions,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """d_pre_act (padded rows, 2F), w · act (padded rows, F) and partial (tiles of F, R) fp32, from the padded rows
    `left` (·,D) of d_rows; what is not `wanted` is not to be read."""
    want_pre, want_act, want_weights = wanted
    depth, ffn = down_proj.shape[1:]
    # The products run over D, so a contiguous down_proj (E,D,F) is one that has F side by side.
    weight = ExpertWeight.of(down_proj.mT)
    d_pre_act = tiles.padded(left, 2 * ffn) if want_pre else left
    weighted_act = tiles.padded(left, ffn) if want_act else left
    pre_acts = pre_act.unflatten(1, (2, ffn))
    d_pre_acts = d_pre_act if options.interleaved or not want_pre else d_pre_act.unflatten(1, (2, ffn))
    tile = run.tile(STAGE, STAGE_FEW)
    can = weight.describable() and all(map(describable, (left, pre_acts, d_pre_acts, weighted_act)))
    tile = replace(tile, tma=tile.tma and can)
    half = tile.block_n // 2
    num_n = triton.cdiv(ffn, tile.block_n)
    partial = left.new_empty((num_n, tiles.num_rows if want_weights else 0), dtype=torch.float32)
    if tiles.num_rows and any(wanted):
        with torch.cuda.device_of(left):
            KERNEL[run.grid(tiles, ffn, tile, tile.block_n)](
                operand(left, tile, (tile.block_m, tile.block_k)), weight.operand(tile),
                operand(pre_acts, tile, (tile.block_m, 1, half)), tiles.row_slot, top_k_weights, tiles.table,
                tiles.first, operand(d_pre_acts, tile, _d_pre_act_block(tile, d_pre_acts.dim() == 2)),
                operand(weighted_act, tile, (tile.block_m, half)), partial, tiles.num_tiles, tiles.num_experts,
                tiles.num_rows, ffn, depth, left.stride(0), *weight.strides, d_pre_act.stride(0),
                weighted_act.stride(0), options.limit,
                **constexprs(
                    tile, *wanted, options.interleaved, activation=options.activation,
                    k_contiguous=weight.k_contiguous, depth=depth,
                ),
                **launch_options(tile, run.machine),
            )  # fmt: skip
    return d_pre_act, weighted_act, partial
