"""The backward: a chunk's logits are made again, turned into their gradient in registers, and met by two plain
GEMMs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce import arch, chunked
from fusedce.configs import GemmTile
from fusedce.options import LogitOptions, Upstream
from fusedce.rows import RowGradient, row_gradient
from fusedce.triton.common import grouped_order, operand, round_to, unit_rows
from fusedce.triton.linear_ce.logits import (
    LOG2_E,
    cap_slope,
    constants,
    head,
    operand_types,
    raw_logits_tile,
    row_slopes,
)

STAGE, STAGE_WITH_OPTIONS = "linear_ce_dlogits", "linear_ce_dlogits_options"
ROW_NUMBERS = 8  # of which six are used: a power of two


@triton.jit
def d_raw_tile(
    raw,
    row_ptr,
    offs_n,
    mask_n,
    target,
    block_v,
    vocab,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The gradient of the loss in the plain logits of rows offs_n and word block block_v, from their raw ones; 0 where
    mask_n is not set and raw is finite."""
    row_ptrs = row_ptr + 8 * offs_n
    slope = tl.load(row_ptrs, mask=mask_n, other=0.0)
    row_max = tl.load(row_ptrs + 1, mask=mask_n, other=0.0)
    log_sum = tl.load(row_ptrs + 2, mask=mask_n, other=0.0)
    on_probs = tl.load(row_ptrs + 3, mask=mask_n, other=0.0)
    on_target = tl.load(row_ptrs + 4, mask=mask_n, other=0.0)
    log_probs = (raw - row_max[:, None]) * slope[:, None] - log_sum[:, None]
    probs = tl.exp2(log_probs)
    if HAS_ENTROPY:
        on_surprise = tl.load(row_ptrs + 5, mask=mask_n, other=0.0)
        entropy = tl.load(row_ptrs + 6, mask=mask_n, other=0.0)
        # 2^−200 is 0 in fp32, and 0 · (−200) is 0 where 0 · (−inf) is not.
        surprise = tl.maximum(log_probs, -200.0) + entropy[:, None]
        d_raw = probs * (on_probs[:, None] - on_surprise[:, None] * surprise)
    else:
        d_raw = probs * on_probs[:, None]
    column = tl.where((target >= 0) & (target < vocab), target, -1).to(tl.int32)
    offs_v = block_v * BLOCK_V + tl.arange(0, BLOCK_V)
    d_raw = tl.where(offs_v[None, :] == column[:, None], on_target[:, None], d_raw)
    if HAS_SOFTCAP:
        d_raw *= cap_slope(raw, softcap)
    return d_raw


@triton.jit
def d_logits_bwd_kernel(
    hidden,
    weight,
    bias_ptr,
    target_ptr,
    row_ptr,
    count_ptr,
    out,
    num_rows,
    vocab,
    depth,
    hidden_stride,
    weight_stride,
    softcap,
    out_stride,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    COUNTED: tl.constexpr,
    EVEN_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """A program takes one BLOCK_N × BLOCK_V tile after another and writes its gradient of the loss.

    row_ptr: (num_rows, 8) fp32: slope2, maximum, log₂ Σ, on_probs, on_target, on_surprise, H·log₂e (see
    `fusedce.rows`). COUNTED: only the first *count_ptr rows; the tile that they end in is written to its end.
    Writes each element once; reads both operands of the tile from L2. Offsets into the chunk are int64: rows × V may
    pass 2³¹.
    """
    if COUNTED:
        num_rows = tl.load(count_ptr)
    num_n = tl.cdiv(num_rows, BLOCK_N)
    num_v = tl.cdiv(vocab, BLOCK_V)
    for tile in tl.range(tl.program_id(0), num_n * num_v, tl.num_programs(0), flatten=DESCRIPTORS):
        block_n, block_v = grouped_order(tile, num_n, num_v, GROUP_N)
        raw = raw_logits_tile(
            hidden, weight, bias_ptr, block_n, block_v, num_rows, vocab, depth, hidden_stride, weight_stride,
            softcap, HAS_BIAS, HAS_SOFTCAP, EVEN_D, DESCRIPTORS, BLOCK_N, BLOCK_V, BLOCK_D,
        )  # fmt: skip
        offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < num_rows
        target = tl.load(target_ptr + offs_n, mask=mask_n, other=-1)
        d_raw = d_raw_tile(
            raw, row_ptr, offs_n, mask_n, target, block_v, vocab, softcap, HAS_SOFTCAP, HAS_ENTROPY, BLOCK_V
        )
        if DESCRIPTORS:
            out.store([block_n * BLOCK_N, block_v * BLOCK_V], round_to(d_raw, out.dtype))
        else:
            # The tile's corner in int64; inside it 32 bits do, and leave registers to the accumulators.
            corner = out + block_n.to(tl.int64) * BLOCK_N * out_stride + block_v * BLOCK_V
            out_ptrs = corner + tl.arange(0, BLOCK_N)[:, None] * out_stride + tl.arange(0, BLOCK_V)[None, :]
            mask = mask_n[:, None] & (block_v * BLOCK_V + tl.arange(0, BLOCK_V) < vocab)[None, :]
            tl.store(out_ptrs, round_to(d_raw, out.dtype.element_ty), mask=mask)


KERNEL = d_logits_bwd_kernel


def signature(dtype: str, tile: GemmTile) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        **operand_types(dtype, tile),
        "target_ptr": "*i64",
        "row_ptr": "*fp32",
        "count_ptr": "*i32",
        "out": f"tensordesc<{dtype}[{tile.block_m}, {tile.block_n}]>" if tile.tma else f"*{dtype}",
        "out_stride": "i32",
        **dict.fromkeys(constexprs(tile), "constexpr"),
    }


def constexprs(
    tile: GemmTile,
    depth: int = 0,
    has_bias: bool = True,
    has_softcap: bool = True,
    has_entropy: bool = True,
    counted: bool = True,
) -> dict[str, int]:
    """The kernel's sizes and switches for a tile and D."""
    return constants(tile, depth, has_bias, has_softcap) | {"HAS_ENTROPY": has_entropy, "COUNTED": counted}


def linear_logprob_backward(
    upstream: Upstream,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    logprob: Tensor,
    entropy: Tensor,
    normalizer: Tensor,
    options: LogitOptions,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """d_hidden, d_weight, d_bias. See `fusedce.eager.linear_ce` for the formula, `fusedce.chunked` for the two
    GEMMs."""
    hidden, weight, target = unit_rows(hidden), unit_rows(weight), target.contiguous()
    gradient = row_gradient(upstream, logprob, entropy, target, options)
    scale = chunked.batch_scale(*gradient)
    numbers = row_numbers(gradient.over(scale), entropy, normalizer, row_slopes(options, hidden.shape[0], hidden))
    units = arch.of_device(hidden.device).num_units
    chunks = chunked.gemm_chunks(hidden, weight, units, weight.shape[0] * hidden.element_size())
    sums = chunked.GradientSums(hidden, weight, mask, chunks)
    for start, stop in chunks:
        rows = chunked.kept_rows(hidden[start:stop], target[start:stop], options.ignore_index)
        launch_d_logits(
            rows, weight, bias, target[start:stop], numbers[start:stop], options, gradient.on_surprise is not None,
            sums.d_logits(stop - start),
        )  # fmt: skip
        sums.add(start, stop, rows)
    return sums.result(scale)


def row_numbers(gradient: RowGradient, entropy: Tensor, normalizer: Tensor, slopes: Tensor) -> Tensor:
    """(N, 8) fp32: what the kernel reads of each row."""
    log2_e = LOG2_E.value
    numbers = [slopes * log2_e, normalizer[:, 0], normalizer[:, 1] * log2_e, gradient.on_probs, gradient.on_target]
    if gradient.on_surprise is not None:
        # The kernel's log-probs are to base 2.
        numbers += [gradient.on_surprise / log2_e, entropy * log2_e]
    numbers += [slopes] * (ROW_NUMBERS - len(numbers))
    return torch.stack(numbers, 1)


def launch_d_logits(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    numbers: Tensor,
    options: LogitOptions,
    has_entropy: bool,
    out: Tensor,
    count: Tensor | None = None,
) -> None:
    """Fill out (rows, V); with a count (1,) int32 only that many rows."""
    run = head((STAGE, STAGE_WITH_OPTIONS), rows, weight, bias, options, out)
    with torch.cuda.device_of(rows):
        KERNEL[run.grid()](
            *run.arguments(), target, numbers, target if count is None else count,
            operand(out, run.tile, (run.tile.block_m, run.tile.block_n)), *run.sizes(), out.stride(0),
            **run.constants(), HAS_ENTROPY=has_entropy, COUNTED=count is not None, **run.launch(),
        )  # fmt: skip
