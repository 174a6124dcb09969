"""Processes that may be killed: a server that has imported torch once forks the ranks of each launch, in a second.

A forked rank is as good as a started one for all that a fault can do to it, and thirty launches cost what one did.
"""

import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.house.source import ROOT

PATIENCE = 60.0  # seconds until a launch that hangs is ended
LAZY = ("torch._dynamo.convert_frame", "torch._inductor.utils")  # which FSDP imports when it is first used
GRACE = 10.0  # seconds for the others once a rank has ended badly


@dataclass(frozen=True)
class Rank:
    """How one rank ended: the status of `subprocess`, what its function returned, and what it wrote to stderr."""

    status: int
    value: Any
    error: str


class Server:
    """`launch` runs module.function(*arguments) on every rank of a gloo group of its own."""

    def __init__(self, *modules: str) -> None:
        code = f"import sys; from tests.train.forks import serve; serve({modules!r})"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip

    def launch(self, function: str, *arguments: Any, num_ranks: int = 1, grace: float = GRACE) -> list[Rank]:
        """The ranks' ends. Once one has ended badly the others get a few seconds, then SIGKILL, as by torchrun."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps([function, arguments, num_ranks, grace]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the server has died"
        return [Rank(*rank) for rank in json.loads(answer)]

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(30)


def serve(modules: tuple[str, ...]) -> None:
    """Answer launches until stdin ends. What the ranks print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in (*modules, *LAZY):
        importlib.import_module(module)
    for line in sys.stdin:
        function, arguments, num_ranks, grace = json.loads(line)
        answers.write(json.dumps(_launch(function, arguments, num_ranks, grace)) + "\n")
        answers.flush()


def _launch(function: str, arguments: list[Any], num_ranks: int, grace: float) -> list[tuple[int, Any, str]]:
    with tempfile.TemporaryDirectory() as name:
        folder, pids = Path(name), []
        for rank in range(num_ranks):
            pids.append(os.fork())
            if pids[-1] == 0:
                _rank(folder, rank, num_ranks, function, arguments)
        statuses = _wait(pids, grace)
        return [(statuses[pid], *_said(folder, rank)) for rank, pid in enumerate(pids)]


def _rank(folder: Path, rank: int, num_ranks: int, function: str, arguments: list[Any]) -> None:
    """Run the function in this forked process, and end it without the teardown of the interpreter."""
    os.dup2(os.open(folder / f"{rank}.err", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    # Not the names that a launcher uses: what runs here may be a trainer of its own.
    os.environ |= {"FORK_RANK": str(rank), "FORKS": str(num_ranks), "MEETING_PLACE": str(folder / "store")}
    module, name = function.split(":")
    status = 1
    try:
        value = getattr(importlib.import_module(module), name)(*arguments)
        (folder / f"{rank}.json").write_text(json.dumps(value))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def join(timeout: float = PATIENCE) -> None:
    """Make this rank one of its launch's group, if it is not the only one. Fresh memory is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)
    if os.environ["FORKS"] == "1":
        return
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['MEETING_PLACE']}", rank=int(os.environ["FORK_RANK"]),
        world_size=int(os.environ["FORKS"]), timeout=datetime.timedelta(seconds=timeout),
    )  # fmt: skip


def _wait(pids: list[int], grace: float) -> dict[int, int]:
    """The status of each; negative for a signal."""
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE
    while len(statuses) < len(pids):
        for pid in pids:
            if pid in statuses:
                continue
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                if statuses[pid]:
                    deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.002)
    return statuses


def _said(folder: Path, rank: int) -> tuple[Any, str]:
    value, error = folder / f"{rank}.json", folder / f"{rank}.err"
    return json.loads(value.read_text()) if value.exists() else None, error.read_text() if error.exists() else ""
