"""The only reader of os.environ at run time. Five variables, all optional, and what a launcher sets; setup.py reads
FUSEDCE_BUILD_EXT itself.
"""

import os
from pathlib import Path

BACKENDS = ("auto", "eager", "triton", "native")
DEFAULT_WORKSPACE = 768 << 20


def default_backend() -> str:
    """FUSEDCE_BACKEND: what backend="auto" means, "auto" (choose by machine) if unset."""
    name = os.environ.get("FUSEDCE_BACKEND", "auto")
    if name not in BACKENDS:
        raise ValueError(f"FUSEDCE_BACKEND is {name!r}; expected one of {', '.join(BACKENDS)}")
    return name


def workspace_bytes(weight_bytes: int = 0) -> int:
    """FUSEDCE_WORKSPACE_MB: how large one chunk's tokens × vocab buffer may be.

    Default 768 MiB, or `weight_bytes` where that is more: beside a large weight, whose gradient takes as much again, a
    buffer of its size is no burden, and a smaller one reads and writes that gradient more often.
    """
    text = os.environ.get("FUSEDCE_WORKSPACE_MB")
    if text is None:
        return max(DEFAULT_WORKSPACE, weight_bytes)
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"FUSEDCE_WORKSPACE_MB is {text!r}; expected a positive whole number of MiB")
    return int(text) << 20


def triton_interpreted() -> bool:
    """TRITON_INTERPRET=1: Triton kernels run on CPU tensors, in Python; for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def one_device_queue() -> bool:
    """CUDA_DEVICE_MAX_CONNECTIONS=1, CUDA's own variable: all streams of the process share one queue to the GPU."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def use_tuned_tiles() -> bool:
    """FUSEDCE_TUNED=0: the tiles that `fusedce tune` kept are not looked at."""
    return os.environ.get("FUSEDCE_TUNED", "1") != "0"


def cache_folder() -> Path:
    """This user's caches of ours: $XDG_CACHE_HOME/fusedce, or ~/.cache/fusedce where that is unset or relative."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "fusedce"


def setting(name: str) -> str | None:
    """A variable as it is, also one of the libraries beneath: for `fusedce doctor` to show, never to decide by."""
    return os.environ.get(name)


def launched() -> tuple[int, int, int, int]:
    """(rank, ranks, rank in the node, ranks of the node): torchrun's RANK and its like; (0, 1, 0, 1) without it."""
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    return rank, world, int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world))
