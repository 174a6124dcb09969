"""Instructions on scalars against Python's integers, one wave a case; a row without a reference fails by its name."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.gfx9emu.assembler import execute, front
from tests.gfx9emu.decode import signed
from tests.gfx9emu.front import EXEC, VCC
from tests.gfx9emu.launch import packed
from tests.gfx9emu.machine import Machine
from tests.gfx9emu.memory import LDS, Memory
from tests.gfx9emu.scalar import COMPARISONS, CONDITIONS, FLAGGED, PLAIN, SPECIAL

pytestmark = pytest.mark.amd

EDGES = [0, 1, 2, 31, 32, 63, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x00200003, 0x00070000, 0x001F001F, 0x00400010]
WAVES = 256


def i32(x: int) -> int:
    return signed(x, 32)


def with_flag(function: Callable[..., int], flag: Callable[[int], bool] = bool, width: int = 32) -> Callable:
    """The result in `width` bits, and scc."""
    return lambda *x: (function(*x) % 2**width, flag(function(*x) % 2**width))


def fits(function: Callable[..., int]) -> Callable:
    """A signed sum, with scc where it overflows."""
    return lambda *x: (function(*x) % 2**32, not -(2**31) <= function(*x) < 2**31)


def carry(function: Callable[..., int]) -> Callable:
    return lambda *x: (function(*x) % 2**32, not 0 <= function(*x) < 2**32)


def field(x: int, where: int, width: int, is_signed: bool) -> int:
    count = where >> 16 & 127
    bits = (x >> where % width) & ((1 << count) - 1)
    return signed(bits, count) if is_signed and count else bits


REFERENCE: dict[str, Callable] = {
    "s_add_u32": carry(lambda a, b: a + b),
    "s_sub_u32": carry(lambda a, b: a - b),
    "s_add_i32": fits(lambda a, b: i32(a) + i32(b)),
    "s_sub_i32": fits(lambda a, b: i32(a) - i32(b)),
    "s_min_i32": lambda a, b: (min(a, b, key=i32), i32(a) <= i32(b)),
    "s_max_i32": lambda a, b: (max(a, b, key=i32), i32(a) >= i32(b)),
    "s_min_u32": lambda a, b: (min(a, b), a <= b),
    "s_max_u32": lambda a, b: (max(a, b), a >= b),
    "s_abs_i32": with_flag(lambda a: abs(i32(a))),
    "s_bfe_u32": with_flag(lambda a, b: field(a, b, 32, False)),
    "s_bfe_i32": with_flag(lambda a, b: field(a, b, 32, True)),
    "s_bfe_u64": with_flag(lambda a, b: field(a, b, 64, False), width=64),
    "s_bfe_i64": with_flag(lambda a, b: field(a, b, 64, True), width=64),
    "s_bcnt1_i32_b32": with_flag(int.bit_count),
    "s_bcnt1_i32_b64": with_flag(int.bit_count),
    **{f"s_lshl{n}_add_u32": carry(lambda a, b, n=n: (a << n) + b) for n in (1, 2, 3, 4)},
    "s_mov_b32": lambda a: a,
    "s_mov_b64": lambda a: a,
    "s_mul_i32": lambda a, b: a * b % 2**32,
    "s_mul_hi_u32": lambda a, b: a * b >> 32,
    "s_mul_hi_i32": lambda a, b: (i32(a) * i32(b) >> 32) % 2**32,
    "s_brev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    **dict.fromkeys(("s_ff1_i32_b32", "s_ff1_i32_b64"), lambda a: ((a & -a).bit_length() - 1) % 2**32),
    "s_sext_i32_i8": lambda a: signed(a, 8) % 2**32,
    "s_sext_i32_i16": lambda a: signed(a, 16) % 2**32,
}
for _w in (32, 64):
    REFERENCE |= {
        f"s_and_b{_w}": with_flag(lambda a, b: a & b, width=_w),
        f"s_or_b{_w}": with_flag(lambda a, b: a | b, width=_w),
        f"s_xor_b{_w}": with_flag(lambda a, b: a ^ b, width=_w),
        f"s_not_b{_w}": with_flag(lambda a: ~a, width=_w),
        f"s_andn2_b{_w}": with_flag(lambda a, b: a & ~b, width=_w),
        f"s_orn2_b{_w}": with_flag(lambda a, b: a | ~b, width=_w),
        f"s_nand_b{_w}": with_flag(lambda a, b: ~(a & b), width=_w),
        f"s_nor_b{_w}": with_flag(lambda a, b: ~(a | b), width=_w),
        f"s_xnor_b{_w}": with_flag(lambda a, b: ~(a ^ b), width=_w),
        f"s_lshl_b{_w}": with_flag(lambda a, b, w=_w: a << b % w, width=_w),
        f"s_lshr_b{_w}": with_flag(lambda a, b, w=_w: a >> b % w, width=_w),
        f"s_ashr_i{_w}": with_flag(lambda a, b, w=_w: signed(a, w) >> b % w, width=_w),
    }


def numbers(count: int, width: int, seed: int) -> list[int]:
    random = np.random.default_rng(seed)
    edges = EDGES if width == 32 else [*EDGES, 2**63, 2**64 - 1, 2**32]
    return [
        edges[i % len(edges)] if i < 170 else int(random.integers(2**width, dtype=np.uint64))
        for i in random.permutation(count)
    ]


def put(w, first: int, values: list[int]) -> None:  # type: ignore[no-untyped-def]
    w.s[first][...] = np.array([v % 2**32 for v in values], np.uint32)
    w.s[first + 1][...] = np.array([v >> 32 for v in values], np.uint32)


def pair(w, first: int, width: int) -> list[int]:  # type: ignore[no-untyped-def]
    low, high = w.s[first].tolist(), w.s[first + 1].tolist()
    return [a | b << 32 for a, b in zip(low, high, strict=True)] if width == 64 else low


def test_every_row_has_a_reference() -> None:
    assert set(REFERENCE) == {*FLAGGED, *PLAIN}


def text_of(op: str) -> str:
    """The instruction with destination s2 and sources s4, s6, in pairs where they are wide."""
    target, sources = (FLAGGED.get(op) or PLAIN[op])[0].split(":")
    kinds = zip((2, 4, 6), target + sources, strict=False)
    return f"{op} {', '.join(f's[{n}:{n + 1}]' if kind == 'q' else f's{n}' for n, kind in kinds)}"


@pytest.mark.parametrize("op", [*FLAGGED, *PLAIN])
def test_row(op: str) -> None:
    target, sources = (FLAGGED.get(op) or PLAIN[op])[0].split(":")
    w, width = front(WAVES), {"w": 32, "q": 64}
    given = [numbers(WAVES, width[kind], seed) for seed, kind in enumerate(sources)]
    for first, values in zip((4, 6), given, strict=False):
        put(w, first, values)
    w.scc[...] = np.arange(WAVES) % 2 == 0
    execute(text_of(op), w, among=tuple(map(text_of, (*FLAGGED, *PLAIN))))
    expected = [REFERENCE[op](*x) for x in zip(*given, strict=True)]
    if op in FLAGGED:
        assert w.scc.tolist() == [bool(flag) for _, flag in expected]
        expected = [value for value, _ in expected]
    assert pair(w, 2, width[target]) == expected


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("number", ["i32", "u32", "u64"])
def test_comparisons(name: str, number: str) -> None:
    if number == "u64" and name not in ("eq", "lg"):
        return
    compare = {
        "eq": int.__eq__,
        "lg": int.__ne__,
        "lt": int.__lt__,
        "le": int.__le__,
        "gt": int.__gt__,
        "ge": int.__ge__,
    }
    w, width = front(WAVES), 64 if number == "u64" else 32
    a, b = numbers(WAVES, width, 0), numbers(WAVES, width, 1)
    put(w, 4, a)
    put(w, 6, b)
    execute(f"s_cmp_{name}_{number} " + ("s[4:5], s[6:7]" if width == 64 else "s4, s6"), w)
    seen = i32 if number == "i32" else int
    assert w.scc.tolist() == [compare[name](seen(x), seen(y)) for x, y in zip(a, b, strict=True)]
    if width == 32:
        execute(f"s_cmpk_{name}_{number} s4, 0x{'fffe' if number == 'i32' else '8000'}", w)
        bound = -2 if number == "i32" else 0x8000
        assert w.scc.tolist() == [compare[name](seen(x), bound) for x in a]


@pytest.mark.parametrize("op", ["and", "or", "xor", "andn2", "andn1", "orn2"])
def test_save_exec(op: str) -> None:
    w, old, given = front(2), [0xFFFF0000FFFF0000, 1], [0x0F0F0F0F0F0F0F0F, 0]
    w.s64[EXEC // 2][...] = old
    put(w, 4, given)
    execute(f"s_{op}_saveexec_b64 s[2:3], s[4:5]", w)
    rule = {
        "and": lambda x, o: x & o,
        "or": lambda x, o: x | o,
        "xor": lambda x, o: x ^ o,
        "andn2": lambda x, o: x & ~o,
        "andn1": lambda x, o: ~x & o,
        "orn2": lambda x, o: x | ~o,
    }[op]
    new = [rule(x, o) % 2**64 for x, o in zip(given, old, strict=True)]
    assert pair(w, 2, 64) == old and w.s64[EXEC // 2].tolist() == new and w.scc.tolist() == [n != 0 for n in new]
    assert [sum(row) for row in w.active.tolist()] == [n.bit_count() for n in new]


def test_what_scc_decides() -> None:
    tested = set()

    def run(text: str, scc: bool, *values: int) -> tuple[int, bool]:
        w = front(1)
        w.scc[...] = scc
        for first, value in zip((2, 4, 6), values, strict=False):
            put(w, first, [value])
        execute(text, w)
        tested.add(text.split()[0])
        return pair(w, 2, 64 if "64" in text.split()[0] else 32)[0], bool(w.scc[0])

    assert run("s_cselect_b32 s2, s4, s6", True, 0, 5, 7)[0] == 5
    assert run("s_cselect_b64 s[2:3], s[4:5], -1", False, 0, 5)[0] == 2**64 - 1
    assert run("s_addc_u32 s2, s4, s6", True, 0, 2**32 - 1, 0) == (0, True)
    assert run("s_addc_u32 s2, s4, s6", False, 0, 2**32 - 1, 0) == (2**32 - 1, False)
    assert run("s_subb_u32 s2, s4, s6", True, 0, 7, 7) == (2**32 - 1, True)
    assert run("s_subb_u32 s2, s4, s6", True, 0, 8, 7) == (0, False)
    assert run("s_movk_i32 s2, 0x8000", False, 0)[0] == 0xFFFF8000
    assert run("s_addk_i32 s2, 0xffff", False, 0) == (2**32 - 1, False)
    assert run("s_addk_i32 s2, 0x1", False, 2**31 - 1) == (2**31, True)
    assert run("s_mulk_i32 s2, 0xfffe", False, 3)[0] == 2**32 - 6
    assert run("s_bitcmp0_b32 s4, 5", False, 0, 32)[1] is False and run("s_bitcmp1_b32 s4, 5", False, 0, 32)[1] is True
    assert (
        run("s_bitcmp1_b64 s[4:5], 40", False, 0, 1 << 40)[1]
        and not run("s_bitcmp0_b64 s[4:5], 40", True, 0, 1 << 40)[1]
    )
    assert tested == set(SPECIAL)


def test_conditions_of_branches() -> None:
    w = front(2)
    w.scc[...] = [True, False]
    w.s64[VCC // 2][...], w.s64[EXEC // 2][...] = [0, 9], [1, 0]
    said = {name: condition(w).tolist() for name, condition in CONDITIONS.items()}
    assert said == {
        "s_branch": [True, True],
        "s_cbranch_scc0": [False, True],
        "s_cbranch_scc1": [True, False],
        "s_cbranch_vccz": [True, False],
        "s_cbranch_vccnz": [False, True],
        "s_cbranch_execz": [False, True],
        "s_cbranch_execnz": [True, False],
    }


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_loads(count: int) -> None:
    w, memory = front(2), Memory.for_buffers(256)
    data = np.arange(64, dtype=np.uint32)
    address = memory.allocate(256, "data", data.view(np.uint8))
    put(w, 0, [address, address + 64])
    name = "s_load_dword" + (f"x{count}" if count > 1 else "")
    execute(f"{name} s[16:{15 + count}], s[0:1], 0x8".replace("s[16:16]", "s16"), w, Machine(memory, LDS(0, 1)))
    assert w.scalars[:, 16 : 16 + count].tolist() == [list(range(2, 2 + count)), list(range(18, 18 + count))]


def test_arguments_are_packed_as_a_kernel_reads_them() -> None:
    assert packed(1, 2**40, 1.0) == bytes([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 128, 63])
