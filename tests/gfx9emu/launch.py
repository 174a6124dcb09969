"""A launch: workgroups, a batch at a time, as fronts that run, part, meet, and wait at barriers."""

import struct
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tests.gfx9emu.code_object import Kernel, source_line
from tests.gfx9emu.decode import branch_target
from tests.gfx9emu.faults import FaultError
from tests.gfx9emu.front import LANES, Front
from tests.gfx9emu.memory import LDS, Memory
from tests.gfx9emu.scalar import CONDITIONS

LDS_BYTES = {"gfx942": 65536, "gfx950": 163840}
MOST_THREADS = 1024
# Waves side by side: more of them make a NumPy call longer, but hardly cheaper for each.
WAVES = 64
MOST_INSTRUCTIONS = 50_000_000
Three = tuple[int, int, int]


@dataclass
class Stats:
    """What launches have cost. instructions: of waves; steps: calls that executed them, many waves at a time."""

    launches: int = 0
    instructions: int = 0
    steps: int = 0
    seconds: float = 0.0
    by_kernel: Counter = field(default_factory=Counter)


STATS = Stats()


@dataclass(frozen=True)
class Shape:
    """How a kernel is launched. grid: workgroups; block: threads of each; shared: bytes of LDS beside its own."""

    grid: Three
    block: Three
    shared: int = 0

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def waves(self) -> int:
        """Waves of a workgroup."""
        return -(-self.threads // LANES)


def launch(kernel: Kernel, memory: Memory, shape: Shape, arguments: bytes) -> None:
    """Execute every workgroup. `memory` holds the buffers that `arguments` (the explicit ones) point to.

    FaultError for whatever a GPU would refuse, and for whatever it would not notice.
    """
    start = time.perf_counter()
    size = kernel.lds + shape.shared
    if size > LDS_BYTES[kernel.chip]:
        raise FaultError(f"{kernel.name}: {size} bytes of LDS, {kernel.chip} has {LDS_BYTES[kernel.chip]}")
    if shape.threads > min(MOST_THREADS, kernel.most_threads):
        raise FaultError(f"{kernel.name}: {shape.threads} threads of at most {min(MOST_THREADS, kernel.most_threads)}")
    kernarg = np.frombuffer(_with_hidden(kernel, shape, arguments), np.uint8)
    address = memory.allocate(len(kernarg), "arguments", kernarg)
    kernel.machine.memory = memory
    memory.conflicts.forget()
    count = shape.grid[0] * shape.grid[1] * shape.grid[2]
    together = max(WAVES // shape.waves, 1)
    for first in range(0, count, together):
        groups = np.arange(first, min(first + together, count))
        kernel.machine.lds, kernel.machine.first_group = LDS(size, len(groups)), first
        with np.errstate(all="ignore"):
            Batch(kernel, shape, groups, address).run()
    STATS.launches += 1
    STATS.seconds += time.perf_counter() - start


def _with_hidden(kernel: Kernel, shape: Shape, arguments: bytes) -> bytes:
    raw = bytearray(arguments.ljust(kernel.kernarg, b"\0"))
    for axis, name in enumerate("xyz"):
        values = {f"hidden_block_count_{name}": shape.grid[axis], f"hidden_group_size_{name}": shape.block[axis]}
        for offset, size, kind in kernel.arguments:
            if kind in values:
                raw[offset : offset + size] = values[kind].to_bytes(size, "little")
    # The hardware loads whole lines: a wide load may reach past the last argument.
    return bytes(raw) + bytes(64)


class Batch:
    """Some workgroups of a launch, until all their waves have ended."""

    def __init__(self, kernel: Kernel, shape: Shape, groups: np.ndarray, arguments: int) -> None:
        self.kernel, self.shape, self.groups = kernel, shape, groups
        self.ready, self.waiting, self.ended = [self._fresh(arguments)], [], np.zeros(len(groups), int)
        self.executed = 0

    def _fresh(self, arguments: int) -> Front:
        kernel, shape = self.kernel, self.shape
        group = np.repeat(self.groups, shape.waves)
        wave = np.tile(np.arange(shape.waves), len(self.groups))
        front = Front.fresh(group - self.groups[0], wave, kernel.num_v, kernel.num_a, kernel.private)
        thread = wave[:, None] * LANES + np.arange(LANES)
        x, y = shape.block[:2]
        front.v[0][...] = thread % x | thread // x % y << 10 | thread // (x * y) << 20
        front.s64[63][...] = front.bits(thread < shape.threads)
        front.exec_changed()
        at = kernel.kernarg_scalar
        front.s[at][...], front.s[at + 1][...] = arguments & 0xFFFFFFFF, arguments >> 32
        width, height = shape.grid[:2]
        numbers = (group % width, group // width % height, group // (width * height))
        at = kernel.user_scalars
        for asked, number in zip(kernel.group_numbers, numbers, strict=True):
            if asked:
                front.s[at][...] = number
                at += 1
        front.at = kernel.first
        return front

    def run(self) -> None:
        """Until the end. The front that is furthest behind goes first, so that those before it are met."""
        while self.ready or self.waiting:
            if not self.ready:
                self._pass_barrier()
            lowest = min(front.at for front in self.ready)
            here = [front for front in self.ready if front.at == lowest]
            self.ready = [front for front in self.ready if front.at != lowest]
            self._execute(Front.joined(here))

    def _execute(self, front: Front) -> None:
        block = self.kernel.blocks[front.at]
        steps, number = block.steps, 0
        try:
            for number, step in enumerate(steps):  # noqa: B007
                step(front)
        except Exception as error:
            raise self._located(error, front, block.instructions[number].at, block.instructions[number].text) from error
        STATS.steps += block.count
        STATS.instructions += block.count * len(front)
        self.executed += block.count
        if self.executed > MOST_INSTRUCTIONS:
            raise FaultError(f"{self.kernel.name} does not end")
        last = block.last
        front.at += 1
        if last is None:
            self.ready.append(front)
        elif last.op == "s_endpgm":
            np.add.at(self.ended, front.group, 1)
        elif last.op == "s_barrier":
            self.waiting.append(front)
        else:
            target = self.kernel.numbers[branch_target(last)]
            self._branch(front, CONDITIONS[last.op](front), target)

    def _branch(self, front: Front, taken: np.ndarray, target: int) -> None:
        if taken.all():
            front.at = target
        elif taken.any():
            there = front.part(taken)
            there.at = target
            self.ready.append(there)
            front = front.part(~taken)
        self.ready.append(front)

    def _pass_barrier(self) -> None:
        """Nothing else can run: every wave that lives must wait, at one barrier a workgroup."""
        at: dict[int, int] = {}
        for front in self.waiting:
            for group in np.unique(front.group).tolist():
                if self.ended[group]:
                    raise FaultError(
                        f"{self.kernel.name}: barrier divergence: some waves of workgroup {group} have ended"
                    )
                if at.setdefault(group, front.at) != front.at:
                    raise FaultError(f"{self.kernel.name}: barrier divergence: workgroup {group} waits at two barriers")
        for group in at:
            self.kernel.machine.lds.barrier(group)
        self.ready, self.waiting = self.waiting, []

    def _located(self, error: Exception, front: Front, address: int, text: str) -> FaultError:
        place = source_line(self.kernel.path, address) if self.kernel.path.exists() else ""
        what = str(error) if isinstance(error, FaultError) else f"{type(error).__name__}: {error}"
        return FaultError(f"{what}\n  in {self.kernel.name} at {address:#x} {place}: {text}")


def packed(*values: int | float) -> bytes:
    """Explicit arguments: 64-bit addresses and sizes as they come, for tests. int beyond 32 bits is an address."""
    raw = b""
    for value in values:
        form = "<f" if isinstance(value, float) else "<Q" if value >> 32 else "<I"
        raw += b"\0" * (-len(raw) % struct.calcsize(form)) + struct.pack(form, value)
    return raw
