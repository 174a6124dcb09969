"""The loss with its gradients by three GEMMs of our own, on Hopper: exponentials about a seed that is known beforehand.

The seed of a row is its target's logit, one dot product. The logits' GEMM writes E = e^(z − z_y) in bf16, and its sums;
logits never exist. With S = 1 + Σ E everything follows: log p_y = −log S, p_j = E_j / S, and each row's factor g/S goes
into d_hidden's epilogue and into the copy of hidden that d_weight's GEMM reads. Kernels: linear_ce_hopper.cu and
linear_ce_seeded.cu in csrc/kernels.
"""

import functools
import math

import torch
from torch import Tensor

from fusedce import arch, chunked
from fusedce.hip import extension
from fusedce.options import LogitOptions, UpstreamOf

Fused = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
# Elements in 16 bytes, what a copy of a tile starts at.
ALIGNMENT = 8
# The share of the units that d_hidden's GEMM must keep busy: with less, the vendor's choice of tiles is faster.
FULL = 0.9


def suits(hidden: Tensor, weight: Tensor, with_entropy: bool) -> bool:
    """Whether `fused` can take this call.

    fp16 has no room for e^(z − z_y), the entropy's gradient needs more of a row than one factor, and TMA asks for rows
    of weight, and of the copy of hidden, that start at multiples of 16 bytes.
    """
    if with_entropy or hidden.dtype != torch.bfloat16 or hidden.shape[0] == 0 or not hidden.is_cuda:
        return False
    depth, stride = hidden.shape[1], weight.stride(0)
    aligned = depth % ALIGNMENT == stride % ALIGNMENT == 0 and weight.data_ptr() % 16 == 0
    return aligned and weight.stride(1) == 1 and stride >= depth > 0 and _is_hopper(hidden.device.index)


@functools.cache
def _is_hopper(index: int) -> bool:
    """Whether the extension has Hopper's kernels, and this GPU runs them: no other has wgmma."""
    built = any(name in ("sm_90a", "compute_90a") for name in extension.build_info()["archs"])
    return built and torch.cuda.get_device_capability(index) == (9, 0)


def fused(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    mask: list[bool],
    upstream_of: UpstreamOf,
) -> Fused:
    """logprob, entropy (0,), lse (N,), d_hidden, d_weight, d_bias: `linear_fused` without the entropy.

    Memory: one chunk's exponentials, 2·V bytes a row, within `env.workspace_bytes()`, and d_weight in fp32. Bitwise
    repeatable.
    """
    num_rows, ops = hidden.shape[0], torch.ops.fusedce_native
    logprob, lse = (hidden.new_empty(num_rows, dtype=torch.float32) for _ in range(2))
    target, slopes = target.contiguous(), _slopes(options, hidden)
    bias = None if bias is None else bias.float().contiguous()
    num_tiles = math.ceil(weight.shape[0] / extension.tile("linear_ce_hopper")["vocab"])
    units = arch.of_device(hidden.device).num_units
    chunks = chunked.gemm_chunks(hidden, weight, units, weight.shape[0] * hidden.element_size() + num_tiles * 4)
    sums = Gradients(hidden, weight, mask, chunks, units)

    def add(start: int, stop: int) -> None:
        part = slice(start, stop)
        rows = chunked.kept_rows(hidden[part], target[part], options.ignore_index).contiguous()
        chunk = (rows, weight, bias, target[part], slopes[part], options.ignore_index, options.softcap)
        raw_target, seed, rest, factor = rows.new_empty((4, stop - start), dtype=torch.float32)
        partial = rows.new_empty((num_tiles, stop - start), dtype=torch.float32)
        exps = sums.exponentials(stop - start)
        ops.target_logits(*chunk, raw_target, seed)
        ops.seeded_exponentials(*chunk, seed, exps, partial)
        ops.seeded_statistics(*chunk, partial, raw_target, seed, exps, rest, logprob[part], lse[part])
        d_logprob, _, d_lse = upstream_of(start, stop, logprob[part], logprob[:0], lse[part])
        # .sum() hands down an expanded gradient, N times one number.
        d_logprob = torch.zeros_like(seed) if d_logprob is None else d_logprob.float().contiguous()
        d_lse = None if d_lse is None else d_lse.float().contiguous()
        ops.seeded_scale(*chunk, raw_target, seed, rest, d_logprob, d_lse, exps, factor)
        sums.add(start, stop, rows, factor)

    # A function, so that nothing of a chunk outlives it.
    for start, stop in chunks:
        add(start, stop)
    return logprob, logprob[:0], lse, *sums.result()


class Gradients:
    """d_hidden (N,D), d_weight (V,D) and d_bias (V,) while the chunks go by; the last two are summed in fp32.

    mask: which of them are wanted. The others have no elements, and their GEMM is not run. At least one row.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, mask: list[bool], chunks: chunked.Chunks, num_units: int
    ) -> None:
        self.weight, self.num_units = weight, num_units
        # The chunk's buffer and d_bias: one product with a vector, which needs no GEMM of ours.
        self._vendor = chunked.GradientSums(hidden, weight, [False, False, mask[2]], chunks)
        self.d_hidden = hidden.new_empty(hidden.shape if mask[0] else (0,))
        self.d_weight = weight.new_empty(weight.shape if mask[1] else (0,), dtype=torch.float32)

    def exponentials(self, num_rows: int) -> Tensor:
        """(num_rows, V): where a chunk's exponentials are to be written before `add`."""
        return self._vendor.d_logits(num_rows)

    def add(self, start: int, stop: int, rows: Tensor, factor: Tensor) -> None:
        """Rows [start, stop), in order from 0, whose exponentials are in the buffer; rows: their hidden (rows, D) times
        `factor` (rows,), which the exponentials are still to be multiplied with."""
        exps, ops = self.exponentials(stop - start), torch.ops.fusedce_native
        if self.d_hidden.numel():
            out = self.d_hidden[start:stop]
            if self._fills(*out.shape):
                ops.seeded_d_hidden(exps, self.weight, factor, out)
            else:
                torch.mm(exps, self.weight, out=out)
                out.mul_(factor[:, None])
        if self.d_weight.numel():
            ops.seeded_d_weight(exps, rows, self.d_weight, start != 0)
        self._vendor.add(start, stop, rows, factor)

    def _fills(self, num_rows: int, depth: int) -> bool:
        """Whether d_hidden's tiles, in whole waves of num_units, leave few of those idle."""
        tiles = math.ceil(num_rows / chunked.GEMM_TILE[0]) * math.ceil(depth / chunked.GEMM_TILE[1])
        return tiles >= FULL * math.ceil(tiles / self.num_units) * self.num_units

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three gradients, in their own dtypes. Frees the buffer first."""
        _, _, d_bias = self._vendor.result(None)
        return self.d_hidden, self.d_weight.to(self.weight.dtype), d_bias


def scaled(grad: Tensor, scale: Tensor) -> Tensor:
    """grad · scale () as a new tensor, rounded once.

    torch's product of a bf16 matrix with an fp32 number on the GPU is not vectorized.
    """
    dense = grad.dtype == torch.bfloat16 and grad.is_cuda and grad.is_contiguous() and grad.data_ptr() % 16 == 0
    if not dense or grad.numel() % ALIGNMENT != 0:
        return grad * scale
    out = torch.empty_like(grad)
    torch.ops.fusedce_native.scaled(grad, scale.float(), out)
    return out


def _slopes(options: LogitOptions, hidden: Tensor) -> Tensor:
    """(N,) fp32: 1 / temperature of each row."""
    if options.row_temperature is None:
        return hidden.new_full(hidden.shape[:1], 1.0 / options.temperature, dtype=torch.float32)
    return 1.0 / options.row_temperature.float()
