"""Bytes of memory into registers and back, for every instruction that loads or stores."""

from collections.abc import Callable

import numpy as np

from tests.gfx9emu.front import Front
from tests.gfx9emu.operands import U32, Array, lanes_register

# type of a load or store -> (bytes, whether a load extends the sign)
SIZES = {
    "dword": (4, False), "dwordx2": (8, False), "dwordx3": (12, False), "dwordx4": (16, False),
    "ushort": (2, False), "sshort": (2, True), "short": (2, False), "ubyte": (1, False), "sbyte": (1, True),
    "byte": (1, False), "b8": (1, False), "b16": (2, False), "b32": (4, False), "b64": (8, False), "b96": (12, False),
    "b128": (16, False), "u8": (1, False), "i8": (1, True), "u16": (2, False), "i16": (2, True),
}  # fmt: skip


def half_of(name: str) -> tuple[str, str]:
    """("short", "hi") of "short_d16_hi": the type, and which half of the register it is about: "lo", "hi" or ""."""
    for ending, half in (("_d16_hi", "hi"), ("_d16", "lo")):
        if name.endswith(ending):
            return name.removesuffix(ending), half
    return name, ""


def to_registers(
    text: str, size: int, is_signed: bool = False, half: str = ""
) -> Callable[[Front, Array, Array], None]:
    """Puts (waves, 64, size) bytes into the registers of the lanes `on`, fewer than 4 of them into one."""
    row = lanes_register(text)

    def write_words(w: Front, data: Array, on: Array) -> None:
        words = np.ascontiguousarray(data).view(U32)
        for number in range(size // 4):
            np.copyto(w.v[row + number], words[..., number], where=on)

    def write_part(w: Front, data: Array, on: Array) -> None:
        part = np.ascontiguousarray(data).view({1: np.uint8, 2: np.uint16}[size])[..., 0]
        part = part.view({1: np.int8, 2: np.int16}[size]).astype(np.int32).view(U32) if is_signed else part.astype(U32)
        if half == "lo":
            part = (part & U32(0xFFFF)) | (w.v[row] & U32(0xFFFF0000))
        elif half == "hi":
            part = part << U32(16) | (w.v[row] & U32(0xFFFF))
        np.copyto(w.v[row], part, where=on)

    return write_words if size >= 4 else write_part


def from_registers(text: str, size: int, half: str = "") -> Callable[[Front], Array]:
    """(waves, 64, size) bytes of a lane's registers, the low ones of one where there are fewer than 4."""
    row = lanes_register(text)

    def read(w: Front) -> Array:
        words = np.stack(w.v[row : row + max(size // 4, 1)], -1)
        words = words >> U32(16) if half == "hi" else words
        return words.view(np.uint8)[..., :size]

    return read
