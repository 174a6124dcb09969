"""manifest.json of a checkpoint: what it is of, its files with sizes and SHA-256, the parts of tensors in each.

The parts of a tensor are boxes that fill it: its place in the whole, and its size. Who reads them needs not be as many
processes as those that wrote, nor hold the same parts.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fusedce.train import ranks

NAME = "manifest.json"
FORMAT = 2
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


@ranks.crosses
class CheckpointError(ValueError):
    """A checkpoint that is not what its manifest says; the message names the file."""


@ranks.crosses
class UnreadableHereError(CheckpointError):
    """What is no damage, and not to be put aside: another version's checkpoint, or a folder that ranks do not share."""


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins in each dimension, and its shape."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: "Box") -> "Box | None":
        """What two parts of one tensor have in common."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True))
        shape = tuple(end - begin for begin, end in zip(start, ends, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def inside(self, other: "Box") -> tuple[slice, ...]:
        """Where this part lies in `other`, which holds it."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.start, other.start, self.shape, strict=True))


@dataclass(frozen=True)
class Entry:
    """One tensor: its shape, its dtype's name, and in which file which part of it lies."""

    shape: tuple[int, ...]
    dtype: str
    parts: dict[str, Box]

    def missing(self) -> int:
        """Elements that no part holds; below 0 for parts that lie over each other."""
        return math.prod(self.shape) - sum(math.prod(box.shape) for box in self.parts.values())


@dataclass(frozen=True)
class Manifest:
    """step: of the run. config: its JSON form. world: processes that wrote. files: name -> (size, SHA-256).
    tensors: kind ("model", "optimizer") -> name -> entry.
    """

    step: int
    config: dict[str, Any]
    world: int
    files: dict[str, tuple[int, str]]
    tensors: dict[str, dict[str, Entry]]

    def text(self) -> bytes:
        """The file's bytes, with their own seal."""
        config = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()
        body = {"format": FORMAT, "config_sha256": config, **asdict(self)}
        return json.dumps({"sha256": seal(body), **body}, indent=1).encode()


def seal(body: dict[str, Any]) -> str:
    """The SHA-256 of a manifest without that key."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read(folder: Path) -> Manifest:
    """The manifest of one checkpoint, checked against its own hash and for sense; CheckpointError says what is not."""
    path = folder / NAME
    data = read_file(path)
    try:
        body = json.loads(data)
        sealed = body.pop("sha256") == seal(body)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a manifest ({type(error).__name__})") from error
    if not sealed:
        raise CheckpointError(f"{path}: SHA-256 differs from what was written")
    if body.get("format") != FORMAT:
        raise UnreadableHereError(f"{path}: format {body.get('format')}; this version reads {FORMAT}")
    try:
        found = _parsed(body)
        _check(found)
        name = folder.resolve().name  # `latest` is a link
        if name.startswith("step-") and name[5:].isdecimal() and int(name[5:]) != found.step:
            raise ValueError(f"it is of step {found.step}")
    except (KeyError, AttributeError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: not a manifest ({error})") from error
    return found


def _parsed(body: dict[str, Any]) -> Manifest:
    tensors = {
        kind: {
            name: Entry(
                _sizes(entry["shape"]), entry["dtype"],
                {file: Box(_sizes(box["start"]), _sizes(box["shape"])) for file, box in entry["parts"].items()},
            )
            for name, entry in entries.items()
        }
        for kind, entries in body["tensors"].items()
    }  # fmt: skip
    files = {name: (int(size), str(digest)) for name, (size, digest) in body["files"].items()}
    return Manifest(int(body["step"]), dict(body["config"]), int(body["world"]), files, tensors)


def _sizes(values: Sequence[int]) -> tuple[int, ...]:
    if not all(isinstance(value, int) and value >= 0 for value in values):
        raise ValueError(f"{values} are no sizes")
    return tuple(values)


def _check(manifest: Manifest) -> None:
    """ValueError for a file outside the folder, and for parts that do not make up their tensor."""
    for file in manifest.files:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{file!r} is no file of a checkpoint")
    for entries in manifest.tensors.values():
        for name, entry in entries.items():
            if entry.dtype not in DTYPES:
                raise ValueError(f"{name} has dtype {entry.dtype}")
            whole = Box((0,) * len(entry.shape), entry.shape)
            for file, box in entry.parts.items():
                fits = math.prod(box.shape) == 0 or box.overlap(whole) == box
                if file not in manifest.files or not fits:
                    raise ValueError(f"{name} has a part in {file} that cannot be")
            if entry.missing():
                raise ValueError(f"{name} lacks {entry.missing()} elements")


def read_file(path: Path, size: int | None = None) -> bytes:
    """A file's bytes; CheckpointError if it is not there, no plain file, or not of `size`, before it is read."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path}: not a file")
        if size is not None and found.st_size != size:
            raise CheckpointError(f"{path}: {found.st_size} bytes; the manifest says {size}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
