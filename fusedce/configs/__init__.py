"""Tile sizes as data: `tiles` says what a tile is and when it fits, `tables` holds one table per architecture."""

from fusedce.configs.tables import STAGES, tile_for
from fusedce.configs.tiles import GemmTile, fits

__all__ = ["STAGES", "GemmTile", "fits", "tile_for"]
