"""The tile that a launch takes: the one that `fusedce tune` kept on this machine, else the table's."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fusedce import env
from fusedce.arch import Arch
from fusedce.configs import tuned
from fusedce.configs.tables import table_tile
from fusedce.configs.tiles import GemmTile


class _Trial:
    """What `fusedce tune` tries. Of the process and not of a thread: a backward launches from autograd's threads."""

    tiles: Mapping[str, GemmTile] | None = None
    asked: dict[str, None]


def tile_for(stage: str, arch: Arch, itemsize: int, by_tma: bool = True) -> GemmTile:
    """The tile of a stage. itemsize: bytes of an operand's element (2 for bf16 and fp16, 4 for fp32). by_tma: whether
    descriptors can reach the operands; without them a tile is not persistent either."""
    tile = _changed(stage, arch) if itemsize == 2 else None
    if tile is None:
        return table_tile(stage, arch, itemsize, by_tma)
    return tile.reached(by_tma)


def _changed(stage: str, arch: Arch) -> GemmTile | None:
    if _Trial.tiles is not None:
        _Trial.asked[stage] = None
        return _Trial.tiles.get(stage)
    return tuned.kept(arch.name).get(stage) if env.use_tuned_tiles() else None


@contextmanager
def trial(tiles: Mapping[str, GemmTile]) -> Iterator[dict[str, None]]:
    """Inside, these stages have these tiles, and the others the table's, whatever was kept. Gives the stages that were
    asked for, in order."""
    was = _Trial.tiles
    _Trial.tiles, _Trial.asked = tiles, {}
    try:
        yield _Trial.asked
    finally:
        _Trial.tiles = was
