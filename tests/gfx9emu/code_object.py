"""A linked code object: what its kernels ask of the machine, and their instructions as basic blocks."""

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests import toolchain
from tests.gfx9emu import loads, scalar, shared, vector
from tests.gfx9emu.decode import Instruction, branch_target, disassemble
from tests.gfx9emu.faults import FaultError
from tests.gfx9emu.front import Front
from tests.gfx9emu.machine import Machine

Step = Callable[[Front], None]
ENDS = ("s_endpgm", "s_barrier")
# Of the kernel descriptor's float mode: to nearest even, nothing flushed, in both of its fields.
FLOAT_MODE = 0xF0
BINDERS = {
    "s": scalar.bind,
    "v": vector.bind,
    "ds": shared.bind,
    "global": loads.bind,
    "buffer": loads.bind,
    "scratch": loads.bind_scratch,
}


def bind(ins: Instruction, machine: Machine) -> Step:
    """An instruction as a function of the front that executes it. FaultError if it is not known in this form."""
    binder = BINDERS.get(ins.op.split("_")[0])
    if binder is None:
        raise ins.unknown()
    step = binder(ins, machine)
    if ins.left():
        raise FaultError(f"unknown modifiers {', '.join(ins.left())}: {ins.text}")
    return step


@dataclass
class Block:
    """Instructions that are executed one after the other. last: the branch, barrier or end behind them, if any."""

    instructions: list[Instruction]
    last: Instruction | None
    machine: Machine

    @cached_property
    def steps(self) -> list[Step]:
        """The instructions, bound when the block is first reached."""
        return [bind(ins, self.machine) for ins in self.instructions]

    @property
    def count(self) -> int:
        """How many instructions a wave executes here."""
        return len(self.instructions) + (self.last is not None)


def is_branch(ins: Instruction) -> bool:
    """Whether the next instruction may be another than the one behind."""
    return ins.op in scalar.CONDITIONS


def blocks_of(instructions: list[Instruction], entry: int, machine: Machine) -> tuple[list[Block], dict[int, int]]:
    """Basic blocks in the order of their addresses, and the block number of each block's address."""
    starts = {entry, instructions[0].at}
    for ins in instructions:
        if is_branch(ins):
            starts |= {branch_target(ins), ins.end}
        elif ins.op in ENDS:
            starts.add(ins.end)
    blocks: list[Block] = []
    numbers: dict[int, int] = {}
    for ins in instructions:
        # Behind an end there may be padding: what follows it begins a block too.
        if ins.at in starts or blocks[-1].last is not None:
            numbers[ins.at] = len(blocks)
            blocks.append(Block([], None, machine))
        if is_branch(ins) or ins.op in ENDS:
            blocks[-1].last = ins
        else:
            blocks[-1].instructions.append(ins)
    return blocks, numbers


@dataclass
class Kernel:
    """One kernel of a code object. path must stay for as long as faults shall name source lines.

    lds: bytes of its own; private: bytes of scratch memory a lane; kernarg: bytes of arguments; arguments: (offset,
    size, kind) of each, from the metadata. num_v, num_a: registers of lanes. user_scalars: how many scalars come before
    the workgroup's number; group_numbers: which axes of that are asked for; kernarg_scalar: the scalar that holds the
    arguments' address. blocks, numbers: see `blocks_of`; first: the block to start with.
    """

    path: Path
    name: str
    chip: str
    machine: Machine = field(repr=False)
    lds: int = 0
    private: int = 0
    kernarg: int = 0
    num_v: int = 0
    num_a: int = 0
    most_threads: int = 0
    user_scalars: int = 0
    group_numbers: tuple[bool, bool, bool] = (True, False, False)
    kernarg_scalar: int = 0
    arguments: list[tuple[int, int, str]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list, repr=False)
    numbers: dict[int, int] = field(default_factory=dict, repr=False)
    first: int = 0


def load(path: Path, name: str, chip: str, machine: Machine) -> Kernel:
    """The kernel `name` of a code object for `chip`."""
    tool = toolchain.llvm_tool("llvm-readelf")
    listing = toolchain.output([tool, "-W", "--sections", "--symbols", "--notes", str(path)])
    descriptor_at = _symbol(listing, f"{name}.kd")
    section = re.search(r"\.rodata\s+PROGBITS\s+(\w+)\s+(\w+)", listing)
    if section is None:
        raise FaultError(f"{path} has no read-only data")
    offset = descriptor_at - int(section[1], 16) + int(section[2], 16)
    raw = path.read_bytes()[offset : offset + 64]
    lds, private, kernarg = struct.unpack_from("<III", raw)
    entry = descriptor_at + struct.unpack_from("<q", raw, 16)[0]
    rsrc3, rsrc1, rsrc2 = struct.unpack_from("<III", raw, 44)
    (properties,) = struct.unpack_from("<H", raw, 56)
    if rsrc1 >> 12 & 0xFF != FLOAT_MODE:
        raise FaultError(f"{name} rounds or flushes otherwise than this emulator")
    num_v = 4 * ((rsrc3 & 63) + 1)
    kernel = Kernel(
        path,
        name,
        chip,
        machine,
        lds=lds,
        private=private,
        kernarg=kernarg,
        num_v=num_v,
        num_a=8 * ((rsrc1 & 63) + 1) - num_v,
        user_scalars=rsrc2 >> 1 & 31,
        group_numbers=(bool(rsrc2 >> 7 & 1), bool(rsrc2 >> 8 & 1), bool(rsrc2 >> 9 & 1)),
        # Before the arguments' address come a buffer descriptor and two more addresses, where asked for.
        kernarg_scalar=4 * (properties & 1) + 2 * (properties >> 1 & 1) + 2 * (properties >> 2 & 1),
    )
    _read_metadata(kernel, listing)
    instructions = disassemble(path, chip)
    kernel.blocks, kernel.numbers = blocks_of(instructions, entry, machine)
    kernel.first = kernel.numbers[entry]
    return kernel


def _symbol(listing: str, name: str) -> int:
    match = re.search(rf"^\s*\d+: (\w+)\s.*\s{re.escape(name)}$", listing, re.MULTILINE)
    if match is None:
        raise FaultError(f"no symbol {name}")
    return int(match[1], 16)


def _read_metadata(kernel: Kernel, listing: str) -> None:
    entries = re.split(r"^\s+- \.agpr_count:", listing, flags=re.MULTILINE)[1:]
    (entry,) = [e for e in entries if re.search(rf"\.name:\s+'?{re.escape(kernel.name)}'?\s", e)]
    fields = re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)", entry)
    kernel.arguments = [(int(offset), int(size), kind) for offset, size, kind in fields]
    kernel.most_threads = int(re.search(r"\.max_flat_workgroup_size:\s+(\d+)", entry)[1])


def source_line(path: Path, address: int) -> str:
    """file:line of an instruction, "" where the code object does not say."""
    tool = toolchain.llvm_tool("llvm-symbolizer")
    lines = toolchain.output([tool, f"--obj={path}", hex(address)]).splitlines()
    place = lines[1].rsplit("/", 1)[-1] if len(lines) > 1 else ""
    return "" if place.startswith("??") else place
