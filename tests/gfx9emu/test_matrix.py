"""MFMA: the layouts of operands and results, as tables of where single elements are, and products."""

import numpy as np
import pytest

from tests.gfx9emu.assembler import execute, front
from tests.gfx9emu.matrix import SHAPES

pytestmark = pytest.mark.amd
CASES = [(dtype, m, k) for dtype, shapes in SHAPES.items() for m, k in shapes]


def bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """(…, n) numbers that are exact in `dtype`, as words (…, n or n / 2)."""
    if dtype.endswith("f32"):
        return values.astype(np.float32).view(np.uint32)
    if dtype == "f16":
        return values.astype(np.float16).view(np.uint32)
    return np.ascontiguousarray(values.astype(np.float32).view(np.uint16)[..., 1::2]).view(np.uint32)


def place_of_a(m: int, k: int, row: int, column: int) -> tuple[int, int]:
    """(lane, element) that holds A[row, column]: groups of m lanes share the columns evenly, in order."""
    each = k // (64 // m)
    return column // each * m + row, column % each


def place_of_d(m: int, row: int, column: int) -> tuple[int, int]:
    """(lane, register) that holds D[row, column]: lanes are columns; four rows in four registers, then other lanes."""
    group, within = divmod(row, 4)
    lane_groups = 64 // m
    return group % lane_groups * m + column, group // lane_groups * 4 + within


def filled(w, first: int, matrix: np.ndarray, dtype: str, m: int, k: int) -> int:  # type: ignore[no-untyped-def]
    """Puts a matrix (m, k) into registers from `first` on; how many."""
    each = k // (64 // m)
    lanes = np.zeros((64, each))
    for row, column in np.ndindex(m, k):
        lane, element = place_of_a(m, k, row, column)
        lanes[lane, element] = matrix[row, column]
    packed = bits(lanes, dtype)
    for number in range(packed.shape[1]):
        w.v[first + number][...] = packed[:, number]
    return packed.shape[1]


@pytest.mark.parametrize(("dtype", "m", "k"), CASES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_product(dtype: str, m: int, k: int, accumulate: bool) -> None:
    random = np.random.default_rng(m * k)
    a, b, c = (random.integers(-8, 9, size=size) / 4 for size in ((m, k), (k, m), (m, m)))
    w = front(1)
    w.s64[63][...] = 1  # one lane is on: MFMA does not ask
    w.exec_changed()
    count = filled(w, 0, a, dtype, m, k)
    filled(w, 20, b.T, dtype, m, k)
    for row, column in np.ndindex(m, m):
        lane, number = place_of_d(m, row, column)
        w.f[256 + number][0, lane] = c[row, column]
    last = m * m // 64 - 1
    names = [f"v[{first}:{first + count - 1}]" if count > 1 else f"v{first}" for first in (0, 20)]
    summand = f"a[0:{last}]" if accumulate else "1.0"
    chip = "gfx942" if dtype == "xf32" else "gfx950"
    execute(f"v_mfma_f32_{m}x{m}x{k}_{dtype} a[0:{last}], {', '.join(names)}, {summand}", w, chip=chip)
    expected = a @ b + (c if accumulate else 1.0)
    for row, column in np.ndindex(m, m):
        lane, number = place_of_d(m, row, column)
        assert w.f[256 + number][0, lane] == expected[row, column]


def test_xf32_keeps_ten_bits() -> None:
    w = front(1)
    for row in (0, 1, 20, 21):
        w.f[row][...] = 1 + 2**-10 + 2**-11 if row < 20 else 1.0
    execute("v_mfma_f32_16x16x8_xf32 a[0:3], v[0:1], v[20:21], 0", w, chip="gfx942")
    assert (w.f[256] == 8 * (1 + 2**-10)).all()
