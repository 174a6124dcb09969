"""Tile sizes as data: `tiles` says what a tile is and when it fits, `tables` holds one table per architecture, `tuned`
what `fusedce tune` found better on this machine, `choice` takes one or the other."""

from fusedce.configs.choice import tile_for
from fusedce.configs.tables import STAGES, table_tile
from fusedce.configs.tiles import GemmTile, fits

__all__ = ["STAGES", "GemmTile", "fits", "table_tile", "tile_for"]
