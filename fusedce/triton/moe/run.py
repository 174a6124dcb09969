"""Which tile each grouped GEMM of one call takes, and its grid."""

from dataclasses import dataclass

import torch
import triton

from fusedce import arch
from fusedce.arch import Arch
from fusedce.configs import GemmTile, tile_for
from fusedce.triton.common import num_programs
from fusedce.triton.moe.tile_table import RowTiles

# Mean rows of an expert up to which the tiles for few rows are taken: there the weights are read once and nothing else
# counts.
FEW_ROWS = 16


@dataclass(frozen=True)
class Run:
    """One call on one machine. few: whether an expert has few rows, by the mean, which the host knows."""

    machine: Arch
    itemsize: int
    few: bool

    @staticmethod
    def of(like: torch.Tensor, num_rows: int, num_experts: int) -> "Run":
        """For operands such as `like`."""
        return Run(arch.of_device(like.device), like.element_size(), num_rows <= FEW_ROWS * num_experts)

    @property
    def block_r(self) -> int:
        """Rows of a tile, the same in every stage."""
        return self.tile("moe_gate_up", "moe_gate_up_few").block_m

    def tile(self, stage: str, stage_few: str, by_tma: bool = True) -> GemmTile:
        """A stage's tile. by_tma: whether descriptors reach its operands."""
        return tile_for(stage_few if self.few else stage, self.machine, self.itemsize, by_tma)

    def grid(self, tiles: RowTiles, width: int, tile: GemmTile, block: int) -> tuple[int]:
        """Programs for `width` columns, `block` of them a tile: as many as the worst split of the rows needs."""
        return (num_programs(tiles.num_tiles * triton.cdiv(width, block), tile, self.machine),)
