"""Results and gradients in one call, for losses whose upstream gradients a row's own results give: three GEMMs, not
four."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fusedce import arch, chunked
from fusedce.options import LogitOptions, UpstreamOf
from fusedce.rows import row_slopes
from fusedce.triton.common import unit_rows
from fusedce.triton.linear_ce.backward import linear_logprob_backward
from fusedce.triton.linear_ce.forward import head_of, linear_logprob, tile_sums
from fusedce.triton.linear_ce.reseed import reseed
from fusedce.triton.linear_ce.scale import scaled
from fusedce.triton.linear_ce.seeded import seeded_exp
from fusedce.triton.linear_ce.seeded_rows import seeded_sums
from fusedce.triton.linear_ce.seeded_scale import seeded_scale
from fusedce.triton.linear_ce.target_logit import target_logit

Fused = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def linear_fused(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    mask: list[bool],
    upstream_of: UpstreamOf,
    with_entropy: bool,
) -> Fused:
    """logprob, entropy, lse (N,), d_hidden, d_weight, d_bias.

    Three GEMMs with bf16 operands and no entropy: fp16 has no room for e^(z − z_y), and the entropy's gradient needs
    more of a row than one factor. Else the logits are made twice.
    """
    if with_entropy or hidden.dtype != torch.bfloat16:
        return chunked.in_two_passes(
            linear_logprob, linear_logprob_backward,
            hidden, weight, target, bias, options, mask, upstream_of, with_entropy,
        )  # fmt: skip
    return _seeded(unit_rows(hidden), unit_rows(weight), target.contiguous(), bias, options, mask, upstream_of)


def _seeded(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    mask: list[bool],
    upstream_of: UpstreamOf,
) -> Fused:
    num_rows, ignore_index = hidden.shape[0], options.ignore_index
    logprob, lse, rest, factor = (hidden.new_empty(num_rows, dtype=torch.float32) for _ in range(4))
    slopes = row_slopes(options, num_rows, hidden)
    raw_target = target_logit(target, head_of(hidden, weight, bias, options))
    units = arch.of_device(hidden.device).num_units
    chunks = chunked.gemm_chunks(hidden, weight, units, weight.shape[0] * hidden.element_size())
    flags = torch.zeros(len(chunks), dtype=torch.int32, device=hidden.device)
    sums = chunked.GradientSums(hidden, weight, mask, chunks)

    def add(start: int, stop: int, flag: Tensor) -> None:
        part = slice(start, stop)
        rows = chunked.kept_rows(hidden[part], target[part], ignore_index)
        chunk = Chunk(
            rows, weight, bias, target[part], raw_target[part], slopes[part], options, sums.d_logits(stop - start), flag
        )
        seed = chunk.exponentials(logprob[part], lse[part], rest[part])
        d_logprob, _, d_lse = upstream_of(start, stop, logprob[part], logprob[:0], lse[part])
        d_logprob = torch.zeros_like(seed) if d_logprob is None else d_logprob
        seeded_scale(
            rows, chunk.exps, chunk.target, chunk.raw_target, seed, chunk.slopes, rest[part], d_logprob, d_lse,
            options.softcap, ignore_index, factor[part],
        )  # fmt: skip
        sums.add(start, stop, rows, factor[part])

    # A function, so that nothing of a chunk outlives it.
    for (start, stop), flag in zip(chunks, flags, strict=True):
        add(start, stop, flag)
    scaled(sums.d_hidden, None, factor, sums.d_hidden)
    return logprob, logprob[:0], lse, *sums.result(None)


@dataclass(frozen=True)
class Chunk:
    """What the exponentials of a chunk are made from, and where they go: exps (rows, V). flag: () int32, 0."""

    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    raw_target: Tensor
    slopes: Tensor
    options: LogitOptions
    exps: Tensor
    flag: Tensor

    def exponentials(self, logprob: Tensor, lse: Tensor, rest: Tensor) -> Tensor:
        """Fill exps, and logprob, lse and rest, the sum of exps; returns the seed, all (rows,)."""
        partial = self._exp(self.raw_target, None, None)
        self._sums(partial, self.raw_target, logprob, lse, rest, is_redo=False)
        # A target of probability below 2⁻⁶⁴ leaves its row too large. On the device that is known, here it is not: the
        # whole chunk is made again about such rows' log-sum-exp, by kernels that do nothing unless the flag is set.
        maxima = tile_sums(self.rows, self.weight, self.bias, self.target, self.slopes, self.options, False, self.flag)
        seed = reseed(maxima, self.raw_target, rest, self.slopes, self.flag)
        self._exp(seed, self.flag, partial)
        self._sums(partial, seed, logprob, lse, rest, is_redo=True)
        return seed

    def _exp(self, seed: Tensor, flag: Tensor | None, partial: Tensor | None) -> Tensor:
        return seeded_exp(
            self.rows, self.weight, self.bias, self.target, self.slopes, seed, self.options, self.exps, flag, partial
        )

    def _sums(self, partial: Tensor, seed: Tensor, logprob: Tensor, lse: Tensor, rest: Tensor, is_redo: bool) -> None:
        seeded_sums(
            partial, self.raw_target, seed, self.target, self.slopes, self.options.ignore_index, logprob, lse, rest,
            self.flag, is_redo,
        )  # fmt: skip
