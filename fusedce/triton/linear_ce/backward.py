"""The backward: a chunk's logits are made again, turned into their gradient in registers, and met by two plain
GEMMs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce import arch, chunked
from fusedce.configs import GemmTile, tile_for
from fusedce.options import LogitOptions, Upstream
from fusedce.triton.common import grouped_order, launch_options, round_to, unit_rows
from fusedce.triton.linear_ce.logits import logits_slope, logits_tile

STAGE, STAGE_WITH_OPTIONS = "linear_ce_dlogits", "linear_ce_dlogits_softcap"


@triton.jit
def d_logits_bwd_kernel(
    hidden_ptr,
    weight_ptr,
    target_ptr,
    bias_ptr,
    row_ptr,
    normalizer_ptr,
    scale_ptr,
    out_ptr,
    num_rows,
    vocab,
    depth,
    hidden_stride,
    weight_stride,
    out_stride,
    inv_temperature,
    softcap,
    ignore_index,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """One program owns a BLOCK_N × BLOCK_V tile of d_logits / scale and writes all of it, zeros for ignored rows.

    row_ptr: (num_rows, 4) fp32: d_logprob, d_entropy, d_lse, entropy. Writes BLOCK_N·BLOCK_V elements once; reads both
    operands of the tile from L2. Offsets into the chunk are int64: rows × V may pass 2³¹.
    """
    block_n, block_v = grouped_order(tl.program_id(0), tl.cdiv(num_rows, BLOCK_N), tl.cdiv(vocab, BLOCK_V), GROUP_N)
    offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_v = block_v * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_n = offs_n < num_rows
    logits = logits_tile(
        hidden_ptr, weight_ptr, bias_ptr, offs_n, offs_v, num_rows, vocab, depth, hidden_stride, weight_stride,
        inv_temperature, softcap, HAS_BIAS, HAS_SOFTCAP, EVEN_D, BLOCK_N, BLOCK_V, BLOCK_D,
    )  # fmt: skip
    target = tl.load(target_ptr + offs_n, mask=mask_n, other=ignore_index)
    row_ptrs = row_ptr + 4 * offs_n
    inv_scale = 1.0 / tl.load(scale_ptr)
    d_logprob = tl.load(row_ptrs, mask=mask_n, other=0.0) * inv_scale
    d_entropy = tl.load(row_ptrs + 1, mask=mask_n, other=0.0) * inv_scale
    d_lse = tl.load(row_ptrs + 2, mask=mask_n, other=0.0) * inv_scale
    entropy = tl.load(row_ptrs + 3, mask=mask_n, other=0.0)
    row_max = tl.load(normalizer_ptr + 2 * offs_n, mask=mask_n, other=0.0)
    log_sum = tl.load(normalizer_ptr + 2 * offs_n + 1, mask=mask_n, other=0.0)
    log_probs = (logits - row_max[:, None]) - log_sum[:, None]
    probs = tl.exp(log_probs)
    # p·(log p + H) is 0 where p is 0, although log p may be −inf there.
    surprise = tl.where(probs == 0.0, 0.0, log_probs) + entropy[:, None]
    # Compared in 32 bits, to spare registers, after a test in 64: 2³² is not word 0.
    column = tl.where((target >= 0) & (target < vocab), target, -1).to(tl.int32)
    is_target = offs_v[None, :] == column[:, None]
    # 1 − p is exact where p is near 1; p·(… − d_logprob) + d_logprob would round there.
    d_logits = probs * (d_lse[:, None] - d_entropy[:, None] * surprise)
    d_logits += d_logprob[:, None] * (tl.where(is_target, 1.0, 0.0) - probs)
    slope = logits_slope(logits, inv_temperature, softcap, HAS_SOFTCAP)
    # Select, do not multiply: an ignored row may hold NaN or inf.
    d_logits = tl.where((target != ignore_index)[:, None], d_logits, 0.0) * slope
    # The tile's corner in int64; inside it 32 bits do, and leave registers to the accumulators.
    corner = out_ptr + block_n.to(tl.int64) * BLOCK_N * out_stride + block_v * BLOCK_V
    out_ptrs = corner + tl.arange(0, BLOCK_N)[:, None] * out_stride + tl.arange(0, BLOCK_V)[None, :]
    tl.store(out_ptrs, round_to(d_logits, out_ptr.dtype.element_ty), mask=mask_n[:, None] & (offs_v < vocab)[None, :])


KERNEL = d_logits_bwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument, with operands of `dtype` ("bf16", "fp16", "fp32")."""
    return {
        **dict.fromkeys(("hidden_ptr", "weight_ptr"), f"*{dtype}"),
        "target_ptr": "*i64",
        "bias_ptr": f"*{dtype}",
        **dict.fromkeys(("row_ptr", "normalizer_ptr", "scale_ptr"), "*fp32"),
        "out_ptr": f"*{dtype}",
        **dict.fromkeys(("num_rows", "vocab", "depth", "hidden_stride", "weight_stride", "out_stride"), "i32"),
        **dict.fromkeys(("inv_temperature", "softcap"), "fp32"),
        "ignore_index": "i32",
        **dict.fromkeys(constexprs(GemmTile(1, 1, 1, 1, 1)), "constexpr"),
    }


def constexprs(tile: GemmTile, depth: int = 0, has_bias: bool = True, has_softcap: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches for a tile and D."""
    return {
        "HAS_BIAS": has_bias,
        "HAS_SOFTCAP": has_softcap,
        "EVEN_D": depth % tile.block_k == 0,
        "BLOCK_N": tile.block_m,
        "BLOCK_V": tile.block_n,
        "BLOCK_D": tile.block_k,
        "GROUP_N": tile.group_m,
    }


def linear_logprob_backward(
    upstream: Upstream,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    entropy: Tensor,
    normalizer: Tensor,
    options: LogitOptions,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """d_hidden, d_weight, d_bias. See `fusedce.eager.linear_ce` for the formula, `fusedce.chunked` for the two
    GEMMs."""
    depth, vocab = hidden.shape[1], weight.shape[0]
    hidden, weight, target = unit_rows(hidden), unit_rows(weight), target.contiguous()
    machine = arch.of_device(hidden.device)
    tile = tile_for(STAGE_WITH_OPTIONS if options.softcap else STAGE, machine, hidden.element_size())
    scale = chunked.batch_scale(*upstream)
    row_numbers = torch.stack((*upstream, entropy), 1)
    bias_or_any = weight if bias is None else bias.contiguous()

    def fill_d_logits(start: int, stop: int, out: Tensor) -> None:
        grid = (triton.cdiv(stop - start, tile.block_m) * triton.cdiv(vocab, tile.block_n),)
        with torch.cuda.device_of(hidden):
            KERNEL[grid](
                hidden[start:], weight, target[start:], bias_or_any, row_numbers[start:], normalizer[start:], scale,
                out, stop - start, vocab, depth, hidden.stride(0), weight.stride(0), out.stride(0),
                1.0 / options.temperature, options.softcap, options.ignore_index,
                **constexprs(tile, depth, bias is not None, options.softcap != 0.0),
                **launch_options(tile, machine),
            )  # fmt: skip

    row_bytes = vocab * hidden.element_size()
    return chunked.gradients(fill_d_logits, hidden, weight, target != options.ignore_index, mask, scale, row_bytes)
