"""What every GPU backend of linear cross-entropy does around its logits kernel: chunks of rows and two plain GEMMs.

With d_logits of a chunk in a buffer of chunk × V, d_hidden = d_logits · weight and d_weight += d_logitsᵀ · hidden are
GEMMs that a vendor library runs at its full rate. The buffer is all of [tokens × vocab] that ever exists.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedce import env
from fusedce.options import LogitOptions, UpstreamOf, Wanted

ROW_MULTIPLE = 128
# The output tile of the vendor's GEMM that gives d_hidden: how many of them a chunk makes decides how full its last
# wave of tiles is.
GEMM_TILE = (128, 256)

Chunks = list[tuple[int, int]]


def row_chunks(num_rows: int, row_bytes: int, most_bytes: int | None = None) -> Chunks:
    """Balanced (start, stop) ranges over the rows, each within the memory, multiples of 128 rows but the last.

    row_bytes: workspace bytes a row takes. most_bytes: what a range may take, at most `env.workspace_bytes()`.
    """
    workspace = env.workspace_bytes()
    most = _most_rows(row_bytes, min(most_bytes or workspace, workspace))
    return _in_steps(num_rows, math.ceil(num_rows / most)) if num_rows else []


def gemm_chunks(hidden: Tensor, weight: Tensor, num_units: int, row_bytes: int) -> Chunks:
    """`row_chunks` for the two GEMMs: of the sizes that fit, the one that loses least.

    A chunk of C rows gives d_hidden's GEMM ⌈C/128⌉·⌈D/256⌉ tiles, which run in whole waves of num_units; a smaller
    chunk reads and writes d_weight more often. row_bytes: as there, within `env.workspace_bytes` beside this weight.
    """
    num_rows, depth = hidden.shape
    workspace = env.workspace_bytes(weight.numel() * weight.element_size())
    fewest = math.ceil(num_rows / _most_rows(row_bytes, workspace))

    def cost(count: int) -> float:
        rows = _step(num_rows, count)
        return waste(rows, depth, GEMM_TILE, num_units) + 256 / rows

    # Up to half of what would fit: with less, d_weight's share of the cost grows faster than a wave can save.
    return _in_steps(num_rows, min(range(fewest, 2 * fewest + 1), key=cost)) if num_rows else []


def _most_rows(row_bytes: int, most_bytes: int) -> int:
    return max(most_bytes // max(row_bytes, 1) // ROW_MULTIPLE, 1) * ROW_MULTIPLE


def waste(height: int, width: int, tile: tuple[int, int], num_units: int) -> float:
    """What a product's time is multiplied by, since its tiles run in whole waves of num_units: 1 where all are full."""
    tiles = math.ceil(height / tile[0]) * math.ceil(width / tile[1])
    return math.ceil(tiles / num_units) * num_units / tiles


def _step(num_rows: int, count: int) -> int:
    """Rows of each of `count` balanced chunks but the last."""
    return math.ceil(num_rows / count / ROW_MULTIPLE) * ROW_MULTIPLE


def _in_steps(num_rows: int, count: int) -> Chunks:
    step = _step(num_rows, count)
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def kept_rows(hidden: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """hidden, with zeros for the rows that take no part: they may hold NaN or inf, which 0 · NaN would carry on."""
    return torch.where((target != ignore_index)[:, None], hidden, 0.0)


def batch_scale(*numbers: Tensor | None) -> Tensor:
    """The power of two, at least the largest finite |number| of the rows' gradients, by which d_logits is divided while
    in 16 bits.

    A mean over 65,536 tokens makes gradients of 1.5e-5, times p of 1e-5: below what fp16 can hold. Divided, they are of
    the order of p; multiplied back in fp32 or by exponent alone, nothing is rounded twice. () fp32.
    """
    stacked = torch.stack([number for number in numbers if number is not None])
    finite = torch.where(stacked.isfinite(), stacked.abs(), 0.0)
    largest = finite.amax() if finite.numel() else finite.new_zeros(())
    return torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest))), 1.0).float()


def in_two_passes(
    logprob_of: Callable[..., Any],
    backward_of: Callable[..., Any],
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    mask: list[bool],
    upstream_of: UpstreamOf,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A backend's `linear_fused` by its `linear_logprob` and `linear_logprob_backward`, where nothing better can be
    had: the logits are made twice, four GEMMs."""
    logprob, entropy, lse, normalizer = logprob_of(hidden, weight, target, bias, options, with_entropy)
    upstream = upstream_of(0, hidden.shape[0], logprob, entropy, lse)
    grads = backward_of(upstream, hidden, weight, target, bias, logprob, entropy, normalizer, options, mask)
    return logprob, entropy, lse, *grads


class GradientSums:
    """d_hidden (N,D), d_weight (V,D) and d_bias (V,) while the chunks go by; the last two are summed in fp32.

    mask: which of them are wanted. The others have no elements, and their GEMM is not run. The one buffer holds a
    chunk's d_logits in hidden's dtype, the rows padded to 16 bytes: GEMMs and stores are slow from others.
    scale: what `result` will be given, where it is known before the first chunk. Then, but for fp16, a mask with a
    main_grad has d_weight added to that in place, by rows that are multiplied with the scale (a power of two, so that
    nothing is rounded), and no buffer of its size is made.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, mask: list[bool] | Wanted, chunks: Chunks, scale: Tensor | None = None
    ) -> None:
        self.weight, self.wanted, self.scale = weight, Wanted.of(mask), scale
        self.d_hidden = hidden.new_empty(hidden.shape if mask[0] else (0,))
        # The first chunk writes d_weight, which saves a pass over zeros; where there is no row, it must be zeros.
        new_weight = weight.new_empty if chunks else weight.new_zeros
        main_grad = self.wanted.main_grad
        # fp16 has no room for the scaled rows.
        self.in_place = main_grad is not None and scale is not None and hidden.dtype != torch.float16
        if main_grad is not None and self.in_place:
            self.d_weight = main_grad
        else:
            self.d_weight = new_weight(weight.shape if mask[1] else (0,), dtype=torch.float32)
        self.d_bias = weight.new_zeros(weight.shape[:1] if mask[2] else (0,), dtype=torch.float32)
        self.buffer = hidden.new_empty((chunks[0][1] if chunks else 0, -(-weight.shape[0] // 8) * 8))
        # torch's bf16 GEMM on a CPU reads the padding, and 0 · NaN is NaN.
        self.buffer[:, weight.shape[0] :] = 0

    def d_logits(self, num_rows: int) -> Tensor:
        """(num_rows, V): where a chunk's gradient is to be written before `add`."""
        return self.buffer[:num_rows, : self.weight.shape[0]]

    def add(self, start: int, stop: int, rows: Tensor, of_rows: Tensor | None = None) -> None:
        """Rows [start, stop), in order from 0, whose d_logits is in the buffer; rows: their hidden (rows, D), finite
        where d_logits is 0.

        of_rows: (rows,) what each row of d_logits is still to be multiplied with, as `rows` is already; d_hidden is
        left without it.
        """
        d_logits = self.d_logits(stop - start)
        if self.d_hidden.numel():
            torch.mm(d_logits, self.weight, out=self.d_hidden[start:stop])
        if self.d_weight.numel():
            scaled = rows * self.scale.to(rows.dtype) if self.in_place and self.scale is not None else rows
            _add_product(self.d_weight, d_logits.t(), scaled, start == 0 and not self.in_place)
        if self.d_bias.numel() and of_rows is None:
            self.d_bias += d_logits.sum(0, dtype=torch.float32)
        elif self.d_bias.numel() and of_rows is not None:
            _add_product(self.d_bias[:, None], d_logits.t(), of_rows[:, None].to(d_logits.dtype), False)

    def result(self, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The three gradients, in their own dtypes, times `scale`. Frees the buffer first."""
        # It must be gone before d_weight is there twice, in fp32 and in its own dtype.
        del self.buffer
        if scale is not None:
            self.d_hidden.mul_(scale.to(self.d_hidden.dtype))
            if not self.in_place:
                self.d_weight.mul_(scale)
            self.d_bias.mul_(scale)
        d_weight = self.wanted.weight_grad(self.d_weight, self.weight.dtype)
        return self.d_hidden, d_weight, self.d_bias.to(self.weight.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """total += left · right, or total = left · right for the first; `total` is fp32 whatever the operands, one GEMM."""
    if left.dtype != total.dtype and not left.is_cuda:
        # Only Triton's interpreter comes here: a CPU has no GEMM with 16-bit operands and an fp32 result.
        left, right = left.float(), right.float()
    if left.dtype == total.dtype:
        torch.mm(left, right, out=total) if is_first else total.addmm_(left, right)
    elif is_first:
        torch.mm(left, right, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
