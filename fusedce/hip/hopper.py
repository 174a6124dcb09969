"""Per-token log-probs and their gradients by matrix products of our own, on Hopper: logits never leave the registers.

The forward's product ends in three numbers a row and vocab tile, as the Triton backend's does. The backward makes the
logits again and writes their gradient in bf16, once; two more products take it from there. Kernels: linear_ce_hopper.cu
and linear_ce_sums.cu in csrc/kernels.
"""

import functools
import math

import torch
from torch import Tensor

from fusedce import arch, chunked
from fusedce.hip import extension
from fusedce.options import LogitOptions, Upstream, Wanted
from fusedce.rows import row_gradient, row_numbers, row_slopes

# Elements in 16 bytes, what a copy of a tile starts at.
ALIGNMENT = 8
# The share of the units that d_hidden's GEMM must keep busy: with less, the vendor's choice of tiles is faster.
FULL = 0.9
# Tile sums of one launch: enough rows for every SM many times over, and small beside the model.
SUMS_BYTES = 64 << 20


def suits(hidden: Tensor, weight: Tensor) -> bool:
    """Whether Hopper's matrix products can take these operands.

    They are for bf16, and TMA asks for rows of weight, and of hidden or its copy, that start at multiples of 16 bytes.
    """
    if hidden.dtype != torch.bfloat16 or hidden.shape[0] == 0 or not hidden.is_cuda:
        return False
    depth = hidden.shape[1]
    return depth > 0 and depth % ALIGNMENT == 0 and copyable(weight) and _is_hopper(hidden.device.index)


def copyable(matrix: Tensor) -> bool:
    """Whether TMA can move tiles of a bf16 matrix: dense rows that do not overlap, from multiples of 16 bytes on."""
    stride = matrix.stride(0)
    starts = stride % ALIGNMENT == 0 and matrix.data_ptr() % 16 == 0
    return starts and matrix.stride(1) == 1 and stride >= matrix.shape[1]


def dense_rows(matrix: Tensor) -> Tensor:
    """A bf16 matrix as TMA can move it: itself, or a copy. (`contiguous()` leaves a single row's stride as it is.)"""
    return matrix if copyable(matrix) else matrix.clone(memory_format=torch.contiguous_format)


@functools.cache
def _is_hopper(index: int) -> bool:
    """Whether the extension has Hopper's kernels, and this GPU runs them: no other has wgmma."""
    return extension.has_hopper() and torch.cuda.get_device_capability(index) == (9, 0)


def vocab_tiles(weight: Tensor) -> int:
    """How many tiles of the vocabulary have sums of their own."""
    return math.ceil(weight.shape[0] / extension.tile("linear_ce_hopper")["vocab"])


def fp32_bias(bias: Tensor | None) -> Tensor | None:
    """The bias as the kernels take it: 4·V bytes once, so that they need one dtype of it."""
    return None if bias is None else bias.float().contiguous()


def logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprob, entropy (0,) unless wanted, lse (N,) and normalizer (N,2), fp32.

    Memory: SUMS_BYTES of tile sums. Bitwise repeatable, and a row does not feel the others.
    """
    num_rows, ops = hidden.shape[0], torch.ops.fusedce_native
    hidden, target, bias = dense_rows(hidden), target.contiguous(), fp32_bias(bias)
    slopes, num_tiles, num_sums = row_slopes(options, num_rows, hidden), vocab_tiles(weight), 3 if with_entropy else 2
    logprob, lse = (hidden.new_empty(num_rows, dtype=torch.float32) for _ in range(2))
    entropy = hidden.new_empty(num_rows if with_entropy else 0, dtype=torch.float32)
    normalizer = hidden.new_empty((num_rows, 2), dtype=torch.float32)
    # A label out of range is in no tile, and what no tile writes is NaN.
    raw_target = hidden.new_full((num_rows,), math.nan, dtype=torch.float32)
    for start, stop in chunked.row_chunks(num_rows, num_tiles * num_sums * 4, SUMS_BYTES):
        part, of_rows = slice(start, stop), (target[start:stop], slopes[start:stop])
        sums = hidden.new_empty((num_sums, num_tiles, stop - start), dtype=torch.float32)
        maxima, exps, gaps = (*sums, None)[:3]
        chunk = (hidden[part], weight, bias, *of_rows, options.ignore_index, options.softcap)
        ops.logit_sums(*chunk, maxima, exps, gaps, raw_target[part])
        ops.merged_sums(
            *of_rows, options.ignore_index, maxima, exps, gaps, raw_target[part],
            logprob[part], entropy[part] if with_entropy else None, lse[part], normalizer[part],
        )  # fmt: skip
    return logprob, entropy, lse, normalizer


def logprob_backward(
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
    """d_hidden (N,D), d_weight (V,D), d_bias (V,).

    Memory: one chunk's d_logits, 2·V bytes a row, within `env.workspace_bytes()`, and d_weight in fp32. Bitwise
    repeatable.
    """
    target, bias = target.contiguous(), fp32_bias(bias)
    gradient = row_gradient(upstream, logprob, entropy, target, options)
    slopes = row_slopes(options, hidden.shape[0], hidden)
    numbers, with_entropy = row_numbers(gradient, entropy, normalizer, slopes), gradient.on_surprise is not None
    units = arch.of_device(hidden.device).num_units
    chunks = chunked.gemm_chunks(hidden, weight, units, weight.shape[0] * hidden.element_size())
    sums = Gradients(hidden, weight, mask, chunks, units)
    for start, stop in chunks:
        part = slice(start, stop)
        rows = dense_rows(chunked.kept_rows(hidden[part], target[part], options.ignore_index))
        torch.ops.fusedce_native.logit_gradient(
            rows, weight, bias, target[part], slopes[part], options.ignore_index, options.softcap,
            numbers[part], with_entropy, sums.d_logits(stop - start),
        )  # fmt: skip
        sums.add(start, stop, rows, None)
    return sums.result()


class Gradients:
    """d_hidden (N,D), d_weight (V,D) and d_bias (V,) while the chunks go by; the last two are summed in fp32.

    mask: which of them are wanted. The others have no elements, and their GEMM is not run. At least one row.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, mask: list[bool], chunks: chunked.Chunks, num_units: int
    ) -> None:
        self.weight, self.wanted, self.num_units = weight, Wanted.of(mask), num_units
        # The chunk's buffer and d_bias: one product with a vector, which needs no GEMM of ours.
        self._vendor = chunked.GradientSums(hidden, weight, [False, False, mask[2]], chunks)
        self.d_hidden = hidden.new_empty(hidden.shape if mask[0] else (0,))
        main_grad = self.wanted.main_grad
        self.in_place = main_grad is not None and main_grad.data_ptr() % 16 == 0
        if main_grad is not None and self.in_place:
            self.d_weight = main_grad
        else:
            self.d_weight = weight.new_empty(weight.shape if mask[1] else (0,), dtype=torch.float32)

    def d_logits(self, num_rows: int) -> Tensor:
        """(num_rows, V): where a chunk's gradient is to be written before `add`."""
        return self._vendor.d_logits(num_rows)

    def add(self, start: int, stop: int, rows: Tensor, factor: Tensor | None) -> None:
        """Rows [start, stop), in order from 0, whose d_logits is in the buffer; rows: their hidden (rows, D), finite
        where that is 0.

        factor: (rows,) what each row of d_logits is still to be multiplied with, as `rows` is already; None for ones.
        """
        d_logits, ops = self.d_logits(stop - start), torch.ops.fusedce_native
        if self.d_hidden.numel():
            out = self.d_hidden[start:stop]
            if self._fills(*out.shape):
                ops.d_hidden(d_logits, self.weight, factor, out)
            else:
                torch.mm(d_logits, self.weight, out=out)
                if factor is not None:
                    out.mul_(factor[:, None])
        if self.d_weight.numel():
            ops.d_weight(d_logits, rows, self.d_weight, start != 0 or self.in_place)
        self._vendor.add(start, stop, rows, factor)

    def _fills(self, num_rows: int, depth: int) -> bool:
        """Whether d_hidden's tiles, in whole waves of num_units, leave few of those idle."""
        return FULL * chunked.waste(num_rows, depth, chunked.GEMM_TILE, self.num_units) <= 1.0

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three gradients, in their own dtypes. Frees the buffer first."""
        _, _, d_bias = self._vendor.result(None)
        return self.d_hidden, self.wanted.weight_grad(self.d_weight, self.weight.dtype), d_bias
