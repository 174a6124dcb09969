"""Several processes on this machine, joined by gloo, each running one function of a test module."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def run(module: str, function: str, num_ranks: int, *arguments: str) -> None:
    """Call module.function(*arguments) on every rank; fails with the output of the ranks that fail."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    code = (
        f"from tests.distributed.processes import join; join(); from {module} import {function} as f; f(*{arguments!r})"
    )
    ranks = []
    for rank in range(num_ranks):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", code], env=environment, cwd=ROOT, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    outputs = [process.communicate(timeout=300)[0] for process in ranks]
    ended = zip(range(num_ranks), ranks, outputs, strict=True)
    failed = [f"rank {rank}:\n{output[-3000:]}" for rank, process, output in ended if process.returncode]
    assert not failed, "\n".join(failed)


def join() -> None:
    """Make this process a rank of the group."""
    dist.init_process_group("gloo")
