"""The text of llvm-objdump, taken apart: one `Instruction` a line, basic blocks of them, nothing yet about what they
mean."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from tests import toolchain
from tests.gfx9emu.faults import FaultError

# What the assembler appends to tell encodings of one operation apart; operands and modifiers say it again.
ENCODING = re.compile(r"_(e32|e64|dpp|sdwa)$")
LINE = re.compile(r"\s+(\S+)\s*(.*?)\s*// ([0-9A-F]+): ([0-9A-F ]+)")
MODIFIER = re.compile(r"\s(\w+):(\[[^\]]*\]|swizzle\(.*?\)|[^\s,]+)")
# Cache hints: there are no caches here.
HINTS = ("sc0", "sc1", "nt")


@dataclass
class Instruction:
    """One instruction. at: its address; op: the mnemonic without the encoding; args: operands as text, the destination
    first; modifiers: "offset" -> "16", and flags such as "clamp" -> "". Whoever binds it takes what it understands of
    the modifiers; what is left is a fault."""

    at: int
    op: str
    args: list[str]
    modifiers: dict[str, str]
    words: list[int]
    text: str
    taken: set[str] = field(default_factory=set)

    @property
    def end(self) -> int:
        """The address of the next one."""
        return self.at + 4 * len(self.words)

    def take(self, name: str, default: str | None = None) -> str | None:
        """The text of a modifier, "" for a flag, `default` if it is not there."""
        self.taken.add(name)
        return self.modifiers.get(name, default)

    def number(self, name: str, default: int = 0) -> int:
        """A modifier as a whole number."""
        text = self.take(name)
        return default if text is None else int(text, 0)

    def numbers(self, name: str, default: list[int]) -> list[int]:
        """A modifier such as op_sel:[0,1]."""
        text = self.take(name)
        return default if text is None else [int(part) for part in text.strip("[]").split(",")]

    def left(self) -> list[str]:
        """Modifiers that nobody took."""
        return sorted(set(self.modifiers) - self.taken)

    def unknown(self) -> FaultError:
        """What to raise for an instruction, or a form of one, that no table knows."""
        return FaultError(f"unknown instruction: {self.text}")


def disassemble(code_object: Path, chip: str) -> list[Instruction]:
    """Every instruction of a code object's text, in order."""
    tool = toolchain.llvm_tool("llvm-objdump")
    listing = toolchain.output([tool, "-d", f"--mcpu={chip}", str(code_object)])
    matches = (LINE.match(line) for line in listing.splitlines())
    return [instruction(m[1], m[2], int(m[3], 16), m[4]) for m in matches if m]


def instruction(mnemonic: str, rest: str, at: int, words: str) -> Instruction:
    """One line of the listing: mnemonic, operands with modifiers, address, machine words in hexadecimal."""
    text = f"{mnemonic} {rest}".strip()
    modifiers = dict(MODIFIER.findall(f" {rest}"))
    operands = MODIFIER.sub("", f" {rest}")
    args = []
    for part in operands.split(",") if operands.strip() else []:
        # Flags follow the last operand, after a blank; of s_waitcnt nothing is looked at.
        first, *flags = part.split() or [""]
        args += [first] * bool(first)
        modifiers |= dict.fromkeys(flags, "")
    return Instruction(at, ENCODING.sub("", mnemonic), args, modifiers, [int(word, 16) for word in words.split()], text)


def branch_target(ins: Instruction) -> int:
    """Where s_branch and s_cbranch_… go: words from the next instruction, signed."""
    return ins.end + 4 * signed(ins.words[0], 16)


def signed(value: int, bits: int) -> int:
    """The low `bits` of a number as a signed one."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
