"""Operands as text -> functions of a `Front` that read or write them.

A reader returns an array that broadcasts to (waves, 64): registers of lanes as they are, scalars as (waves, 1),
constants as one number. All are bits: uint32 words, the same bits as fp32, or uint64 pairs.
"""

import re
from collections.abc import Callable

import numpy as np

from tests.gfx9emu.faults import FaultError
from tests.gfx9emu.front import EXEC, M0, VCC, Front

Array = np.ndarray
Reader = Callable[[Front], Array]
Writer = Callable[[Front, Array], None]

U32, U64, F32 = np.uint32, np.uint64, np.float32
NAMED = {
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "m0": (M0, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
    "flat_scratch": (102, 2),
    "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1),
}
REGISTER = re.compile(r"([sva])(?:(\d+)|\[(\d+):(\d+)\])$")
SIGN, MAGNITUDE = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
INV_2PI = 0x3E22F983


def register(text: str) -> tuple[str, int, int] | None:
    """(kind, first, count) with kind "v", "a" or "s"; None for a constant."""
    if text in NAMED:
        return ("s", *NAMED[text])
    match = REGISTER.match(text)
    if match is None:
        return None
    first = int(match[2] or match[3])
    return match[1], first, 1 if match[2] else int(match[4]) - first + 1


def lanes_register(text: str) -> int:
    """The row of a register of lanes in `Front.v`: v0 … v255, then a0 … a255."""
    found = register(text)
    if found is None or found[0] == "s":
        raise FaultError(f"{text} is no register of lanes")
    return found[1] + 256 * (found[0] == "a")


def constant(text: str) -> int:
    """An inline constant or literal as bits: 32 of them, or a negative whole number."""
    if re.match(r"0\.159154\d*$", text):
        return INV_2PI
    if re.match(r"-?\d*\.\d+(e[-+]?\d+)?$", text):
        return int(np.float32(float(text)).view(U32))
    if re.match(r"-?(0x[0-9a-f]+|\d+)$", text):
        return int(text, 0)
    raise FaultError(f"{text} is neither a register nor a constant")


def words(text: str) -> Reader:
    """32 bits a lane."""
    found = register(text)
    if found is None:
        value = U32(constant(text) & 0xFFFFFFFF)
        return lambda w: value
    kind, first, _ = found
    if kind == "s":
        return lambda w: w.sv[first]
    row = lanes_register(text)
    return lambda w: w.v[row]


def floats(text: str) -> Reader:
    """fp32 a lane; "-x", "|x|" and "neg(x)" around what is read."""
    text, negated, magnitude = signs(text)
    read = words(text)
    found = register(text)
    if found is not None and found[0] != "s":
        row = lanes_register(text)
        plain: Reader = lambda w: w.f[row]  # noqa: E731
    else:
        plain = lambda w: read(w).view(F32)  # noqa: E731
    if not negated and not magnitude:
        return plain
    keep = MAGNITUDE if magnitude else U32(0xFFFFFFFF)
    flip = SIGN if negated else U32(0)
    return lambda w: ((read(w) & keep) ^ flip).view(F32)


def signs(text: str) -> tuple[str, bool, bool]:
    """An operand without its signs; whether it is negated, and whether before that only its size counts."""
    if text.startswith("neg("):
        return text[4:-1], True, False
    negated = text.startswith("-") and text[1] in "vsa|"
    text = text[1:] if negated else text
    return text.strip("|"), negated, text.startswith("|")


def pairs(text: str) -> Reader:
    """64 bits a lane: two registers, or a constant with its sign."""
    found = register(text)
    if found is None:
        value = U64(constant(text) & 0xFFFFFFFFFFFFFFFF)
        return lambda w: value
    kind, first, _ = found
    if kind == "s":
        return lambda w: w.s64[first // 2][:, None]
    row = lanes_register(text)
    return lambda w: w.v[row].astype(U64) | w.v[row + 1].astype(U64) << U64(32)


def scalar(text: str) -> Reader:
    """32 bits a wave, (waves,) or one number."""
    found = register(text)
    if found is not None:
        first = found[1]
        return lambda w: w.s[first]
    if text == "scc":
        return lambda w: w.scc.astype(U32)
    value = U32(constant(text) & 0xFFFFFFFF)
    return lambda w: value


def scalar_pair(text: str) -> Reader:
    """64 bits a wave."""
    found = register(text)
    if found is not None:
        pair = found[1] // 2
        return lambda w: w.s64[pair]
    value = U64(constant(text) & 0xFFFFFFFFFFFFFFFF)
    return lambda w: value


def mask(text: str) -> Reader:
    """A pair of scalars as one bool a lane, (waves, 64)."""
    read = scalar_pair(text)
    return lambda w: w.lanes(read(w))


def write_words(text: str) -> Writer:
    """Puts 32 bits into the lanes that are on."""
    row = lanes_register(text)

    def write(w: Front, value: Array) -> None:
        if w.full:
            w.v[row][...] = value
        else:
            np.copyto(w.v[row], value, where=w.active)

    return write


def write_floats(text: str) -> Writer:
    """Puts fp32 into the lanes that are on."""
    row = lanes_register(text)

    def write(w: Front, value: Array) -> None:
        if w.full:
            w.f[row][...] = value
        else:
            np.copyto(w.f[row], value, where=w.active)

    return write


def write_pairs(text: str) -> Writer:
    """Puts 64 bits into the lanes that are on."""
    row = lanes_register(text)

    def write(w: Front, value: Array) -> None:
        np.copyto(w.v[row], value.astype(U32), where=w.active)
        np.copyto(w.v[row + 1], (value >> U64(32)).astype(U32), where=w.active)

    return write


def write_scalar(text: str) -> Writer:
    """Puts 32 bits a wave."""
    found = register(text)
    if found is None or found[0] != "s":
        raise FaultError(f"{text} is no scalar register")
    first = found[1]

    def write(w: Front, value: Array) -> None:
        w.s[first][...] = value
        if first >= EXEC:
            w.exec_changed()

    return write


def write_scalar_pair(text: str) -> Writer:
    """Puts 64 bits a wave."""
    found = register(text)
    if found is None or found[0] != "s" or found[1] % 2:
        raise FaultError(f"{text} is no pair of scalar registers")
    pair = found[1] // 2

    def write(w: Front, value: Array) -> None:
        w.s64[pair][...] = value
        if pair == EXEC // 2:
            w.exec_changed()

    return write


def write_mask(text: str) -> Writer:
    """Puts one bool a lane, (waves, 64), into a pair of scalars; lanes that are off get 0."""
    write = write_scalar_pair(text)
    return lambda w, value: write(w, w.bits(value & w.active))
