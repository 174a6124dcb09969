"""What `fusedce tune` tries for a stage: the shapes of all tables for stages like it, as far as they fit and go
together with the other stages' tiles."""

from collections.abc import Mapping
from dataclasses import replace

from fusedce.configs.tables import TABLES
from fusedce.configs.tiles import GemmTile
from fusedce.configs.tuned import fault


def family(stage: str) -> str:
    """Stages among which a tile's shape may move."""
    room = stage.partition("_")[0]
    return f"{room}-few" if stage.endswith("_few") else room


def candidates(stage: str, arch_name: str, beside: Mapping[str, GemmTile]) -> list[GemmTile]:
    """The table's own tile first, then the others. beside: tiles of other stages that are already chosen.

    What a kernel's stores and descriptors need, and the order of its tiles, is kept from the table's own.
    """
    own = TABLES[arch_name][stage]
    found = {own: None}
    for table in TABLES.values():
        for other, tile in table.items():
            if family(other) == family(stage):
                shape = {
                    name: getattr(tile, name) for name in ("block_m", "block_n", "block_k", "num_warps", "num_stages")
                }
                found[replace(own, **shape)] = None
                if own.matrix_instr:  # AMD's other MFMA edge
                    found[replace(own, **shape, matrix_instr=48 - own.matrix_instr)] = None
    return [tile for tile in found if fault({**beside, stage: tile}, arch_name) is None]
