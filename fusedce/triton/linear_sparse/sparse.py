"""The sparse backward: which pairs of a row and a tile of words are worked, whether that pays, and the work."""

import torch
from torch import Tensor

from fusedce import budget
from fusedce.budget import WORD_TILE
from fusedce.triton.linear_sparse.d_bias import d_bias
from fusedce.triton.linear_sparse.dense import Problem
from fusedce.triton.linear_sparse.levels import below_levels
from fusedce.triton.linear_sparse.pair_count import pair_counts
from fusedce.triton.linear_sparse.pair_fill import fill_pairs
from fusedce.triton.linear_sparse.pair_hidden import pair_hidden
from fusedce.triton.linear_sparse.pair_logits import pair_logits
from fusedce.triton.linear_sparse.pair_weight import pair_weight


def sparse_gradients(
    problem: Problem, mass: Tensor, num_live: Tensor, own_tile: Tensor, allowed: Tensor, buffer: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill the gradients, if that pays and the budget allows it: accepted (1,) bool, and lost (1,) fp64, the most that
    is missing then.

    own_tile: (N,) int32, the tile of each row's target, −1 for a row without a gradient. allowed: (1,) fp64, what may
    be lost. buffer: of problem.hidden's dtype, for the pairs.
    """
    tiles, num_rows = mass.shape
    half = allowed / 2
    levels = budget.thresholds(half, num_rows, tiles)
    lost, counts = below_levels(mass, problem.numbers, own_tile, levels, problem.has_entropy)
    capacity = budget.capacity(num_rows, tiles, buffer.numel() // WORD_TILE)
    decision = budget.decide(levels, lost, counts, half, budget.most_pairs(num_live, tiles, capacity))
    # Nothing is listed if it does not pay, and nothing is worked then: the lists say how much there is to do.
    threshold = torch.where(decision.accepted, decision.threshold, -1.0)
    lists = _Lists(problem, mass, own_tile, threshold, capacity)
    pairs = buffer.view(-1)[: capacity * WORD_TILE].view(capacity, WORD_TILE)
    word_threshold = budget.word_threshold(half, decision.num_pairs)
    num_words = pair_logits(problem, lists.offsets, lists.pair_row, word_threshold, pairs)
    accepted = decision.accepted
    if problem.d_hidden.numel():
        accepted = accepted & budget.few_words(num_words, num_live)
    on = torch.where(accepted, 0, -1).int()
    lost = decision.lost
    if problem.d_hidden.numel():
        dropped = pair_hidden(
            pairs, problem.weight, (lists.row_pair, lists.row_tile, lists.row_starts), lists.num_ranges,
            word_threshold, on, problem.scale, problem.d_hidden,
        )  # fmt: skip
        lost = lost + dropped.sum(0, keepdim=True, dtype=torch.float64) * budget.MARGIN
    if problem.d_weight.numel():
        pair_weight(pairs, problem.hidden, lists.pair_row, lists.offsets, on, problem.scale, problem.d_weight)
    if problem.d_bias.numel():
        d_bias(pairs, lists.offsets, on, problem.scale, problem.d_bias)
    return accepted, lost


class _Lists:
    """The worked pairs. By tile of words: offsets (tiles + 1,), where each tile's begin, and pair_row, their rows. By
    row: row_starts, where those of each row and range of tiles begin (a row has num_ranges), row_pair and row_tile. All
    int32."""

    def __init__(self, problem: Problem, mass: Tensor, own_tile: Tensor, threshold: Tensor, capacity: int) -> None:
        arguments = (mass, problem.numbers, own_tile, threshold, problem.has_entropy)
        of_tile, of_row = pair_counts(*arguments)
        tile_starts = _starts(of_tile)
        self.row_starts, self.num_ranges = _starts(of_row), of_row.shape[1]
        self.offsets = tile_starts[:: of_tile.shape[1]].contiguous()
        self.pair_row, self.row_pair, self.row_tile = fill_pairs(*arguments, tile_starts, self.row_starts, capacity)


def _starts(counts: Tensor) -> Tensor:
    """(counts.numel() + 1,) int32: the sums of all counts before each one."""
    ends = counts.flatten().cumsum(0, dtype=torch.int32)
    return torch.cat((torch.zeros_like(ends[:1]), ends))
