"""Single instructions for the emulator's own tests: assembled by llvm-mc, executed on registers with given contents."""

import re
import subprocess
from functools import cache

import numpy as np

from tests import toolchain
from tests.gfx9emu.code_object import bind
from tests.gfx9emu.decode import Instruction, instruction
from tests.gfx9emu.front import LANES, Front
from tests.gfx9emu.machine import Machine
from tests.gfx9emu.memory import LDS, Memory

CHIP = "gfx950"  # knows all that gfx942 knows but xf32


ENCODED = re.compile(r"\s*(\S+)\s*(.*?)\s*; encoding: \[([0-9a-fx,]+)\]")


@cache
def assemble(*lines: str, chip: str = CHIP) -> tuple[Instruction, ...]:
    """Instructions in assembler text, one a line; as the disassembler would print them."""
    command = [toolchain.llvm_tool("llvm-mc"), "-arch=amdgcn", f"-mcpu={chip}", "-show-encoding"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    found = []
    for match in map(ENCODED.match, done.stdout.splitlines()):
        if match:
            octets = bytes(int(octet, 16) for octet in match[3].split(","))
            words = (octets[at : at + 4][::-1].hex() for at in range(0, len(octets), 4))
            found.append(instruction(match[1], match[2], 0, " ".join(words)))
    return tuple(found)


def front(waves: int = 2, scratch_bytes: int = 0) -> Front:
    """Waves of one workgroup with poison in all registers."""
    return Front.fresh(np.zeros(waves, int), np.arange(waves), 256, 256, scratch_bytes)


def execute(
    text: str, w: Front, machine: Machine | None = None, chip: str = CHIP, among: tuple[str, ...] | None = None
) -> None:
    """One instruction, in a copy of what it was taken apart to. among: lines, `text` one of them, that are assembled
    together, once for all tests that name them."""
    among = among or (text,)
    ins = assemble(*among, chip=chip)[among.index(text)]
    ins = Instruction(ins.at, ins.op, ins.args, ins.modifiers, ins.words, ins.text)
    with np.errstate(all="ignore"):
        bind(ins, machine or Machine(Memory(0), LDS(0, 1)))(w)


def lanes_off(w: Front, seed: int = 0) -> np.ndarray:
    """Switch off a third of the lanes; which are on, (waves, 64)."""
    on = np.random.default_rng(seed).random((len(w), LANES)) < 0.67
    on[:, 0] = True
    w.s64[63][...] = w.bits(on)
    w.exec_changed()
    return on
