"""The gradient of the pre-activation, elementwise, from that of the activation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.options import ExpertOptions
from fusedce.triton.common import ROW_LAUNCH, round_to
from fusedce.triton.moe.activation import gated
from fusedce.triton.moe.tile_table import RowTiles

STAGE = None


@triton.jit
def act_bwd_kernel(
    grad_ptr,
    pre_act_ptr,
    d_rows_ptr,
    down_bias_ptr,
    row_slot_ptr,
    top_k_weights_ptr,
    table_ptr,
    first_ptr,
    d_pre_act_ptr,
    partial_ptr,
    num_tiles,
    num_experts,
    ffn,
    depth,
    grad_stride,
    d_rows_stride,
    d_pre_act_stride,
    limit,
    KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WANT_PRE: tl.constexpr,
    WANT_ACT: tl.constexpr,
    WANT_WEIGHTS: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr,
    TILE_R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program owns BLOCK_R padded rows. With g = d_rows · down[e] in grad (padded rows, F):

    WANT_PRE: d_pre_act (padded rows, 2F), the activation's gradient of w·g, gate and up in the weight's order;
    WANT_ACT: w · act takes the place of g, for down_proj's gradient; WANT_WEIGHTS: partial[r] = Σ g·act, and where
    HAS_DOWN_BIAS Σ d_rows·bias[e] with it. Reads and writes each element once; rows of padding and rows that serve no
    slot are written as 0. Row and expert offsets are int64.
    """
    first = tl.program_id(0) * BLOCK_R
    tile = first // TILE_R
    if tile >= tl.load(first_ptr + num_experts + 1):
        return
    rows = tl.load(table_ptr + num_tiles + tile) + first % TILE_R + tl.arange(0, BLOCK_R)
    mask_r = rows < tl.load(table_ptr + 2 * num_tiles + tile)
    slot = tl.load(row_slot_ptr + rows, mask=mask_r, other=-1)
    served = (slot >= 0)[:, None]
    weights = tl.load(top_k_weights_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)[:, None]
    padded = first.to(tl.int64) + tl.arange(0, BLOCK_R)
    total = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    dtype: tl.constexpr = pre_act_ptr.dtype.element_ty
    for begin in range(0, ffn, BLOCK_F):
        offs_f = begin + tl.arange(0, BLOCK_F)
        mask_f = (offs_f < ffn)[None, :]
        mask = served & mask_f
        pre_act_ptrs = pre_act_ptr + rows.to(tl.int64)[:, None] * (2 * ffn) + offs_f[None, :]
        gate = tl.load(pre_act_ptrs, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(pre_act_ptrs + ffn, mask=mask, other=0.0).to(tl.float32)
        act, by_gate, by_up = gated(gate, up, limit, KIND, dtype == tl.float32)
        grad_ptrs = grad_ptr + padded[:, None] * grad_stride + offs_f[None, :]
        if WANT_PRE or WANT_WEIGHTS:
            grad = tl.load(grad_ptrs, mask=mask, other=0.0).to(tl.float32)
        if WANT_WEIGHTS:
            total += grad * act
        if WANT_ACT:
            tl.store(grad_ptrs, round_to(weights * act, dtype), mask=mask_f)
        if WANT_PRE:
            d_act = weights * grad
            d_gate, d_up = round_to(d_act * by_gate, dtype), round_to(d_act * by_up, dtype)
            d_pre_ptrs = d_pre_act_ptr + padded[:, None] * d_pre_act_stride
            if INTERLEAVED:
                offs_b = 2 * begin + tl.arange(0, 2 * BLOCK_F)
                tl.store(d_pre_ptrs + offs_b[None, :], tl.interleave(d_gate, d_up), mask=(offs_b < 2 * ffn)[None, :])
            else:
                tl.store(d_pre_ptrs + offs_f[None, :], d_gate, mask=mask_f)
                tl.store(d_pre_ptrs + ffn + offs_f[None, :], d_up, mask=mask_f)
    if WANT_WEIGHTS:
        if HAS_DOWN_BIAS:
            bias_ptr = down_bias_ptr + tl.load(table_ptr + tile).to(tl.int64) * depth
            for begin in range(0, depth, BLOCK_F):
                offs_d = begin + tl.arange(0, BLOCK_F)
                mask = served & (offs_d < depth)[None, :]
                d_rows = tl.load(d_rows_ptr + padded[:, None] * d_rows_stride + offs_d[None, :], mask=mask, other=0.0)
                bias = tl.load(bias_ptr + tl.zeros_like(padded)[:, None] + offs_d[None, :], mask=mask, other=0.0)
                total += d_rows.to(tl.float32) * bias.to(tl.float32)
        tl.store(partial_ptr + rows, tl.sum(total, 1), mask=mask_r)


KERNEL = act_bwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    sizes = ("num_tiles", "num_experts", "ffn", "depth", "grad_stride", "d_rows_stride", "d_pre_act_stride")
    return {
        **dict.fromkeys(("grad_ptr", "pre_act_ptr", "d_rows_ptr", "down_bias_ptr"), f"*{dtype}"),
        "row_slot_ptr": "*i32",
        "top_k_weights_ptr": "*fp32",
        **dict.fromkeys(("table_ptr", "first_ptr"), "*i32"),
        "d_pre_act_ptr": f"*{dtype}",
        "partial_ptr": "*fp32",
        **dict.fromkeys(sizes, "i32"),
        "limit": "fp32",
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(
    tile: GemmTile | None = None,
    want_pre: bool = True,
    want_act: bool = True,
    want_weights: bool = True,
    has_down_bias: bool = True,
    interleaved: bool = False,
    *,
    activation: str = "swiglu",
    tile_r: int = 128,
) -> dict[str, int | str]:
    """The kernel's sizes and switches; tile_r: rows of a tile of the GEMMs around it."""
    return {
        "KIND": activation,
        "INTERLEAVED": interleaved,
        "WANT_PRE": want_pre,
        "WANT_ACT": want_act,
        "WANT_WEIGHTS": want_weights,
        "HAS_DOWN_BIAS": has_down_bias,
        "TILE_R": tile_r,
        "BLOCK_R": 4,
        "BLOCK_F": 256,
    }


def act_backward(
    grad: Tensor,
    pre_act: Tensor,
    d_rows: Tensor,
    down_bias: Tensor | None,
    top_k_weights: Tensor,
    tiles: RowTiles,
    options: ExpertOptions,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor]:
    """d_pre_act (padded rows, 2F) and partial (1, R) fp32; grad (padded rows, F) becomes w · act.

    d_rows: padded rows (·,D). wanted: d_pre_act, w · act, partial; what is not wanted is not to be read.
    """
    ffn, depth = grad.shape[1], d_rows.shape[1]
    d_pre_act = tiles.padded(grad, 2 * ffn) if wanted[0] else grad
    partial = grad.new_empty((1, tiles.num_rows if wanted[2] else 0), dtype=torch.float32)
    sizes = constexprs(
        None, *wanted, down_bias is not None, options.interleaved, activation=options.activation, tile_r=tiles.block_r
    )
    if tiles.num_rows and any(wanted):
        with torch.cuda.device_of(grad):
            KERNEL[(grad.shape[0] // 4,)](
                grad, pre_act, d_rows, grad if down_bias is None else down_bias, tiles.row_slot, top_k_weights,
                tiles.table, tiles.first, d_pre_act, partial, tiles.num_tiles, tiles.num_experts, ffn, depth,
                grad.stride(0), d_rows.stride(0), d_pre_act.stride(0), options.limit, **sizes, **ROW_LAUNCH,
            )  # fmt: skip
    return d_pre_act, partial
