"""Modifiers that reach into other lanes (DPP) or into parts of a word (SDWA)."""

from dataclasses import dataclass

import numpy as np

from tests.gfx9emu.decode import Instruction
from tests.gfx9emu.front import LANES, Front
from tests.gfx9emu.operands import U32, Array, Reader, Writer, lanes_register

LANE = np.arange(LANES)
ROW = LANE // 16 * 16
IN_ROW = LANE % 16


def _row_broadcast(n: int) -> Array:
    """The last lane of the group before this one's, in groups of n + 1; lanes of the first group have none."""
    return np.where(LANE // (n + 1) > 0, LANE // (n + 1) * (n + 1) - 1, -1)


# name -> (its number) -> the lane that each lane reads, -1 for none
PATTERNS = {
    "row_shr": lambda n: np.where(n <= IN_ROW, LANE - n, -1),
    "row_shl": lambda n: np.where(IN_ROW + n < 16, LANE + n, -1),
    "row_ror": lambda n: ROW + (IN_ROW - n) % 16,
    "row_newbcast": lambda n: ROW + n,
    "row_bcast": _row_broadcast,
    "row_mirror": lambda n: ROW + 15 - IN_ROW,
    "row_half_mirror": lambda n: LANE // 8 * 8 + 7 - LANE % 8,
    "wave_shr": lambda n: LANE - 1,
}


@dataclass(frozen=True)
class Moved:
    """DPP: the first source comes from other lanes. lane: (64,) from which, -1 for none; written: (64,) bool, lanes
    that the masks let through; zero: whether a lane without a source reads 0, or else keeps its result."""

    lane: Array
    written: Array
    zero: bool

    def valid(self, w: Front) -> Array:
        """(waves, 64) bool: lanes whose source exists and is on."""
        return w.active[:, self.lane] & (self.lane >= 0)

    def reads(self, read: Reader) -> Reader:
        """`read` in the other lanes; 0 where there is none."""
        return lambda w: np.where(self.valid(w), np.broadcast_to(read(w), w.active.shape)[:, self.lane], U32(0))

    def writes(self, target: str) -> Writer:
        """Puts words into the lanes that this leaves."""
        row = lanes_register(target)

        def write(w: Front, value: Array) -> None:
            on = w.active & self.written
            np.copyto(w.v[row], value, where=on if self.zero else on & self.valid(w))

        return write


def moved_lanes(ins: Instruction) -> Moved | None:
    """What an instruction's DPP modifiers say; None without any."""
    quad = ins.take("quad_perm")
    named = [name for name in PATTERNS if name in ins.modifiers]
    if quad is None and not named:
        return None
    if quad is not None:
        lane = LANE // 4 * 4 + np.array([int(x) for x in quad.strip("[]").split(",")])[LANE % 4]
    else:
        lane = PATTERNS[named[0]](int(ins.take(named[0]) or 0))
    rows, banks = ins.number("row_mask", 15), ins.number("bank_mask", 15)
    written = (rows >> (LANE // 16) & 1 & (banks >> (IN_ROW // 4))).astype(bool)
    # llvm-objdump prints the flag when it is set, whatever the number behind it.
    return Moved(lane, written, ins.take("bound_ctrl") is not None)


def _place(selected: str) -> tuple[int, int]:
    """(shift, mask) of BYTE_n or WORD_n."""
    kind, number = selected.split("_")
    width = {"BYTE": 8, "WORD": 16}[kind]
    return width * int(number), (1 << width) - 1


def part_of_word(read: Reader, selected: str) -> Reader:
    """SDWA: one byte or half of a source, without its sign."""
    shift, keep = (U32(x) for x in _place(selected))
    return lambda w: (read(w) >> shift) & keep


def placed_in_word(ins: Instruction) -> Writer | None:
    """SDWA: the result in one byte or half of the destination, the rest 0 or as it was. None for the whole word."""
    selected, rest = ins.take("dst_sel", "DWORD"), ins.take("dst_unused", "UNUSED_PAD")
    if selected == "DWORD":
        return None
    if rest not in ("UNUSED_PAD", "UNUSED_PRESERVE"):
        raise ins.unknown()
    row = lanes_register(ins.args[0])
    shift, keep = (U32(x) for x in _place(selected))
    kept = ~(keep << shift) if rest == "UNUSED_PRESERVE" else U32(0)

    def write(w: Front, value: Array) -> None:
        np.copyto(w.v[row], (value & keep) << shift | (w.v[row] & kept), where=w.active)

    return write
