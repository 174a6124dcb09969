"""HIP sources built for gfx942 and gfx950, loaded into this process, their launches executed by the emulator.

    hip = Hip(folder)
    library = ctypes.CDLL(str(hip.build(source, rocm_tree)))
    with hip.on("gfx942"):
        library.launch_something(…)

`launch_something` is the source's own host code; libamdhip64 is `fake_hip.cpp`. Pointers among a kernel's arguments,
also those inside structs, are found as addresses of living CPU tensors.
"""

import ctypes
import gc
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from tests import toolchain
from tests.gfx9emu import code_object, launch
from tests.gfx9emu.driver import Mirror, storage_bytes
from tests.gfx9emu.faults import FaultError
from tests.gfx9emu.machine import Machine
from tests.gfx9emu.memory import LDS, Memory

CHIPS = ("gfx942", "gfx950")
MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
ON_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p),
)


def code_of(bundle: int, chip: str) -> bytes:
    """The code object for `chip` in clang's bundle at an address of this process."""
    assert ctypes.string_at(bundle, len(MAGIC)) == MAGIC
    (count,) = struct.unpack("<Q", ctypes.string_at(bundle + 24, 8))
    at = bundle + 32
    for _ in range(count):
        offset, size, length = struct.unpack("<QQQ", ctypes.string_at(at, 24))
        if ctypes.string_at(at + 24, length).decode().endswith(chip):
            return ctypes.string_at(bundle + offset, size)
        at += 24 + length
    raise FaultError(f"no code object for {chip}")


def living_tensors() -> list[torch.Tensor]:
    """Every CPU tensor of this process that has memory."""
    found = (thing for thing in gc.get_objects() if type(thing) is torch.Tensor)
    return [t for t in found if t.device.type == "cpu" and t.layout == torch.strided and t.untyped_storage().nbytes()]


class Hip:
    """The fake runtime, and the emulated chip that launches go to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.chip, self.faults = folder, CHIPS[0], []
        self.kernels: dict[tuple[str, int, str], code_object.Kernel] = {}
        self.runtime = folder / "libamdhip64.so"
        source = Path(__file__).with_name("fake_hip.cpp")
        toolchain.output(
            [
                toolchain.require("g++"),
                "-std=c++17",
                "-O1",
                "-Wall",
                "-shared",
                "-fPIC",
                str(source),
                "-o",
                str(self.runtime),
            ]
        )
        self.callback = ON_LAUNCH(self._on_launch)
        ctypes.CDLL(str(self.runtime), mode=ctypes.RTLD_GLOBAL)

    def build(self, source: Path, rocm_tree: Path, *flags: str, chips: tuple[str, ...] = CHIPS) -> Path:
        """A shared library of one HIP source."""
        to = self.folder / f"{source.stem}-{len(list(self.folder.iterdir()))}.so"
        toolchain.output(
            [
                toolchain.llvm_tool("clang++"),
                "-std=c++17",
                "-O3",
                "-x",
                "hip",
                *(f"--offload-arch={chip}" for chip in chips),
                *toolchain.hip_flags(rocm_tree),
                "-gline-tables-only",
                "-fPIC",
                *flags,
                "-c",
                str(source),
                "-o",
                f"{to}.o",
            ]
        )
        toolchain.output(
            [
                toolchain.require("g++"),
                "-shared",
                f"{to}.o",
                str(self.runtime),
                "-Wl,-rpath," + str(self.folder),
                "-o",
                str(to),
            ]
        )
        return to

    @contextmanager
    def on(self, chip: str) -> Iterator[None]:
        """Launches inside go to `chip`; a fault in one of them is raised here."""
        self.chip = chip
        self.faults.clear()
        # Of several runtimes in one process the first serves all libraries; it is asked to serve this one now.
        ctypes.CDLL(None).fake_hip_on_launch(self.callback)
        try:
            yield
        except AssertionError:
            # What the host code made of the fault says less than the fault.
            if not self.faults:
                raise
        if self.faults:
            raise self.faults[0]

    def _on_launch(self, name, bundle, grid, block, shared, arguments) -> int:  # type: ignore[no-untyped-def]
        try:
            kernel = self._kernel(name.decode(), bundle)
            raw = bytearray(kernel.kernarg)
            explicit = [place for place in kernel.arguments if not place[2].startswith("hidden")]
            for number, (offset, size, _) in enumerate(explicit):
                raw[offset : offset + size] = ctypes.string_at(arguments[number], size)
            mirror = _relocated(raw)
            shape = launch.Shape(tuple(grid[:3]), tuple(block[:3]), shared)
            launch.launch(kernel, mirror.memory, shape, bytes(raw))
            mirror.copy_back()
        except Exception as fault:  # must not cross C++
            self.faults.append(fault)
            return 1
        return 0

    def _kernel(self, name: str, bundle: int) -> code_object.Kernel:
        key = name, bundle, self.chip
        if key not in self.kernels:
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".hsaco", delete=False) as file:
                file.write(code_of(bundle, self.chip))
            machine = Machine(Memory(0), LDS(0, 1))
            self.kernels[key] = code_object.load(Path(file.name), name, self.chip, machine)
        return self.kernels[key]


def _relocated(raw: bytearray) -> Mirror:
    """Replaces every 8-byte word of `raw` that is an address inside a tensor's storage by where the mirror has it."""
    storages = {}
    for tensor in living_tensors():
        address, data = storage_bytes(tensor)
        storages[address] = (len(data), tensor)
    starts = np.array(sorted(storages), np.uint64)
    hits = []
    for at in range(0, len(raw) - 7, 8):
        (word,) = struct.unpack_from("<Q", raw, at)
        number = int(np.searchsorted(starts, word, side="right")) - 1
        if number >= 0:
            start = int(starts[number])
            if word - start <= storages[start][0]:
                hits.append((at, word - start, storages[start][1]))
    mirror = Mirror([tensor for _, _, tensor in hits])
    for at, offset, tensor in hits:
        struct.pack_into("<Q", raw, at, mirror.at[tensor.untyped_storage().data_ptr()] + offset)
    return mirror
