"""One trainer a folder: a lock that the kernel holds for the process, and lets go of however the process ends."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from fusedce.train import ranks
from fusedce.train.config import ConfigError

NAME = "lock"


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Make the folder, and hold it while entered. ConfigError, on every rank, if another trainer has it.

    A collective call; rank 0 holds it. The file stays behind, empty of meaning. On a network file system the lock is
    as good as that system's flock.
    """
    taken: list[TextIO] = []
    ranks.together(lambda: taken.append(_take(run)), only=0)
    try:
        yield
    finally:
        for file in taken:
            file.close()


def _take(run: Path) -> TextIO:
    run.mkdir(parents=True, exist_ok=True)
    # Not cut short on opening: another's words may stand there. Closed by `held`.
    file = open(run / NAME, "a+")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(200).strip() or "another process"
        file.close()
        raise ConfigError(f"out: {run} is in use by {holder}; wait for it to end, or name another --out") from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
