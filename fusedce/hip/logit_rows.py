"""A chunk's logits by one plain GEMM of the vendor library, in fp32, and the row kernels over them."""

import torch
from torch import Tensor

from fusedce import arch, chunked
from fusedce.hip import extension, hopper
from fusedce.options import LogitOptions
from fusedce.rows import RowGradient, row_slopes


class LogitRows:
    """The row kernels over a chunk's logits: what they are given of all rows, and the results (N,) that they fill.

    target: (N,); a contiguous one is looked at when the kernels run. ignored: in place of options.ignore_index.
    """

    def __init__(
        self, hidden: Tensor, target: Tensor, bias: Tensor | None, options: LogitOptions, ignored: int | None = None
    ) -> None:
        num_rows = hidden.shape[0]
        self.ignored = options.ignore_index if ignored is None else ignored
        self.target, self.bias, self.options = target.contiguous(), hopper.fp32_bias(bias), options
        self.slopes = row_slopes(options, num_rows, hidden)
        logprob, entropy, lse = (hidden.new_empty(num_rows, dtype=torch.float32) for _ in range(3))
        self.results = logprob, entropy, lse, hidden.new_empty((num_rows, 2), dtype=torch.float32)

    def _given(self, start: int, stop: int) -> tuple[Tensor, Tensor | None, Tensor, int, float]:
        rows = slice(start, stop)
        return self.target[rows], self.bias, self.slopes[rows], self.ignored, self.options.softcap

    def statistics(self, start: int, stop: int, logits: Tensor) -> None:
        """Fill rows [start, stop) of the results from their logits (rows, V)."""
        torch.ops.fusedce_native.logprob_rows(
            logits, *self._given(start, stop), *(result[start:stop] for result in self.results)
        )

    def parts(self, start: int, stop: int, logits: Tensor, out: Tensor) -> None:
        """Fill out (rows, 4) for rows [start, stop); `linear_parts` says with what."""
        torch.ops.fusedce_native.parts_rows(logits, *self._given(start, stop), out)

    def gradient(
        self,
        start: int,
        stop: int,
        logits: Tensor,
        gradient: RowGradient,
        entropy: Tensor,
        normalizer: Tensor,
        out: Tensor,
    ) -> None:
        """Fill out (rows, V) for rows [start, stop); normalizer: of all rows, the others of these."""
        numbers = [None if number is None else number.contiguous() for number in gradient]
        torch.ops.fusedce_native.d_logits_rows(
            logits, *self._given(start, stop), *numbers, entropy.contiguous(), normalizer[start:stop], out
        )


def chunks_of(hidden: Tensor, weight: Tensor) -> chunked.Chunks:
    """Rows of a backward's chunks, each with its logits and their gradient."""
    row_bytes = row_width(weight.shape[0]) * 4 + weight.shape[0] * hidden.element_size()
    return chunked.gemm_chunks(hidden, weight, arch.of_device(hidden.device).num_units, row_bytes)


def row_width(vocab: int) -> int:
    """Words from one row of logits to the next, a multiple of what one access of the kernels moves.

    So every row is aligned, for them and for the GEMM, and summed in the same order wherever it lies in the chunk.
    """
    width = extension.tile("linear_ce_rows")["vector_width"]
    return -(-vocab // width) * width


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden · weightᵀ (N,V), accumulated and kept in fp32, its rows `row_width` apart."""
    vocab = weight.shape[0]
    # Not kept from chunk to chunk: the allocator hands the same memory out again, and it is free during the GEMMs.
    out = hidden.new_empty((hidden.shape[0], row_width(vocab)), dtype=torch.float32)[:, :vocab]
    if hidden.dtype == torch.float32:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
