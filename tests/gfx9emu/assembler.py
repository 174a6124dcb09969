"""Single instructions for the emulator's own tests: assembled by llvm-mc, taken apart by llvm-objdump, executed on
registers with given contents."""

import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from tests import toolchain
from tests.gfx9emu.code_object import bind
from tests.gfx9emu.decode import Instruction, disassemble
from tests.gfx9emu.front import LANES, Front
from tests.gfx9emu.machine import Machine
from tests.gfx9emu.memory import LDS, Memory

CHIP = "gfx950"  # knows all that gfx942 knows but xf32


@cache
def assemble(*lines: str, chip: str = CHIP) -> tuple[Instruction, ...]:
    """Instructions in assembler text, one a line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "code.o"
        command = [toolchain.llvm_tool("llvm-mc"), "-arch=amdgcn", f"-mcpu={chip}", "-filetype=obj", "-o", str(path)]
        done = subprocess.run(command, input="\n".join(lines) + "\n", text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return tuple(disassemble(path, chip))


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
