"""What a disk or a kill does to a checkpoint in the writing: after so many operations or bytes, SIGKILL or an error."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusedce.train import checkpoint

# In the order in which save comes by them: mkdir, written bytes, fsync, rename, link, replace, deletion.
OPERATIONS = [
    (Path, "mkdir"),
    (os, "fsync"),
    (Path, "rename"),
    (Path, "symlink_to"),
    (Path, "replace"),
    (shutil, "rmtree"),
]


def arm(operations: int, num_bytes: int, action: str) -> None:
    """From now on `action` ("kill" or "full") comes before operation number `operations` (from 0), or in the midst of a
    file, after `num_bytes` bytes of all. -1 for never."""
    left = {"operations": operations, "bytes": num_bytes}

    def strike(path: Any) -> None:
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            left["operations"] -= 1
            if left["operations"] == -1:
                strike(arguments[0])
            return real(*arguments, **options)

        return run

    for owner, name in OPERATIONS:
        setattr(owner, name, guarded(getattr(owner, name)))

    def write(path: Path, data: bytes) -> None:
        if 0 <= left["bytes"] < len(data):
            path.write_bytes(data[: left["bytes"]])
            strike(path)
        left["bytes"] -= len(data) if left["bytes"] >= 0 else 0
        path.write_bytes(data)
        checkpoint.sync(path)

    checkpoint.write_file = write
