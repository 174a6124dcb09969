"""The way of what belongs to slots, a routing weight or an expert id each, to the experts' ranks and back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce.distributed.collectives import start_all_to_all
from fusedce.distributed.expert_counts import Table

ELSEWHERE = -1  # the slot of a place in a row whose expert is on another rank


@dataclass(frozen=True)
class SlotRoute:
    """Which slots each sent row stands for. All chunks cross together, before the first row and after the last.

    slots: (sent rows, S) int64, ordered by rank and then by chunk: slot n·K + k of this rank's tokens, or ELSEWHERE.
    sizes: N, K. sent, received: (C, R), rows.
    """

    slots: Tensor
    sizes: tuple[int, ...]
    sent: Table
    received: Table
    group: dist.ProcessGroup

    def to_experts(self, values: Tensor, fill: float) -> Tensor:
        """(received rows, S), by chunk and then by rank, of values (N, K); `fill` where the expert is elsewhere."""
        # ELSEWHERE, −1, is the last one
        flat = torch.cat((values.reshape(-1), values.new_full((1,), fill)))
        rows = self._exchanged(flat[self.slots], self.received, self.sent)
        return reordered(rows, transposed(self.received))

    def from_experts(self, values: Tensor) -> Tensor:
        """(N, K) of values (received rows, S): the way back, for gradients. A slot that was sent nowhere has 0."""
        rows = self._exchanged(reordered(values, self.received), self.sent, self.received)
        flat = values.new_zeros(math.prod(self.sizes) + 1)
        flat[self.slots] = rows
        return flat[:-1].view(self.sizes)

    def _exchanged(self, rows: Tensor, received: Table, sent: Table) -> Tensor:
        arriving, leaving = ([sum(of_rank) for of_rank in transposed(table)] for table in (received, sent))
        out = rows.new_empty((sum(arriving), rows.shape[1]))
        return start_all_to_all(out, rows, arriving, leaving, self.group).wait()


def transposed(table: Sequence[Sequence[int]]) -> Table:
    """(B, A) of a table (A, B)."""
    return tuple(zip(*table, strict=True))


def reordered(rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Rows in blocks, counts (A, B) of them with b running fastest, in the order in which a runs fastest.

    From blocks by chunk to blocks by rank with a table (C, R), and back with its transposed.
    """
    blocks = rows.split([count for line in counts for count in line])
    width = len(counts[0])
    return torch.cat([blocks[a * width + b] for b in range(width) for a in range(len(counts))])
