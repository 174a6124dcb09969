"""Instructions on global memory: global_…, which take an address a lane, and buffer_…, which take a descriptor; and
scratch_…, on the private memory of a lane."""

from collections.abc import Callable

import numpy as np

from tests.gfx9emu.data import SIZES, from_registers, half_of, to_registers
from tests.gfx9emu.decode import HINTS, Instruction
from tests.gfx9emu.faults import FaultError
from tests.gfx9emu.front import LANES, M0, Front
from tests.gfx9emu.machine import Machine
from tests.gfx9emu.operands import U32, U64, Array, Reader, pairs, register, scalar, words
from tests.gfx9emu.scalar import u64

Step = Callable[[Front], None]
LANE_BYTES = np.arange(LANES, dtype=np.int64)
NO_OP = ("buffer_wbl2", "buffer_inv", "buffer_wbinvl1")  # caches


def bind(ins: Instruction, machine: Machine) -> Step:
    """The step of an instruction whose name begins with global_ or buffer_."""
    for hint in HINTS:
        ins.take(hint)
    if ins.op in NO_OP:
        return lambda w: None
    space, verb, name = (*ins.op.split("_", 2), "", "")[:3]
    name, half = half_of(name)
    to_lds = name.startswith("lds_") or "lds" in ins.modifiers
    name = name.removeprefix("lds_")
    if verb not in ("load", "store") or name not in SIZES:
        raise ins.unknown()
    size, is_signed = SIZES[name]
    # Loads into LDS have no destination among their operands, stores have the address first.
    registers, rest = ("", ins.args) if to_lds else (ins.args[0], ins.args[1:])
    if space == "global" and verb == "store":
        registers, rest = ins.args[1], [ins.args[0], ins.args[2]]
    address = _global_address(ins, *rest) if space == "global" else _buffer_address(ins, size, *rest)
    if to_lds:
        return _load_to_lds(ins, machine, address, size)
    if verb == "load":
        return _load(machine, address, size, to_registers(registers, size, is_signed, half))
    return _store(machine, address, size, from_registers(registers, size, half))


Address = Callable[[Front], tuple[Array, Array]]


def _global_address(ins: Instruction, lane_part: str, base: str) -> Address:
    """Addresses (waves, 64), and which lanes are on."""
    offset = U64(ins.number("offset") & 0xFFFFFFFFFFFFFFFF)
    if base == "off":
        read = pairs(lane_part)
        return lambda w: (read(w) + offset, w.active)
    lane, start = words(lane_part), pairs(base)
    return lambda w: (u64(lane(w)) + start(w) + offset, w.active)


def _buffer_address(ins: Instruction, size: int, lane_part: str, descriptor: str, scalar_part: str) -> Address:
    """As `_global_address`; lanes past the descriptor's end are off."""
    ins.take("lds")
    offset, first = U64(ins.number("offset")), register(descriptor)[1]
    by_lane = ins.take("offen") is not None
    lane: Reader = words(lane_part) if by_lane else lambda w: U32(0)
    moved = scalar(scalar_part)

    def address(w: Front) -> tuple[Array, Array]:
        high = w.s[first + 1]
        if (high >> U32(16) & U32(0x3FFF)).any():
            raise FaultError("a buffer with a stride")
        base = u64(w.s[first]) | u64(high & U32(0xFFFF)) << U64(32)
        inside = np.broadcast_to(u64(lane(w)) + offset, w.active.shape)
        on = w.active & (inside + U64(size) <= u64(w.s[first + 2])[:, None])
        return base[:, None] + inside + u64(np.broadcast_to(moved(w), len(w)))[:, None], on

    return address


def _load(machine: Machine, address: Address, size: int, write: Callable[[Front, Array, Array], None]) -> Step:
    def step(w: Front) -> None:
        at, on = address(w)
        access = machine.memory.access(at, size, on, machine.agents(w))
        # Lanes that a descriptor switches off read 0.
        write(w, machine.memory.load(access), w.active)

    return step


def _store(machine: Machine, address: Address, size: int, read: Callable[[Front], Array]) -> Step:
    def step(w: Front) -> None:
        at, on = address(w)
        machine.memory.store(machine.memory.access(at, size, on, machine.agents(w)), read(w))

    return step


def _load_to_lds(ins: Instruction, machine: Machine, address: Address, size: int) -> Step:
    """Past the registers: lane l's bytes go to M0 + offset + size·l."""
    offset = ins.number("offset")

    def step(w: Front) -> None:
        at, on = address(w)
        data = machine.memory.load(machine.memory.access(at, size, on, machine.agents(w)))
        start = w.s[M0].astype(np.int64)[:, None] + offset
        target = machine.lds.of_waves(start + size * LANE_BYTES, size, w.active, w.group, w.wave)
        machine.lds.store(target, data)

    return step


def bind_scratch(ins: Instruction, machine: Machine) -> Step:
    """The step of an instruction whose name begins with scratch_."""
    for hint in HINTS:
        ins.take(hint)
    _, verb, name = ins.op.split("_", 2)
    name, half = half_of(name)
    if verb not in ("load", "store") or name not in SIZES:
        raise ins.unknown()
    size, is_signed = SIZES[name]
    offset = ins.number("offset")
    registers, lane_part, moved_by = ins.args if verb == "load" else (ins.args[1], ins.args[0], ins.args[2])
    lane = words("0" if lane_part == "off" else lane_part)
    moved = scalar("0" if moved_by == "off" else moved_by)

    def places(w: Front) -> tuple[Array, Array, Array]:
        start = lane(w).astype(np.int64) + np.broadcast_to(moved(w), len(w)).astype(np.int64)[:, None] + offset
        start = np.broadcast_to(start, w.active.shape)
        wave, number = np.nonzero(w.active)
        at = start[w.active][:, None] + np.arange(size)
        if at.size and (at.min() < 0 or at.max() >= w.scratch.shape[2]):
            raise FaultError(f"scratch access out of bounds: byte {at.max()} of {w.scratch.shape[2]}")
        return wave[:, None], number[:, None], at

    if verb == "load":
        write = to_registers(registers, size, is_signed, half)

        def load(w: Front) -> None:
            data = np.zeros((*w.active.shape, size), np.uint8)
            data[w.active] = w.scratch[places(w)]
            write(w, data, w.active)

        return load
    read = from_registers(registers, size, half)

    def store(w: Front) -> None:
        w.scratch[places(w)] = read(w)[w.active]

    return store
