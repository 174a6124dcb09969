"""The tiles that `fusedce tune` found on this machine: a JSON file in the user's cache, named by what it depends on.

It is this user's data or it is nothing: a folder or file of another owner, or one that others may write, a link, text
that is not JSON, a tile that would not fit, another version's: each is ignored with one warning, and the table holds.
"""

import contextlib
import functools
import hashlib
import json
import os
import stat
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fusedce import env
from fusedce.arch import ARCHS
from fusedce.configs.tables import TABLES
from fusedce.configs.tiles import GemmTile, fits
from fusedce.version import __version__

FORMAT = 1
MOST_BYTES = 1 << 16
BLOCKS = (16, 32, 64, 128, 256)  # Triton's ranges are powers of two, and a tile of words is 256


@dataclass(frozen=True)
class State:
    """What a cache file came to. ignored: whether there is one that cannot be trusted; text: one line on it."""

    ignored: bool
    text: str
    tiles: dict[str, GemmTile] = field(default_factory=dict)


@functools.cache
def kept(arch_name: str) -> dict[str, GemmTile]:
    """The kept tiles of an architecture by stage, read once a process; none, with a warning, from a bad file."""
    found = state(arch_name)
    if found.ignored:
        warnings.warn(found.text, RuntimeWarning, stacklevel=2)
    return found.tiles


def state(arch_name: str) -> State:
    """The kept tiles of an architecture, or why there are none."""
    if not env.use_tuned_tiles():
        return State(False, "FUSEDCE_TUNED=0: the tables' tiles, whatever is kept")
    return _found(arch_name, path_of(arch_name))


def _found(arch_name: str, path: Path) -> State:
    """What the file holds, whatever the switch says."""
    try:
        text = _read(path)
    except FileNotFoundError:
        others = [other.name for other in path.parent.glob(f"{arch_name}-*.json")]
        if others:
            text = (
                f"{path.parent} has tiles of another version or table of fusedce ({', '.join(sorted(others))}), which"
            )
            return State(True, f"{text} are ignored; `fusedce tune` makes new ones")
        return State(False, "the tables' tiles; `fusedce tune` looks for better ones on this GPU")
    except (OSError, ValueError) as error:
        return State(True, f"{path} is ignored: {_reason(error)}")
    try:
        tiles = _parse(text, arch_name)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return State(True, f"{path} is ignored: {_reason(error)}")
    return State(False, f"{path} has {len(tiles)} of `fusedce tune`: {', '.join(sorted(tiles))}", tiles)


def keep(arch_name: str, tiles: Mapping[str, GemmTile], measured: Mapping[str, Any]) -> Path:
    """Write tiles beside those kept before, whole or not at all; where. measured: what they were chosen by.

    Raises ValueError for tiles that do not go together, OSError where the file cannot be written.
    """
    path = path_of(arch_name)
    merged = _found(arch_name, path).tiles | dict(tiles)
    reason = fault(merged, arch_name)
    if reason:
        raise ValueError(f"not kept: {reason}")
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(folder, "folder")
    text = json.dumps(
        {"key": key(arch_name), "tiles": {name: asdict(tile) for name, tile in merged.items()}, "measured": measured},
        indent=1,
    )
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".tmp")  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    kept.cache_clear()
    return path


def key(arch_name: str) -> dict[str, Any]:
    """What a file depends on: the architecture, the package, and the table that its tiles were better than."""
    table = {name: asdict(tile) for name, tile in TABLES[arch_name].items()}
    digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
    return {"format": FORMAT, "arch": arch_name, "fusedce": __version__, "table": digest[:16]}


def path_of(arch_name: str) -> Path:
    """The file, named by its key."""
    digest = hashlib.sha256(json.dumps(key(arch_name), sort_keys=True).encode()).hexdigest()
    return env.cache_folder() / "tiles" / f"{arch_name}-{digest[:16]}.json"


def fault(tiles: Mapping[str, GemmTile], arch_name: str) -> str | None:
    """None if these tiles, in the table's place, run on the architecture and go together, else what does not."""
    arch, table = ARCHS[arch_name], TABLES[arch_name]
    for stage, tile in tiles.items():
        if stage not in table:
            return f"there is no stage {stage!r}"
        reason = fits(tile, arch, 2)
        if reason:
            return f"{stage}: {reason}"
        if not {tile.block_m, tile.block_n, tile.block_k} <= set(BLOCKS):
            return f"{stage}: blocks are one of {', '.join(map(str, BLOCKS))}"
        if tile.num_warps not in (1, 2, 4, 8, 16) or not 1 <= tile.num_stages <= 8 or not 1 <= tile.group_m <= 64:
            return f"{stage}: num_warps, num_stages or group_m out of range"
        if tile.matrix_instr not in ((16, 32) if arch.vendor == "amd" else (0,)):
            return f"{stage}: matrix_instr is {tile.matrix_instr}"
        if tile.tma > table[stage].tma or tile.staged_bytes != table[stage].staged_bytes:
            return f"{stage}: the kernel's stores are not as the table has them"
    both = {**table, **tiles}
    for few in ("", "_few"):
        rows = both[f"moe_rows{few}"].block_m
        if both[f"moe_gate_up{few}"].block_m != rows:
            return f"moe_gate_up{few} and moe_rows{few} have not the same block_m"
        for stage in (f"moe_wgrad{few}", "moe_wgrad_add"):
            if not (few and stage == "moe_wgrad_add") and rows % both[stage].block_k:
                return f"the block_k of {stage} does not divide the block_m of moe_rows{few}"
    return None


def _read(path: Path) -> str:
    """The text of a file that is this user's alone. ValueError with what is wrong with it, or with its folder."""
    _check(path.parent, "folder")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        _check_status(os.fstat(descriptor), "file")
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it is longer than {MOST_BYTES} bytes")
    return data.decode("utf-8")


def _check(path: Path, what: str) -> None:
    _check_status(os.lstat(path), what)


def _check_status(status: os.stat_result, what: str) -> None:
    kind = stat.S_ISDIR if what == "folder" else stat.S_ISREG
    if not kind(status.st_mode):
        raise ValueError(f"it is no {what}, or its folder is none")
    if status.st_uid != os.getuid():
        raise ValueError(f"the {what} belongs to user {status.st_uid}, not {os.getuid()}")
    if status.st_mode & 0o022:
        raise ValueError(f"others may write the {what} (mode {stat.S_IMODE(status.st_mode):04o})")


def _parse(text: str, arch_name: str) -> dict[str, GemmTile]:
    found = json.loads(text)
    if found["key"] != key(arch_name):
        raise ValueError(f"it is of {found['key']}, not {key(arch_name)}")
    kinds = {f.name: type(getattr(GemmTile(1, 1, 1, 1, 1), f.name)) for f in fields(GemmTile)}
    tiles = {}
    for stage, values in found["tiles"].items():
        if {name: type(value) for name, value in values.items()} != kinds:
            raise ValueError(f"{stage}: its fields are not a tile's")
        tiles[stage] = GemmTile(**values)
    reason = fault(tiles, arch_name)
    if reason:
        raise ValueError(reason)
    return tiles


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON ({error.msg})"
    return str(error).splitlines()[0] if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
