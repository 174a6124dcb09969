"""MFMA: products of small matrices spread over the 64 lanes of a wave.

An M×N×K instruction holds A (M, K) as lane l: row l % M, columns K/g·(l // M) and on, with g = 64 / M groups of lanes;
B (K, N) likewise, by columns. Of D (M, N) lane l holds column l % N, and of its registers number r is row
8·(r // 4) + 4·(l // 32) + r % 4 for M = 32 and 4·(l // 16) + r for M = 16.
"""

import re
from collections.abc import Callable

import numpy as np

from tests.gfx9emu.decode import Instruction
from tests.gfx9emu.front import LANES, Front
from tests.gfx9emu.operands import constant, lanes_register, register

Array = np.ndarray
U16, U32, F16, F32, F64 = np.uint16, np.uint32, np.float16, np.float32, np.float64
NAME = re.compile(r"v_mfma_f32_(\d+)x\d+x(\d+)_(bf16|f16|f32|xf32)$")
# (M, K) by type. A type's first two are gfx942's, the next two came with gfx950. xf32 is gfx942's alone.
SHAPES = {
    "bf16": ((32, 8), (16, 16), (32, 16), (16, 32)),
    "f16": ((32, 8), (16, 16), (32, 16), (16, 32)),
    "f32": ((32, 2), (16, 4)),
    "xf32": ((32, 4), (16, 8)),
}
XF32 = U32(0xFFFFE000)  # the bits of fp32 that xf32 keeps
LANE = np.arange(LANES)


def columns_per_lane(m: int, k: int) -> int:
    """How many elements of A a lane holds."""
    return k * m // LANES


def rows_of_result(m: int) -> Array:
    """(registers, 64): which row of D each register of each lane holds."""
    number = np.arange(m * m // LANES)[:, None]
    return 8 * (number // 4) + 4 * (LANE // 32) + number % 4 if m == 32 else 4 * (LANE // 16) + number


def elements(registers: Array, dtype: str) -> Array:
    """(waves, 64, elements) fp32 of the registers (n, waves, 64) that hold an operand."""
    lanes = np.ascontiguousarray(np.moveaxis(registers, 0, -1))
    if dtype == "f32":
        return lanes.view(F32)
    if dtype == "xf32":
        return (lanes & XF32).view(F32)
    halves = lanes.view(U16)
    return halves.view(F16).astype(F32) if dtype == "f16" else (halves.astype(U32) << U32(16)).view(F32)


def operand(registers: Array, m: int, dtype: str) -> Array:
    """(waves, M, K) fp64."""
    held = elements(registers, dtype)
    waves, _, count = held.shape
    groups = held.reshape(waves, LANES // m, m, count)
    return np.ascontiguousarray(groups.swapaxes(1, 2)).reshape(waves, m, -1).astype(F64)


def bind(ins: Instruction) -> Callable[[Front], None]:
    """The step of a v_mfma instruction. exec plays no part in it."""
    match = NAME.match(ins.op)
    if match is None or (int(match[1]), int(match[2])) not in SHAPES[match[3]]:
        raise ins.unknown()
    m, dtype = int(match[1]), match[3]
    target, a, b = (lanes_register(text) for text in ins.args[:3])
    operand_registers = register(ins.args[1])[2]
    count = m * m // LANES
    if register(ins.args[3]) is None:
        value = U32(constant(ins.args[3]) & 0xFFFFFFFF).view(F32)
        summand = lambda w: value  # noqa: E731
    else:
        first = lanes_register(ins.args[3])
        summand = lambda w: np.stack(w.f[first : first + count])  # noqa: E731
    rows, column = rows_of_result(m), LANE % m

    def step(w: Front) -> None:
        left, right = (operand(np.stack(w.v[row : row + operand_registers]), m, dtype) for row in (a, b))
        product = left @ right.swapaxes(1, 2)
        out = (np.moveaxis(product[:, rows, column], 0, 1) + summand(w)).astype(F32)
        for number in range(count):
            w.f[target + number][...] = out[number]

    return step
