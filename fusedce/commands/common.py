"""What the commands share: parsing, devices, JSON, and errors as one line on stderr with exit code 2."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fusedce.doctor.facts import default_device

Config = TypeVar("Config")
STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "not run": "dim"}


class UsageError(ValueError):
    """Arguments that make no sense: one line, exit code 2."""


def command(
    name: str, config: type[Config], about: str, run: Callable[[Config], int]
) -> Callable[[Sequence[str]], int]:
    """`fusedce NAME`: parse `config` from the arguments and run it. Exit code 2 for what cannot be asked for, with one
    line; 1 and 0 are the command's own."""

    def main(arguments: Sequence[str]) -> int:
        parsed = tyro.cli(config, args=list(arguments), prog=f"fusedce {name}", description=about)
        try:
            return run(parsed)
        except UsageError as error:
            print(f"fusedce {name}: {error}", file=sys.stderr)
        except OSError as error:
            print(f"fusedce {name}: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return 2

    return main


def device_named(text: str) -> torch.device:
    """The device of that name, the current GPU or else the CPU for "". UsageError for one that torch cannot use."""
    if not text:
        return default_device()
    try:
        device = torch.device(text)
    except RuntimeError:
        raise UsageError(f"device is {text!r}; expected cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device is {text!r}; expected cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UsageError(f"device is {text!r}, and torch sees {count} GPUs")
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # kernels go to the current GPU
    return device


def one_of(name: str, value: str, known: Sequence[str]) -> tuple[str, ...]:
    """A comma-separated option as a tuple, () for "". UsageError for a name that is not known."""
    names = tuple(part.strip() for part in value.split(",") if part.strip())
    for part in names:
        if part not in known:
            raise UsageError(f"{name} is {part!r}; expected one of {', '.join(known)}")
    return names


def print_json(found: Any) -> None:
    """One object, for programs, on stdout and nothing else."""
    print(json.dumps(found))


def write_json(path: Path, found: Any) -> None:
    """A file that is there whole or not at all. OSError where it cannot be written."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
            file.write("\n")
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextmanager
def progress(title: str, total: int | None, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar on stderr while the block runs, where that is a terminal; gives what moves it on, with a word."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda word: bar.update(task, advance=1, description=f"{title} {word}")
