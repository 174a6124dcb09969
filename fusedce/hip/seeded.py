"""The loss with its gradients by three GEMMs of our own, on Hopper: exponentials about a seed that is known beforehand.

The seed of a row is its target's raw logit, one dot product. The logits' GEMM writes E = e^(z − z_y) in bf16, and its
sums; logits never exist. With S = 1 + Σ E everything follows: log p_y = −log S, p_j = E_j / S, and each row's factor
g/S goes into d_hidden's epilogue and into the copy of hidden that d_weight's GEMM reads. Kernels: linear_ce_hopper.cu
and linear_ce_seeded.cu in csrc/kernels.
"""

import torch
from torch import Tensor

from fusedce import arch, chunked
from fusedce.hip import hopper
from fusedce.options import LogitOptions, UpstreamOf
from fusedce.rows import row_slopes

Fused = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


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
    target, slopes, bias = target.contiguous(), row_slopes(options, num_rows, hidden), hopper.fp32_bias(bias)
    num_tiles = hopper.vocab_tiles(weight)
    units = arch.of_device(hidden.device).num_units
    chunks = chunked.gemm_chunks(hidden, weight, units, weight.shape[0] * hidden.element_size() + num_tiles * 4)
    sums = hopper.Gradients(hidden, weight, mask, chunks, units)

    def add(start: int, stop: int) -> None:
        part = slice(start, stop)
        rows = hopper.dense_rows(chunked.kept_rows(hidden[part], target[part], options.ignore_index))
        chunk = (rows, weight, bias, target[part], slopes[part], options.ignore_index, options.softcap)
        raw_target, seed, rest, factor = rows.new_empty((4, stop - start), dtype=torch.float32)
        partial = rows.new_empty((num_tiles, stop - start), dtype=torch.float32)
        exps = sums.d_logits(stop - start)
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


def scaled(grad: Tensor, scale: Tensor) -> Tensor:
    """grad · scale () as a new tensor, rounded once.

    torch's product of a bf16 matrix with an fp32 number on the GPU is not vectorized.
    """
    dense = grad.dtype == torch.bfloat16 and grad.is_cuda and grad.is_contiguous() and grad.data_ptr() % 16 == 0
    if not dense or grad.numel() % hopper.ALIGNMENT != 0:
        return grad * scale
    out = torch.empty_like(grad)
    torch.ops.fusedce_native.scaled(grad, scale.float(), out)
    return out
