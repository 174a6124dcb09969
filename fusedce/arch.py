"""What the kernels need to know of a machine: one frozen row per architecture, from a name or from a device."""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Arch:
    """One GPU architecture.

    name: "sm_90", "gfx942", ... or "generic"; vendor: "nvidia", "amd" or "any"; wave_size: lanes that run in step;
    shared_bytes: shared memory (LDS) one workgroup may use; num_units: SMs or CUs of the usual card;
    num_chiplets: XCDs, each with an L2 of its own; matrix_bf16: the bf16 matrix instruction the tiles are made for.
    """

    name: str
    vendor: str
    wave_size: int
    shared_bytes: int
    num_units: int
    num_chiplets: int
    matrix_bf16: str
    max_threads: int = 1024


_KIB = 1024
ARCHS = {
    a.name: a
    for a in (
        Arch("sm_80", "nvidia", 32, 163 * _KIB, 108, 1, "mma.m16n8k16"),
        Arch("sm_90", "nvidia", 32, 227 * _KIB, 132, 1, "wgmma.m64n256k16"),
        Arch("sm_100", "nvidia", 32, 227 * _KIB, 148, 1, "tcgen05.mma"),
        Arch("gfx942", "amd", 64, 64 * _KIB, 304, 8, "mfma_16x16x16"),
        Arch("gfx950", "amd", 64, 160 * _KIB, 256, 8, "mfma_16x16x32"),
        # The floor for anything else: tiles that fit here fit everywhere.
        Arch("generic", "any", 32, 64 * _KIB, 64, 1, "none"),
    )
}


def by_name(name: str) -> Arch:
    """The row for an architecture name. ValueError, with the known names, for any other."""
    if name not in ARCHS:
        raise ValueError(f"unknown architecture {name!r}; expected one of {', '.join(ARCHS)}")
    return ARCHS[name]


def nvidia_arch(major: int, minor: int) -> Arch:
    """The row for a CUDA compute capability: the newest table that the card can run, so 8.6 and 8.9 use sm_80's."""
    if major == 9:
        return ARCHS["sm_90"]
    if major == 10:
        return ARCHS["sm_100"]
    # Consumer 8.x and 12.x cards have 99 KiB of shared memory, less than sm_80's tiles may take.
    return ARCHS["sm_80"] if (major, minor) in ((8, 0), (8, 7)) else ARCHS["generic"]


def amd_arch(gcn_name: str) -> Arch:
    """The row for torch's `gcnArchName`, such as "gfx942:sramecc+:xnack-"."""
    return ARCHS.get(gcn_name.split(":")[0], ARCHS["generic"])


def of_device(device: "torch.device | str") -> Arch:
    """The row for a torch device, with the number of units that kernels may fill. A CPU gets "generic".

    ROCm answers get_device_capability() with (9, 4) on MI300X, which reads as Hopper: the vendor is asked first.
    """
    import torch

    device = torch.device(device)
    if device.type != "cuda":
        return _without(ARCHS["generic"], _kept_free.get())
    index = torch.cuda.current_device() if device.index is None else device.index
    return _without(_of_gpu(index), _kept_free.get())


_kept_free: ContextVar[int] = ContextVar("units kept free", default=0)


@contextlib.contextmanager
def keep_units_free(count: int) -> Iterator[None]:
    """Inside, and in this thread, kernels whose programs go from tile to tile fill `count` units less than there are.

    For what is to run beside them: the blocks of a collective would else wait until a program ends, and the last
    programs of the next kernel until the collective does.
    """
    token = _kept_free.set(count)
    try:
        yield
    finally:
        _kept_free.reset(token)


@functools.cache
def _without(row: Arch, count: int) -> Arch:
    return replace(row, num_units=max(row.num_units - count, 1)) if count else row


@functools.cache
def _of_gpu(index: int) -> Arch:
    """The row for a GPU by its number. Kept, because every launch asks."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    is_amd = torch.version.hip is not None
    row = amd_arch(properties.gcnArchName) if is_amd else nvidia_arch(properties.major, properties.minor)
    return replace(row, num_units=properties.multi_processor_count)
