"""The first grouped GEMM: an expert's rows times its gate and up projections, the activation in the epilogue."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.options import ExpertOptions
from fusedce.triton.common import describable, grouped_order, launch_options, operand, round_to
from fusedce.triton.moe.activation import gated
from fusedce.triton.moe.product import ExpertWeight, expert_product, rows_type, weight_type
from fusedce.triton.moe.run import Run
from fusedce.triton.moe.tile_table import RowTiles

STAGE, STAGE_FEW = "moe_gate_up", "moe_gate_up_few"


@triton.jit
def gate_up_fwd_kernel(
    left,
    weight,
    bias_ptr,
    table_ptr,
    first_ptr,
    pre_act_ptr,
    act,
    num_tiles,
    num_experts,
    ffn,
    depth,
    left_stride,
    stride_e,
    stride,
    act_stride,
    limit,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SAVE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    K_CONTIGUOUS: tl.constexpr,
    EVEN_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_R: tl.constexpr,
):
    """A program takes one tile after another: BLOCK_R padded rows of one expert, BLOCK_N / 2 columns of gate and of up.

    Reads both operands from L2; writes act (padded rows, F) once and, where SAVE, pre_act (R,2F), gate before up
    whatever the order in the weight. Rows that serve no slot are written as 0, rows of padding as anything. Row, expert
    and weight offsets are int64.
    """
    BLOCK_F: tl.constexpr = BLOCK_N // 2
    num_f = tl.cdiv(ffn, BLOCK_F)
    num_r = tl.load(first_ptr + num_experts + 1)
    for tile in tl.range(tl.program_id(0), num_r * num_f, tl.num_programs(0), flatten=DESCRIPTORS):
        tile_r, tile_f = grouped_order(tile, num_r, num_f, GROUP_R)
        expert = tl.load(table_ptr + tile_r)
        columns = tl.arange(0, BLOCK_N)
        if INTERLEAVED:
            offs_w = tile_f * BLOCK_N + columns
            mask_w = offs_w < 2 * ffn
        else:
            inside = tile_f * BLOCK_F + columns % BLOCK_F
            offs_w = columns // BLOCK_F * ffn + inside
            mask_w = inside < ffn
        both = expert_product(
            left, weight, tile_r, tile_f, expert, offs_w, mask_w,
            # No expert, no products: the accumulator stays 0. Descriptors read zeros there.
            depth if DESCRIPTORS else tl.where(expert < num_experts, depth, 0), left_stride, stride_e, stride,
            K_CONTIGUOUS, not INTERLEAVED, EVEN_K, DESCRIPTORS, BLOCK_R, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if HAS_BIAS:
            mask_b = mask_w & (offs_w < tl.where(expert < num_experts, 2 * ffn, 0))
            bias = tl.load(bias_ptr + expert.to(tl.int64) * (2 * ffn) + offs_w, mask=mask_b, other=0.0)
            both += bias.to(tl.float32)[None, :]
        if INTERLEAVED:
            gate, up = both.reshape(BLOCK_R, BLOCK_F, 2).split()
        else:
            gate, up = both.reshape(BLOCK_R, 2, BLOCK_F).permute(0, 2, 1).split()
        start = tl.load(table_ptr + num_tiles + tile_r)
        offs_r = tl.arange(0, BLOCK_R)
        offs_f = tile_f * BLOCK_F + tl.arange(0, BLOCK_F)
        mask_f = (offs_f < ffn)[None, :]
        dtype: tl.constexpr = act.dtype if DESCRIPTORS else act.dtype.element_ty
        if SAVE:
            # The tile's first row in int64; inside it 32 bits do, and leave registers to the accumulators.
            corner = pre_act_ptr + start.to(tl.int64) * (2 * ffn)
            pre_act_ptrs = corner + offs_r[:, None] * (2 * ffn) + offs_f[None, :]
            mask = (start + offs_r < tl.load(table_ptr + 2 * num_tiles + tile_r))[:, None] & mask_f
            tl.store(pre_act_ptrs, round_to(gate, dtype), mask=mask)
            tl.store(pre_act_ptrs + ffn, round_to(up, dtype), mask=mask)
        values, _, _ = gated(gate, up, limit, KIND, dtype == tl.float32)
        # What a bias makes of the rows of padding is read by no product's depth.
        values = round_to(values, dtype)
        if DESCRIPTORS:
            act.store([tile_r * BLOCK_R, tile_f * BLOCK_F], values)
        else:
            corner = act + tile_r.to(tl.int64) * BLOCK_R * act_stride
            tl.store(corner + offs_r[:, None] * act_stride + offs_f[None, :], values, mask=mask_f)


KERNEL = gate_up_fwd_kernel


def signature(dtype: str, tile: GemmTile, interleaved: bool = True, k_contiguous: int = 1) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    sizes = ("num_tiles", "num_experts", "ffn", "depth", "left_stride", "stride_e", "stride", "act_stride")
    return {
        "left": rows_type(dtype, tile, tile.block_k),
        "weight": weight_type(dtype, tile, bool(k_contiguous), not interleaved),
        "bias_ptr": f"*{dtype}",
        **dict.fromkeys(("table_ptr", "first_ptr"), "*i32"),
        "pre_act_ptr": f"*{dtype}",
        "act": rows_type(dtype, tile, tile.block_n // 2),
        **dict.fromkeys(sizes, "i32"),
        "limit": "fp32",
        **dict.fromkeys(constexprs(tile), "constexpr"),
    }


def constexprs(
    tile: GemmTile,
    has_bias: bool = True,
    save: bool = True,
    interleaved: bool = True,
    *,
    activation: str = "swiglu",
    k_contiguous: int = 1,
    depth: int = 0,
) -> dict[str, int | str]:
    """The kernel's sizes and switches for a tile; depth: D; k_contiguous: 1, or 0 for weights stored as (E,D,2F)."""
    return {
        "KIND": activation,
        "HAS_BIAS": has_bias,
        "SAVE": save,
        "INTERLEAVED": interleaved,
        "K_CONTIGUOUS": k_contiguous,
        "EVEN_K": depth % tile.block_k == 0,
        "DESCRIPTORS": tile.tma,
        "BLOCK_R": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_R": tile.group_m,
    }


def gate_up(
    left: Tensor,
    gate_up_proj: Tensor,
    bias: Tensor | None,
    tiles: RowTiles,
    run: Run,
    settings: ExpertOptions,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """act (padded rows, F) and pre_act (R,2F), or (0,2F) if it is not to `keep`, of padded rows `left` (·,D)."""
    ffn, depth = gate_up_proj.shape[1] // 2, left.shape[1]
    weight = ExpertWeight.of(gate_up_proj, halves=not settings.interleaved)
    act = tiles.padded(left, ffn)
    pre_act = left.new_empty((tiles.num_rows if keep else 0, 2 * ffn))
    tile = run.tile(STAGE, STAGE_FEW, weight.describable() and describable(left) and describable(act))
    if tiles.num_rows:
        with torch.cuda.device_of(left):
            KERNEL[run.grid(tiles, ffn, tile, tile.block_n // 2)](
                operand(left, tile, (tile.block_m, tile.block_k)), weight.operand(tile),
                left if bias is None else bias, tiles.table, tiles.first, pre_act,
                operand(act, tile, (tile.block_m, tile.block_n // 2)), tiles.num_tiles, tiles.num_experts, ffn, depth,
                left.stride(0), *weight.strides, act.stride(0), settings.limit,
                **constexprs(
                    tile, bias is not None, keep, settings.interleaved, activation=settings.activation,
                    k_contiguous=int(weight.k_contiguous), depth=depth,
                ),
                **launch_options(tile, run.machine),
            )  # fmt: skip
    return act, pre_act
