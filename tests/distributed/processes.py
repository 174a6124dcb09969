"""Several processes on this machine, joined by gloo or, a GPU each, by NCCL or RCCL, run one function of a module."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def run(module: str, function: str, num_ranks: int, device: str = "cpu") -> None:
    """Call module.function(device) on every rank; fails with the output of the ranks that fail."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    code = (
        f"import os, {module} as module; from tests.distributed.processes import dist, join\n"
        # Without the interpreter's own end, where a thread of gloo's that still runs ends the process by an abort.
        f"join({device!r}); module.{function}({device!r}); dist.destroy_process_group(); os._exit(0)"
    )
    environment = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    environment |= {"WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**environment, "RANK": str(rank)},
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(num_ranks)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in ranks]
    ended = zip(range(num_ranks), ranks, outputs, strict=True)
    failed = [f"rank {rank}:\n{output[-3000:]}" for rank, process, output in ended if process.returncode]
    assert not failed, "\n".join(failed)


def join(device: str) -> None:
    """Make this process a rank of the group, with a GPU of its own if the device is "cuda". Fresh memory is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
