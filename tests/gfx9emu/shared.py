"""Instructions on LDS (ds_…), and those of them that only move data between lanes."""

import re
from collections.abc import Callable

import numpy as np

from tests.gfx9emu.data import SIZES, from_registers, half_of, to_registers
from tests.gfx9emu.decode import Instruction
from tests.gfx9emu.front import LANES, Front
from tests.gfx9emu.machine import Machine
from tests.gfx9emu.operands import U32, Array, words, write_words

Step = Callable[[Front], None]
NAME = re.compile(r"ds_(read|write)(2?)(st64)?_(\w+)$")
LANE = np.arange(LANES)


def bind(ins: Instruction, machine: Machine) -> Step:
    """The step of an instruction whose name begins with ds_."""
    if ins.op in SPECIAL:
        return SPECIAL[ins.op](ins, machine)
    match = NAME.match(ins.op)
    name, half = half_of(match[4] if match else "")
    if match is None or name not in SIZES:
        raise ins.unknown()
    size, is_signed = SIZES[name]
    if match[2]:  # two places, in units of the size or of 64 of them
        unit = size * (64 if match[3] else 1)
        offsets = [ins.number("offset0") * unit, ins.number("offset1") * unit]
    else:
        offsets = [ins.number("offset")]
    if match[1] == "read":
        return _read(ins, machine, offsets, size, is_signed, half)
    return _write(ins, machine, offsets, size, half)


def _read(ins: Instruction, machine: Machine, offsets: list[int], size: int, is_signed: bool, half: str) -> Step:
    address = words(ins.args[1])
    write = to_registers(ins.args[0], size * len(offsets), is_signed, half)

    def step(w: Front) -> None:
        at = np.broadcast_to(address(w).astype(np.int64), w.active.shape)
        places = [machine.lds.of_waves(at + offset, size, w.active, w.group, w.wave) for offset in offsets]
        write(w, np.concatenate([machine.lds.load(place) for place in places], -1), w.active)

    return step


def _write(ins: Instruction, machine: Machine, offsets: list[int], size: int, half: str) -> Step:
    address = words(ins.args[0])
    reads = [from_registers(text, size, half) for text in ins.args[1:]]

    def step(w: Front) -> None:
        at = np.broadcast_to(address(w).astype(np.int64), w.active.shape)
        for offset, read in zip(offsets, reads, strict=True):
            machine.lds.store(machine.lds.of_waves(at + offset, size, w.active, w.group, w.wave), read(w))

    return step


def _from_lane(w: Front, value: Array, lane: Array) -> Array:
    """Each lane's value from another, 0 from one that is off. lane: (64,) or (waves, 64)."""
    wave = np.arange(len(w))[:, None]
    return np.where(w.active[wave, lane], np.broadcast_to(value, w.active.shape)[wave, lane], U32(0))


def _permute_back(ins: Instruction, machine: Machine) -> Step:
    """ds_bpermute_b32: each lane names the one that it reads, four times over."""
    target, address, value = ins.args
    write, read_address, read = write_words(target), words(address), words(value)
    offset = U32(ins.number("offset"))
    return lambda w: write(w, _from_lane(w, read(w), (read_address(w) + offset) // U32(4) % U32(64)))


def _swizzle(ins: Instruction, machine: Machine) -> Step:
    """ds_swizzle_b32: a fixed pattern, of four lanes or by and, or, xor of the lane's number within 32."""
    ins.take("offset")
    pattern = ins.words[0] & 0xFFFF
    if pattern >> 15:
        lane = LANE // 4 * 4 + np.array([pattern >> 2 * i & 3 for i in range(4)])[LANE % 4]
    else:
        lane = LANE // 32 * 32 + (((LANE % 32 & pattern) | pattern >> 5) & 31 ^ pattern >> 10)
    write, read = write_words(ins.args[0]), words(ins.args[1])
    return lambda w: write(w, _from_lane(w, read(w), lane))


def _read_transposed(ins: Instruction, machine: Machine) -> Step:
    """ds_read_b64_tr_b16: 16 lanes read 4 halves each, a 16 × 4 block, and get it transposed: lane i has column i % 4
    of the rows i // 4, i // 4 + 4, i // 4 + 8 and i // 4 + 12."""
    address, offset, write = words(ins.args[1]), ins.number("offset"), to_registers(ins.args[0], 8)
    row = LANE[:, None] // 16 * 16 + 4 * np.arange(4) + LANE[:, None] % 16 // 4
    column = LANE[:, None] % 4

    def step(w: Front) -> None:
        at = address(w).astype(np.int64) + offset
        data = machine.lds.load(machine.lds.of_waves(at, 8, w.active, w.group, w.wave))
        write(w, np.ascontiguousarray(data.view(np.uint16)[:, row, column]).view(np.uint8), w.active)

    return step


SPECIAL: dict[str, Callable[[Instruction, Machine], Step]] = {
    "ds_bpermute_b32": _permute_back,
    "ds_swizzle_b32": _swizzle,
    "ds_read_b64_tr_b16": _read_transposed,
}
