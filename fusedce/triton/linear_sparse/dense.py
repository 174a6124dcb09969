"""The products over the rows that have a gradient, a chunk of words at a time.

How many they are only the device knows, so no vendor's GEMM can do it: these end when the rows do. Chunks are of words,
not of rows: the normalizer is known, so d_weight of a chunk is whole at once, and of the two sums d_hidden's is the one
that is carried from chunk to chunk: (V / words) · N · D numbers, where d_weight's would be (N / rows) · V · D.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fusedce import arch, env
from fusedce.budget import WORD_TILE
from fusedce.chunked import waste
from fusedce.configs import tile_for
from fusedce.options import LogitOptions
from fusedce.triton.linear_ce.backward import launch_d_logits
from fusedce.triton.linear_sparse import d_weight as weight_product
from fusedce.triton.linear_sparse.d_bias import d_bias
from fusedce.triton.linear_sparse.d_hidden import add_d_hidden
from fusedce.triton.linear_sparse.live_rows import live_rows
from fusedce.triton.linear_sparse.spread import spread_rows


@dataclass(frozen=True)
class Problem:
    """What both backwards work on. numbers: (N, 8) fp32 of each row, divided by scale (); the gradients' memory is
    there, with no elements where one is not wanted."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    options: LogitOptions
    numbers: Tensor
    has_entropy: bool
    scale: Tensor
    d_hidden: Tensor
    d_weight: Tensor
    d_bias: Tensor


def words_of_chunk(hidden: Tensor, weight: Tensor) -> int:
    """A multiple of WORD_TILE: the words whose gradients for all rows fit the workspace beside the copy of hidden.

    Of those, the number whose d_weight loses least: ⌈words/128⌉·⌈D/256⌉ tiles run in whole waves, and d_hidden is read
    and written once a chunk.
    """
    num_rows, depth = hidden.shape
    row_bytes = max(num_rows, 1) * hidden.element_size()
    room = max(env.workspace_bytes() - row_bytes * depth, env.workspace_bytes() // 2)
    most = max(min(room // row_bytes, weight.shape[0] + WORD_TILE - 1) // WORD_TILE, 1)
    machine = arch.of_device(hidden.device)
    tile = tile_for(weight_product.STAGE, machine, hidden.element_size())

    def cost(words: int) -> float:
        return waste(words, depth, (tile.block_m, tile.block_n), machine.num_units) + 256 / words

    return min((WORD_TILE * n for n in range(1, most + 1)), key=cost)


def new_buffer(hidden: Tensor, words: int) -> Tensor:
    """(N, words): a chunk's d_logits, or the sparse backward's pairs; rows start at multiples of 16 bytes."""
    return hidden.new_empty((hidden.shape[0], words))


def products(problem: Problem, order: Tensor, place: Tensor, count: Tensor, buffer: Tensor) -> None:
    """Fill the gradients from the rows order[:count]; nothing is touched where count (1,) int32 is below 0.

    place: (N,) where each row is in order, −1 for those without a gradient.
    """
    hidden, weight, bias, options = problem.hidden, problem.weight, problem.bias, problem.options
    rows = live_rows(hidden, order, count)
    numbers, target = problem.numbers.index_select(0, order), problem.target.index_select(0, order)
    total = rows.new_empty(problem.d_hidden.shape, dtype=torch.float32)
    words = buffer.shape[1]
    for first in range(0, weight.shape[0], words):
        part = slice(first, min(first + words, weight.shape[0]))
        d_logits = buffer[:, : part.stop - first]
        launch_d_logits(
            rows, weight[part], None if bias is None else bias[part], target - first, numbers, options,
            problem.has_entropy, d_logits, count,
        )  # fmt: skip
        if total.numel():
            add_d_hidden(d_logits, weight[part], count, total, first == 0)
        if problem.d_weight.numel():
            weight_product.d_weight(d_logits, rows, count, problem.scale, problem.d_weight[part])
        if problem.d_bias.numel():
            d_bias(d_logits, None, count, problem.scale, problem.d_bias[part])
    if total.numel():
        spread_rows(total, place, count, problem.scale, problem.d_hidden)
