"""Vector instructions that need more than their operands, and the modifiers: each against what the manual says of it,
with lanes that are off."""

import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.gfx9emu.arithmetic import COMPARISONS, PACKED
from tests.gfx9emu.assembler import execute, front, lanes_off
from tests.gfx9emu.faults import FaultError
from tests.gfx9emu.front import POISON, VCC, Front
from tests.gfx9emu.lanes import PATTERNS
from tests.gfx9emu.vector import SPECIAL

pytestmark = pytest.mark.amd
LANE = np.arange(64)


def words(seed: int, w: Front) -> np.ndarray:
    return np.random.default_rng(seed).integers(2**32, size=w.active.shape, dtype=np.uint32)


def normals(seed: int, w: Front) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=w.active.shape).astype(np.float32)


def test_select() -> None:
    w = front()
    on, a, b = lanes_off(w), words(0, w), words(1, w)
    w.v[1][...], w.v[2][...] = a, b
    chosen = words(2, w) % 2 == 0
    w.s64[2][...] = w.bits(chosen)
    execute("v_cndmask_b32_e64 v0, v1, v2, s[4:5]", w)
    assert np.array_equal(w.v[0], np.where(on, np.where(chosen, b, a), POISON))
    execute("v_cndmask_b32_e64 v0, v1, -v2, s[4:5]", w)
    assert np.array_equal(w.v[0], np.where(on, np.where(chosen, b ^ np.uint32(1 << 31), a), POISON))


@pytest.mark.parametrize("number", ["f32", "i32", "u32", "u16", "i64", "u64"])
@pytest.mark.parametrize("name", COMPARISONS)
def test_compare(name: str, number: str) -> None:
    floats_only = name in ("lg", "neq", "nlg", "nlt", "nle", "ngt", "nge", "o", "u")
    if floats_only != (number == "f32") and not (name in ("eq", "lt", "le", "gt", "ge") and number == "f32"):
        return
    w = front()
    on, a, b = lanes_off(w), words(0, w) % 5 - 2, words(1, w) % 5 - 2
    rule = {
        "eq": lambda x, y: x == y,
        "ne": lambda x, y: x != y,
        "lt": lambda x, y: x < y,
        "le": lambda x, y: x <= y,
        "gt": lambda x, y: x > y,
        "ge": lambda x, y: x >= y,
        "lg": lambda x, y: x < y or x > y,
        "neq": lambda x, y: x != y,
        "o": lambda x, y: x == x and y == y,
        "u": lambda x, y: x != x or y != y,
        "nlg": lambda x, y: not (x < y or x > y),
        "nlt": lambda x, y: not x < y,
        "nle": lambda x, y: not x <= y,
        "ngt": lambda x, y: not x > y,
        "nge": lambda x, y: not x >= y,
    }[name]
    if number == "f32":
        a, b = (np.where(x == 2, np.float32(np.nan), x.astype(np.float32)).view(np.uint32) for x in (a, b))
    for row, x in ((2, a), (4, b)):
        w.v[row][...] = x
        w.v[row + 1][...] = (x.view(np.int32) >> 31).view(np.uint32)
    wide = "64" in number
    execute(f"v_cmp_{name}_{number} s[8:9], " + ("v[2:3], v[4:5]" if wide else "v2, v4"), w)
    as_number = {
        "f32": lambda x: x.view(np.float32),
        "i32": lambda x: x.view(np.int32),
        "u32": lambda x: x,
        "u16": lambda x: x & 0xFFFF,
        "i64": lambda x: x.view(np.int32),
        "u64": lambda x: x.view(np.int32).astype(np.int64).view(np.uint64),
    }[number]
    expected = [
        [rule(x, y) for x, y in zip(*rows, strict=True)]
        for rows in zip(as_number(a).tolist(), as_number(b).tolist(), strict=True)
    ]
    assert np.array_equal(w.lanes(w.s64[4]), np.array(expected) & on)


@pytest.mark.parametrize("op", PACKED)
def test_packed(op: str) -> None:
    w = front()
    on, x = lanes_off(w), [normals(seed, w) for seed in range(6)]
    for row, values in enumerate(x):
        w.f[2 + row][...] = values
    count = 3 if op == "v_pk_fma_f32" else 2
    names = ", ".join(["v[2:3]", "v[4:5]", "v[6:7]"][:count])
    ones = ",".join(["1"] * (count - 1))
    # The result lies over the first source: both halves are read before either is written.
    execute(f"{op} v[2:3], {names} op_sel:[1,{ones.replace('1', '0')}] op_sel_hi:[0,{ones}] neg_lo:[0,{ones}]", w)
    rule = {
        "v_pk_add_f32": lambda a, b: a + b,
        "v_pk_mul_f32": lambda a, b: a * b,
        "v_pk_fma_f32": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
    }[op]
    low, high = rule(x[1], -x[2], *[-x[4]][: count - 2]), rule(x[0], x[3], *[x[5]][: count - 2])
    assert np.array_equal(w.f[2], np.where(on, low, x[0])) and np.array_equal(w.f[3], np.where(on, high, x[1]))


def test_packed_move_over_its_source() -> None:
    w = front()
    a, b = words(0, w), words(1, w)
    w.v[2][...], w.v[3][...] = a, b
    execute("v_pk_mov_b32 v[2:3], v[2:3], v[2:3] op_sel:[1,0]", w)
    assert np.array_equal(w.v[2], b) and np.array_equal(w.v[3], a)


CARRY = ["v_add_co_u32", "v_sub_co_u32", "v_subrev_co_u32", "v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32"]


@pytest.mark.parametrize("op", CARRY)
def test_carry(op: str) -> None:
    w = front()
    on, a, b = lanes_off(w), words(0, w), words(1, w)
    a[:, :20], b[:, 10:30] = 0xFFFFFFFF, 0
    carried = words(2, w) % 2 == 0
    w.v[1][...], w.v[2][...], w.s64[VCC // 2][...] = a, b, w.bits(carried)
    with_carry = op in CARRY[3:]
    execute(f"{op} v0, vcc, v1, v2" + (", vcc" if with_carry else ""), w)
    x, y = (b, a) if "rev" in op else (a, b)
    more = carried.astype(int) if with_carry else 0
    exact = x.astype(int) + y + more if "add" in op else x.astype(int) - y - more
    assert np.array_equal(w.v[0], np.where(on, exact % 2**32, POISON))
    assert np.array_equal(w.lanes(w.s64[VCC // 2]), on & ((exact < 0) | (exact >= 2**32)))


@pytest.mark.parametrize("op", ["v_mad_u64_u32", "v_mad_i64_i32"])
def test_wide_multiply_add(op: str) -> None:
    w = front()
    on, (a, b, low, high) = lanes_off(w), (words(seed, w) for seed in range(4))
    for row, values in ((1, a), (2, b), (4, low), (5, high)):
        w.v[row][...] = values
    execute(f"{op} v[6:7], s[8:9], v1, v2, v[4:5]", w)
    seen = (lambda x: x.view(np.int32)) if "i32" in op else (lambda x: x)
    for place in zip(*np.nonzero(on), strict=True):
        c = int(low[place]) | int(high[place]) << 32
        exact = int(seen(a)[place]) * int(seen(b)[place]) + c
        assert int(w.v[6][place]) | int(w.v[7][place]) << 32 == exact % 2**64
    assert (w.v[6][~on] == POISON).all()


@pytest.mark.parametrize(("op", "keep"), [("v_bitop3_b32", 0xFFFFFFFF), ("v_bitop3_b16", 0xFFFF)])
def test_bit_operation(op: str, keep: int) -> None:
    w = front()
    a, b, c = (words(seed, w) for seed in range(3))
    w.v[1][...], w.v[2][...], w.v[3][...] = a, b, c
    for truth, expected in ((0xC8, b & (a | c)), (0x96, a ^ b ^ c), (0x80, a & b & c), (0x0F, ~a)):
        execute(f"{op} v0, v1, v2, v3 bitop3:{truth:#x}", w)
        assert np.array_equal(w.v[0], expected & np.uint32(keep))


def test_multiply_add_into_its_summand() -> None:
    w = front()
    on, a, b, c = lanes_off(w), *(normals(seed, w) for seed in range(3))
    w.f[1][...], w.f[2][...], w.f[0][...] = a, b, c
    execute("v_fmac_f32_e32 v0, v1, v2", w)
    assert np.array_equal(w.f[0], np.where(on, (a.astype(np.float64) * b + c).astype(np.float32), c))


def test_mixed_multiply_add() -> None:
    w = front()
    halves = np.random.default_rng(0).normal(size=(2, 64, 2)).astype(np.float16)
    c, kept = normals(1, w), words(2, w)
    w.v[1][...], w.f[2][...] = halves.view(np.uint32)[..., 0], c
    high, low = halves[..., 1].astype(np.float64), halves[..., 0].astype(np.float64)
    execute("v_fma_mix_f32 v0, v1, -v1, v2 op_sel:[1,0,0] op_sel_hi:[1,1,0]", w)
    assert np.array_equal(w.f[0], (c - high * low).astype(np.float32))
    for op, shift in (("v_fma_mixlo_f16", 0), ("v_fma_mixhi_f16", 16)):
        w.v[0][...] = kept
        execute(f"{op} v0, |v1|, 1.0, v2 op_sel_hi:[1,0,0]", w)
        half = (np.abs(low) + c).astype(np.float32).astype(np.float16).view(np.uint16)
        assert np.array_equal(w.v[0] >> np.uint32(shift) & np.uint32(0xFFFF), half)
        assert np.array_equal((w.v[0] ^ kept) >> np.uint32(16 - shift) & np.uint32(0xFFFF), np.zeros_like(kept))


def divided(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """The sequence that compilers emit for a division."""
    w = front(len(numerator))
    w.f[1][...], w.f[2][...] = numerator, denominator
    for text in (
        "v_div_scale_f32 v3, s[4:5], v2, v2, v1",
        "v_div_scale_f32 v4, vcc, v1, v2, v1",
        "v_rcp_f32_e32 v5, v3",
        "v_fma_f32 v6, -v3, v5, 1.0",
        "v_fmac_f32_e32 v5, v6, v5",
        "v_mul_f32_e32 v6, v4, v5",
        "v_fma_f32 v7, -v3, v6, v4",
        "v_fmac_f32_e32 v6, v7, v5",
        "v_fma_f32 v4, -v3, v6, v4",
        "v_div_fmas_f32 v4, v4, v5, v6",
        "v_div_fixup_f32 v0, v4, v2, v1",
    ):
        execute(text, w)
    return w.f[0]


def test_division_is_rounded_as_ieee_does() -> None:
    random = np.random.default_rng(0)
    special = np.array(
        [0, -0.0, 1, -3, np.inf, -np.inf, np.nan, 3e38, 1e-38, 1e-44, 7e-45, 2.0**-126, 2.0**127], np.float32
    )
    a, b = (np.ldexp(random.normal(size=(8, 64)), random.integers(-140, 127, (8, 64))).astype(np.float32) for _ in "ab")
    a[0], b[0] = np.resize(special, 64), np.resize(np.repeat(special, 5), 64)
    a[1], b[1] = np.resize(special, 64), np.roll(np.resize(np.repeat(special, 5), 64), 29)
    with np.errstate(all="ignore"):
        expected = (a.astype(np.float64) / b).astype(np.float32)
    found = divided(a, b)
    # Subnormal quotients are rounded twice by the sequence itself.
    large = ~(np.abs(expected) < 2.0**-126)
    assert np.array_equal(found[large], expected[large], equal_nan=True)
    assert np.allclose(found[~large], expected[~large], rtol=0, atol=2.0**-149)
    assert np.array_equal(np.signbit(found)[~np.isnan(found)], np.signbit(expected)[~np.isnan(found)])


def test_lanes_to_scalars_and_back() -> None:
    w = front()
    w.s64[63][...] = [0xFF00, 2**63]
    w.exec_changed()
    w.v[1][...] = LANE + 100 * w.wave[:, None]
    execute("v_readfirstlane_b32 s0, v1", w)
    assert w.s[0].tolist() == [8, 163]
    execute("v_readlane_b32 s0, v1, 3", w)
    assert w.s[0].tolist() == [3, 103]
    w.s[2][...] = [5, 6]
    execute("v_writelane_b32 v1, s2, 7", w)
    assert w.v[1][:, 7].tolist() == [5, 6] and w.v[1][:, 8].tolist() == [8, 108]


@pytest.mark.parametrize("op", ["v_permlane16_swap_b32", "v_permlane32_swap_b32"])
def test_rows_change_places(op: str) -> None:
    w, size = front(1), int(op[10:12])
    w.v[0][...], w.v[1][...] = LANE, LANE + 64
    execute(f"{op} v0, v1", w)
    odd = LANE // size % 2 == 1
    assert np.array_equal(w.v[0][0], np.where(odd, LANE + 64 - size, LANE))
    assert np.array_equal(w.v[1][0], np.where(odd, LANE + 64, LANE + size))
    lanes_off(w)
    with pytest.raises(FaultError, match="while some are off"):
        execute(f"{op} v0, v1", w)


def test_count_of_lanes_below() -> None:
    w = front(1)
    w.s[2][...], w.s[3][...] = 0xF0F0F0F1, 0x80000003
    w.v[1][...] = 10
    execute("v_mbcnt_lo_u32_b32 v0, s2, v1", w)
    execute("v_mbcnt_hi_u32_b32 v0, s3, v0", w)
    bits = 0xF0F0F0F1 | 0x80000003 << 32
    assert w.v[0][0].tolist() == [10 + (bits & ((1 << lane) - 1)).bit_count() for lane in range(64)]


DPP = {
    "quad_perm:[3,2,1,0]": lambda n: n // 4 * 4 + 3 - n % 4,
    "row_shr:3": lambda n: n - 3 if n % 16 >= 3 else None,
    "row_shl:5": lambda n: n + 5 if n % 16 < 11 else None,
    "row_ror:4": lambda n: n // 16 * 16 + (n - 4) % 16,
    "row_newbcast:7": lambda n: n // 16 * 16 + 7,
    "row_bcast:15": lambda n: n // 16 * 16 - 1 if n >= 16 else None,
    "row_bcast:31": lambda n: n // 32 * 32 - 1 if n >= 32 else None,
    "row_mirror": lambda n: n // 16 * 16 + 15 - n % 16,
    "row_half_mirror": lambda n: n // 8 * 8 + 7 - n % 8,
    "wave_shr:1": lambda n: n - 1 if n else None,
}


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("pattern", DPP)
def test_dpp(pattern: str, zero: bool) -> None:
    w = front()
    on, given, kept = lanes_off(w), words(0, w), words(1, w)
    w.v[1][...], w.v[0][...] = given, kept
    execute(f"v_mov_b32_dpp v0, v1 {pattern} row_mask:0xb bank_mask:0x7" + (" bound_ctrl:0" if zero else ""), w)
    for wave, lane in np.ndindex(2, 64):
        source = DPP[pattern](lane)
        valid = source is not None and on[wave, source]
        expected = given[wave, source] if valid else 0
        written = on[wave, lane] and lane // 16 != 2 and lane % 16 // 4 != 3 and (valid or zero)
        assert w.v[0][wave, lane] == (expected if written else kept[wave, lane])


def test_every_pattern_is_tested() -> None:
    assert set(PATTERNS) == {pattern.split(":")[0] for pattern in DPP} - {"quad_perm"}


def test_sdwa() -> None:
    w = front()
    on, a, b, kept = lanes_off(w), words(0, w), words(1, w), words(2, w)
    w.v[1][...], w.v[2][...], w.v[0][...] = a, b, kept
    execute("v_add_u32_sdwa v0, v1, v2 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:WORD_1", w)
    total = (a >> 16 & 0xFF) + (b >> 16) & 0xFFFF
    assert np.array_equal(w.v[0], np.where(on, total << 16, kept))
    w.v[0][...] = kept
    execute("v_or_b32_sdwa v0, v1, v2 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD src1_sel:BYTE_0", w)
    byte = (a | (b & 0xFF)) & 0xFF
    assert np.array_equal(w.v[0], np.where(on, byte << 8 | kept & 0xFFFF00FF, kept))


def test_operands_with_signs_and_constants() -> None:
    w = front(1)
    w.f[1][...], w.s[4][...] = -2.5, struct.unpack("<I", struct.pack("<f", 8.0))[0]
    for text, expected in (
        ("v_add_f32_e64 v0, -|v1|, s4", 5.5),
        ("v_mul_f32_e64 v0, |v1|, -s4", -20.0),
        ("v_add_f32_e32 v0, 1.0, v1", -1.5),
        ("v_mul_f32_e32 v0, 0x41200000, v1", -25.0),
        ("v_fma_f32 v0, v1, 0, neg(0)", -0.0),
        ("v_add_f32_e64 v0, v1, s4 clamp", 1.0),
        ("v_mul_f32_e32 v0, 0.15915494, v1", -2.5 * np.float32(1 / (2 * math.pi))),
    ):
        execute(text, w)
        assert w.f[0][0, 0] == np.float32(expected) and np.signbit(w.f[0][0, 0]) == np.signbit(expected), text
    w.v[1][...] = 0x7777C100  # −2.5 in fp16
    execute("v_cvt_f32_f16_e64 v0, |v1|", w)
    assert (w.f[0] == 2.5).all()
    w.v[1][...] = 7
    execute("v_sub_u32_e64 v0, 3, v1 clamp", w)
    assert not w.v[0].any()
    execute("v_add_u32_e64 v0, -3, v1 clamp", w)
    assert (w.v[0] == 0xFFFFFFFF).all()


@pytest.mark.parametrize(
    "text", ["v_sad_u32 v0, v1, v2, v3", "v_mul_f32_e64 v0, v1, v2 mul:2", "v_interp_mov_f32 v0, p0, attr0.x"]
)
def test_unknown_is_a_fault_with_its_text(text: str) -> None:
    chip = "gfx900" if "interp" in text else "gfx950"
    with pytest.raises(FaultError, match=rf"unknown .*{text.split()[0]}"):
        execute(text, front(1), chip=chip)


def test_every_special_instruction_is_here() -> None:
    """By its name in this file."""
    assert set(SPECIAL) <= set(re.findall(r"\bv_\w+?(?=_e32|_e64|\b)", Path(__file__).read_text(encoding="utf-8")))
