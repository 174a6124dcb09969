"""A Triton driver for an AMD GPU that is not there.

    with emulated("gfx942"):
        kernel[grid](cpu_tensor, …, num_warps=8)

compiles as for that GPU, with Triton's real JIT and AMD's code generator, refuses what the GPU would refuse (LDS,
threads), and executes the machine code on the CPU tensors' memory. Autotuning works, with the number of instructions in
the place of time.
"""

import atexit
import ctypes
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from fusedce.arch import ARCHS
from tests.gfx9emu import code_object, launch
from tests.gfx9emu.faults import FaultError
from tests.gfx9emu.machine import Machine
from tests.gfx9emu.memory import LDS, Memory

# Triton's names of scalar arguments -> struct's
FORMS = {
    "i1": "b",
    "u1": "B",
    "i8": "b",
    "u8": "B",
    "i16": "h",
    "u16": "H",
    "i32": "i",
    "u32": "I",
    "i64": "q",
    "u64": "Q",
    "fp32": "f",
    "f32": "f",
    "fp64": "d",
}


def storage_bytes(tensor: torch.Tensor) -> tuple[int, np.ndarray]:
    """The address and the bytes of a CPU tensor's storage, shared."""
    storage = tensor.untyped_storage()
    size, address = storage.nbytes(), storage.data_ptr()
    if not size:
        return address, np.zeros(0, np.uint8)
    return address, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class Mirror:
    """The storages of some tensors in emulated memory: copied in, and back after the launch."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.storages = dict(map(storage_bytes, tensors))
        sizes = [len(data) for data in self.storages.values()]
        self.memory = Memory.for_buffers(*sizes, 4096)
        self.at = {
            address: self.memory.allocate(len(data), f"storage {number}", data)
            for number, (address, data) in enumerate(self.storages.items())
        }

    def address(self, tensor: torch.Tensor) -> int:
        """Where a tensor's first element is for the kernel."""
        start = tensor.untyped_storage().data_ptr()
        return self.at[start] + tensor.data_ptr() - start

    def copy_back(self) -> None:
        """What the kernel wrote."""
        for address, data in self.storages.items():
            data[:] = self.memory.contents(self.at[address], len(data))


class Utils:
    """What Triton asks of a driver about the device and its binaries."""

    def __init__(self, chip: str, folder: Path) -> None:
        self.chip, self.folder = chip, folder

    def get_device_properties(self, device: int) -> dict[str, Any]:
        arch = ARCHS[self.chip]
        return {
            "multiprocessor_count": arch.num_units,
            "max_shared_mem": launch.LDS_BYTES[self.chip],
            "arch": self.chip,
            "warpSize": 64,
            "max_num_regs": 65536,
            "sm_clock_rate": 2_100_000,
            "mem_clock_rate": 2_600_000,
            "mem_bus_width": 8192,
            "cooperativeLaunch": 1,
        }

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".hsaco", delete=False) as file:
            file.write(binary)
        machine = Machine(Memory(0), LDS(0, 1))
        kernel = code_object.load(Path(file.name), name, self.chip, machine)
        # module, function, registers, spills, threads
        return None, (kernel, shared), kernel.num_v + kernel.num_a, 0, launch.MOST_THREADS


class Launcher:
    """Called by Triton for each launch of one compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.kinds, self.num_warps = list(source.signature.values()), metadata.num_warps

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        kernel, shared = function
        arguments = rest[4:]  # behind two forms of metadata and two hooks
        given = [(a, kind) for a, kind in zip(arguments, self.kinds, strict=True) if kind != "constexpr"]
        mirror = Mirror([a for a, kind in given if kind.startswith("*") and a is not None])
        shape = launch.Shape((x, y, z), (64 * self.num_warps, 1, 1), shared)
        before = launch.STATS.instructions
        launch.launch(kernel, mirror.memory, shape, _packed(given, mirror))
        launch.STATS.by_kernel[kernel.name] += launch.STATS.instructions - before
        mirror.copy_back()


def _packed(given: list[tuple[Any, str]], mirror: Mirror) -> bytes:
    raw = b""
    for argument, kind in given:
        if kind.startswith("*"):
            form, value = "Q", 0 if argument is None else mirror.address(argument)
        elif kind in FORMS:
            form, value = FORMS[kind], argument
        else:
            raise FaultError(f"an argument of type {kind}")
        raw += b"\0" * (-len(raw) % struct.calcsize(form)) + struct.pack(f"<{form}", value)
    return raw


class Driver(DriverBase):
    """The active driver inside `emulated`."""

    def __init__(self, chip: str, folder: Path) -> None:
        self.chip, self.utils, self.launcher_cls = chip, Utils(chip, folder), Launcher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device.
        return int(self.chip.removeprefix("gfx"))

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return 9, 4

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self.chip, 64)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_benchmarker(self) -> Any:
        def measure(function: Any, quantiles: Any = None, **_: Any) -> Any:
            before = launch.STATS.instructions
            function()
            cost = float(launch.STATS.instructions - before)
            return [cost] * len(quantiles) if quantiles else cost

        return measure

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1)

    def clear_cache(self, cache: torch.Tensor) -> None:
        pass


@cache
def driver(chip: str) -> Driver:
    """The one driver for a chip: compiled kernels, which Triton keeps, hold on to its code objects."""
    folder = tempfile.mkdtemp(prefix="gfx9emu-")
    atexit.register(shutil.rmtree, folder)
    return Driver(chip, Path(folder))


@contextmanager
def emulated(chip: str) -> Iterator[launch.Stats]:
    """Inside, launches of Triton kernels run on an emulated `chip`, "gfx942" or "gfx950"."""
    drivers = triton.runtime.driver
    before = drivers._active
    drivers.set_active(driver(chip))
    try:
        yield launch.STATS
    finally:
        drivers.set_active(before)
