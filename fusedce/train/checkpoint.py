"""Checkpoints that are whole or not there: safetensors files and a manifest with their sizes and SHA-256. No pickle.

A folder is written as step-N.tmp, synced, then renamed to step-N; `latest` is a link that is replaced in one step. What
has been published is never written to again. Before anything of it is used, every byte is checked against the manifest.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as bytes_from_tensors
from torch import Tensor

FORMAT = 1
State = dict[str, dict[str, Tensor]]  # file name without suffix -> tensor name -> tensor


class CheckpointError(ValueError):
    """A checkpoint that is not what its manifest says; the message names the file."""


def save(run: Path, step: int, config: dict[str, Any], state: State, keep: int) -> Path:
    """Write and publish run/step-N, point `latest` at it, and only then delete all but the newest `keep`.

    Raises OSError (disk full, read-only) with the earlier checkpoints intact and the partial one gone.
    """
    final = run / f"step-{step:06d}"
    if final.exists():
        raise RuntimeError(f"{final} is published already; a checkpoint is never overwritten")
    partial = final.with_suffix(".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        listed = {}
        for name, tensors in state.items():
            data = bytes_from_tensors({k: t.detach().cpu().contiguous() for k, t in tensors.items()})
            listed[f"{name}.safetensors"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            _write(partial / f"{name}.safetensors", data)
        body = {"format": FORMAT, "step": step, "config": config, "files": listed}
        _write(partial / "manifest.json", json.dumps({"sha256": _seal(body), **body}, indent=1).encode())
        _sync(partial)
        partial.rename(final)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync(run)
    link = run / "latest.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(run / "latest")
    _sync(run)
    for old in published(run)[keep:]:
        shutil.rmtree(old)
    return final


def load(folder: Path) -> tuple[dict[str, Any], State]:
    """Manifest and tensors (on the CPU) of one checkpoint; CheckpointError if a byte is not as it was written."""
    manifest = read_manifest(folder)
    state = {}
    for name, expected in manifest["files"].items():
        data = _read(folder / name)
        if len(data) != expected["size"] or hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise CheckpointError(f"{folder / name}: size or SHA-256 differs from the manifest")
        state[Path(name).stem] = tensors_from_bytes(data)
    return manifest, state


def load_newest(run: Path, say: Callable[[str], None]) -> tuple[dict[str, Any], State]:
    """The newest checkpoint of a run that is good. A damaged one is renamed to step-N.damaged, and `say` is told."""
    for folder in published(run):
        try:
            return load(folder)
        except CheckpointError as error:
            aside = folder.with_suffix(".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            say(f"damaged checkpoint, taking the one before: {error}; kept as {aside.name}")
    raise CheckpointError(f"{run}: no checkpoint that can be read; start without --resume, or name another --out")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of one checkpoint, checked against its own hash."""
    path = folder / "manifest.json"
    data = _read(path)
    try:
        manifest = json.loads(data)
        good = manifest.pop("sha256") == _seal(manifest)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: not a manifest ({type(error).__name__})") from error
    if not good:
        raise CheckpointError(f"{path}: SHA-256 differs from what was written")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {manifest['format']}; this version reads {FORMAT}")
    return manifest


def published(run: Path) -> list[Path]:
    """The step-N folders of a run, newest first."""
    return sorted(
        (p for p in run.glob("step-*") if p.name[5:].isdecimal()), key=lambda p: int(p.name[5:]), reverse=True
    )


def _seal(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    _sync(path)


def _sync(path: Path) -> None:
    """Wait until the file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
