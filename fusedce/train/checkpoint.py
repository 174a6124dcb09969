"""Checkpoints that are whole or not there: safetensors files, a part of the tensors from each process, and a manifest.

A folder is written as step-N.tmp, synced, then renamed to step-N; `latest` is a link that is replaced in one step. What
has been published is never written to again. Before anything of it is used, every byte is checked against the manifest.
There is no pickle; torch.distributed.checkpoint has one, which runs code when it is read, and sees no flipped bit.

With several processes `save`, `load` and `load_newest` are collective calls. All must see the same folder.
"""

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as bytes_from_tensors
from torch import Tensor

from fusedce import checks
from fusedce.train import ranks
from fusedce.train.manifest import (
    DTYPES,
    NAME,
    Box,
    CheckpointError,
    Entry,
    Manifest,
    UnreadableHereError,
    read,
    read_file,
)

__all__ = [
    "CheckpointError", "Manifest", "State", "UnreadableHereError", "load", "load_alone", "load_newest", "nothing_in",
    "published", "read", "save", "sync", "write_file",
]  # fmt: skip

State = dict[str, dict[str, Tensor]]  # kind ("model", "optimizer") -> tensor name -> tensor
Place = Callable[[str, str], Tensor | None]  # (kind, tensor name) -> a DTensor that lies as the loaded one shall


def save(run: Path, step: int, config: dict[str, Any], state: State, keep: int) -> Path:
    """Write and publish run/step-N, point `latest` at it, and only then delete all but the newest `keep`.

    state: DTensors of any mesh and sharding, of which each process writes its part, replicas once; and plain tensors,
    which must be the same on every rank and are written once.

    Raises, on every rank alike: OSError (disk full, read-only) with the earlier checkpoints intact, and the partial one
    gone once rank 0 has raised; ValueError for a tensor whose parts do not make it up, or that differs between ranks
    without being a DTensor.
    """
    final = run / f"step-{step:06d}"
    unfinished = final.with_suffix(".tmp")
    try:
        ranks.together(lambda: _begin(final, unfinished), only=0)
        tensors, mine = _shared_out(state)
        files: dict[str, tuple[int, str]] = {}
        for written in ranks.together(lambda: _write_parts(unfinished, mine)):
            files |= {name: (size, digest) for name, (size, digest) in written.items()}
        manifest = Manifest(step, config, ranks.size(), files, tensors)
        ranks.together(lambda: _publish(unfinished, final, manifest.text(), keep), only=0)
    except Exception:
        if ranks.rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return final


def load(folder: Path, place: Place = lambda kind, name: None, kinds: Collection[str] = ()) -> tuple[Manifest, State]:
    """Manifest and tensors of one checkpoint, written by any number of processes.

    place: for a DTensor, this rank's part of the loaded tensor, a DTensor of the same mesh and sharding; where it is
        None or of another shape, the whole tensor on the CPU. kinds: only these, such as ("model",); () for all.

    Raises CheckpointError on every rank if a byte that any of them needs is not as it was written.
    """
    manifests: list[Manifest] = []
    states: list[State] = []

    def look() -> str:
        manifests.append(read(folder))
        return hashlib.sha256(manifests[0].text()).hexdigest()

    _must_agree(folder, ranks.together(look))
    ranks.together(lambda: states.append(_fetch(folder, manifests[0], place, kinds)))
    return manifests[0], states[0]


def load_alone(folder: Path, kinds: Collection[str] = ()) -> tuple[Manifest, State]:
    """`load` of whole tensors by this process, whatever others do: no collective call."""
    manifest = read(folder)
    return manifest, _fetch(folder, manifest, lambda kind, name: None, kinds)


def load_newest(
    run: Path, say: Callable[[str], None], place: Place = lambda kind, name: None
) -> tuple[Manifest, State]:
    """The newest checkpoint of a run that is good. A damaged one is renamed to step-N.damaged, and `say` is told.

    `latest` is set to it: a kill may have come before it could move, or it names one that is damaged.
    """
    names = ranks.together(lambda: [p.name for p in published(run)])
    _must_agree(run, names)  # else what one of them lacks would look like damage
    for name in names[0]:
        folder = run / name
        try:
            found = load(folder, place)
            ranks.together(partial(_point_latest, folder), only=0)
            return found
        except UnreadableHereError:
            raise
        except CheckpointError as error:
            aside = folder.with_suffix(".damaged")
            ranks.together(partial(_put_aside, folder, aside), only=0)
            say(f"damaged checkpoint, taking the one before: {error}; kept as {aside.name}")
    raise nothing_in(run)


def _must_agree(folder: Path, seen: list[Any]) -> None:
    if any(each != seen[0] for each in seen):
        raise UnreadableHereError(f"{folder}: the processes see different checkpoints; they need one folder for all")


def nothing_in(run: Path) -> CheckpointError:
    """The error of a run to resume that has no checkpoint."""
    return CheckpointError(f"{run}: no checkpoint that can be read; start without --resume, or name another --out")


def published(run: Path) -> list[Path]:
    """The step-N folders of a run, newest first."""
    return sorted(
        (p for p in run.glob("step-*") if p.name[5:].isdecimal()), key=lambda p: int(p.name[5:]), reverse=True
    )


def _put_aside(folder: Path, aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def _begin(final: Path, unfinished: Path) -> None:
    if final.exists():
        raise RuntimeError(f"{final} is published already; a checkpoint is never overwritten")
    for left in final.parent.glob("step-*.tmp"):  # by a kill
        shutil.rmtree(left, ignore_errors=True)
    unfinished.mkdir(parents=True)


def _shared_out(state: State) -> tuple[dict[str, dict[str, Entry]], dict[str, dict[str, Tensor]]]:
    """Which part of which tensor is in whose file, and this rank's files: name -> tensor name -> part."""
    parts = {(kind, name): _local(tensor) for kind, tensors in state.items() for name, tensor in tensors.items()}
    several, files = ranks.size() > 1, dict[str, dict[str, Tensor]]()
    entries: dict[str, dict[str, Entry]] = {kind: {} for kind in state}
    digests: dict[tuple[str, str], str] = {}
    for rank, heard in enumerate(ranks.gather([_header(*at, state, box) for at, (_, box) in parts.items()])):
        for kind, name, shape, dtype, start, part, digest in heard:
            file = f"{kind}-{rank:05d}-of-{ranks.size():05d}.safetensors" if several else f"{kind}.safetensors"
            entry = entries.setdefault(kind, {}).setdefault(name, Entry(tuple(shape), dtype, {}))
            if digests.setdefault((kind, name), digest) != digest or entry.shape != tuple(shape):
                raise ValueError(f"{kind}: {name} differs on rank {rank}; a part of a tensor has to be a DTensor")
            box = Box(tuple(start), tuple(part))
            if box in entry.parts.values() or (math.prod(part) == 0 and (math.prod(shape) or entry.parts)):
                continue  # a replica, or nothing
            entry.parts[file] = box
            if rank == ranks.rank():
                files.setdefault(file, {})[name] = parts[kind, name][0]
    for kind, tensors in entries.items():
        for name, entry in tensors.items():
            if entry.missing():
                raise ValueError(f"{kind}: {name} {entry.shape} lacks {entry.missing()} elements on these ranks")
    return entries, files


def _header(kind: str, name: str, state: State, box: Box) -> tuple[Any, ...]:
    """What the other ranks are told of a tensor. Of a plain one also a digest: it must be the same everywhere."""
    tensor = state[kind][name]
    alone = ranks.size() == 1 or checks.is_distributed(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return kind, name, tuple(tensor.shape), dtype, box.start, box.shape, "" if alone else _digest(tensor)


def _local(tensor: Tensor) -> tuple[Tensor, Box]:
    """This rank's part, and which it is."""
    if not checks.is_distributed(tensor):
        return tensor.detach(), Box((0,) * tensor.dim(), tuple(tensor.shape))
    # Not at the top: a run of one process does without this import's time.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"a tensor placed {tensor.placements} is a sum that is still to be made")
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach(), Box(tuple(start), tuple(shape))


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(bytes_from_tensors({"": _on_cpu(tensor)})).hexdigest()


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _write_parts(unfinished: Path, files: dict[str, dict[str, Tensor]]) -> dict[str, tuple[int, str]]:
    """Write this rank's files: their sizes and SHA-256, of what was to be written."""
    written = {}
    for name, tensors in files.items():
        data = bytes_from_tensors({key: _on_cpu(tensor) for key, tensor in tensors.items()})
        written[name] = (len(data), hashlib.sha256(data).hexdigest())
        write_file(unfinished / name, data)
    if files:
        sync(unfinished)
    return written


def _publish(unfinished: Path, final: Path, manifest: bytes, keep: int) -> None:
    write_file(unfinished / NAME, manifest)
    sync(unfinished)
    unfinished.rename(final)
    sync(final.parent)
    _point_latest(final)
    for old in published(final.parent)[keep:]:
        # In one step out of the way: a kill in the midst of it leaves no half of a published one.
        shutil.rmtree(old.rename(old.with_suffix(".tmp")))


def _point_latest(folder: Path) -> None:
    latest, link = folder.with_name("latest"), folder.with_name("latest.tmp")
    if latest.is_symlink() and os.readlink(latest) == folder.name:
        return
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(latest)
    sync(folder.parent)


def _fetch(folder: Path, manifest: Manifest, place: Place, kinds: Collection[str]) -> State:
    """This rank's tensors, out of the files that hold a part of them, each read once and checked as it is read."""
    kept = {kind: entries for kind, entries in manifest.tensors.items() if not kinds or kind in kinds}
    likes = {(kind, name): place(kind, name) for kind, entries in kept.items() for name in entries}
    targets: dict[tuple[str, str], tuple[Tensor, Box]] = {}
    for (kind, name), like in likes.items():
        entry = kept[kind][name]
        whole = Box((0,) * len(entry.shape), entry.shape)
        box = _local(like)[1] if like is not None and _fits(like, entry) else whole
        targets[kind, name] = torch.empty(box.shape, dtype=DTYPES[entry.dtype]), box
    for file in manifest.files:
        wanted = {}
        for (kind, name), (_, box) in targets.items():
            held = kept[kind][name].parts.get(file)
            common = held.overlap(box) if held else None
            if held and common:
                wanted[kind, name] = held, common
        tensors = _read_tensors(folder, manifest, file) if wanted else {}
        for (kind, name), (held, common) in wanted.items():
            into, box = targets[kind, name]
            found = tensors.get(name)
            if found is None or found.dtype != into.dtype or found.shape != held.shape:
                raise CheckpointError(f"{folder / file}: {name} is not what the manifest says")
            into[common.inside(box)] = found[common.inside(held)]
    state: State = {kind: {} for kind in kept}
    for (kind, name), like in likes.items():
        part = targets[kind, name][0]
        state[kind][name] = _placed(part, like) if _fits(like, kept[kind][name]) else part
    return state


def _fits(like: Tensor | None, entry: Entry) -> bool:
    return like is not None and checks.is_distributed(like) and tuple(like.shape) == entry.shape


def _placed(part: Tensor, like: Tensor | None) -> Tensor:
    """A DTensor of `like`'s mesh and sharding with this part on this rank."""
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    part = part.to(like.to_local().device)
    strides = torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=strides
    )


def _read_tensors(folder: Path, manifest: Manifest, file: str) -> dict[str, Tensor]:
    size, digest = manifest.files[file]
    data = read_file(folder / file, size)
    if hashlib.sha256(data).hexdigest() != digest:
        raise CheckpointError(f"{folder / file}: SHA-256 differs from the manifest")
    try:
        return tensors_from_bytes(data)
    except SafetensorError as error:
        raise CheckpointError(f"{folder / file}: no safetensors file ({error})") from error


def write_file(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    path.write_bytes(data)
    sync(path)


def sync(path: Path) -> None:
    """Wait until the file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
