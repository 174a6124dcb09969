"""Every row of the tables of vector arithmetic, a lane at a time, against Python's own numbers.

References take and return Python ints (words, pairs) and floats (fp32, fp16); their results are rounded here. A row
without a reference fails by its name.
"""

import itertools
import math
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.gfx9emu.arithmetic import TABLE
from tests.gfx9emu.assembler import execute, front, lanes_off
from tests.gfx9emu.decode import signed
from tests.gfx9emu.front import POISON

pytestmark = pytest.mark.amd

WORDS = [0, 1, 2, 7, 31, 32, 0x0C0D0706, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x00FFFFFF, 0x12345678]
FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    2.5,
    -2.5,
    3.7,
    1e-40,
    -1e-44,
    1.2e-38,
    3e38,
    math.inf,
    -math.inf,
    math.nan,
    100.3,
    -120.9,
    4e9,
    -3e9,
    65519.0,
    65520.0,
    6e-8,
    1 + 2**-11,
    1 - 2**-12,
]


def i32(x: int) -> int:
    return signed(x, 32)


def i24(x: int) -> int:
    return signed(x, 24)


def fp32(x: float | Fraction) -> float:
    """Rounded to fp32."""
    if not isinstance(x, Fraction) and not math.isfinite(x):
        return x
    try:
        # A Fraction is rounded to odd in fp64 first, so that the second rounding is right.
        return struct.unpack("<f", struct.pack("<f", to_odd(x) if isinstance(x, Fraction) else x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def to_odd(x: Fraction) -> float:
    near = float(x)
    if Fraction(near) == x or struct.unpack("<q", struct.pack("<d", near))[0] & 1:
        return near
    return math.nextafter(near, math.inf if Fraction(near) < x else -math.inf)


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def fma(a: float, b: float, c: float) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return fp32(exact) if exact else a * b + c


def transcendental(function: Callable[[float], float]) -> Callable[[float], float]:
    def of(x: float) -> float:
        try:
            return flushed(fp32(function(flushed(x))))
        except (ValueError, OverflowError):
            return math.nan

    return of


def inverse(x: float) -> float:
    return math.copysign(math.inf, x) if x == 0 else 1 / x


def smaller(a: float, b: float) -> float:
    return a if math.isnan(b) or a < b else b


def larger(a: float, b: float) -> float:
    return a if math.isnan(b) or a > b else b


def nan_if_any(function: Callable[..., float]) -> Callable[..., float]:
    return lambda *x: math.nan if any(map(math.isnan, x)) else function(*x)


def whole(lowest: int, highest: int) -> Callable[[float], int]:
    return lambda x: 0 if math.isnan(x) else int(max(lowest, min(highest, x)))


def fp16_bits(x: float) -> int:
    try:
        return struct.unpack("<H", struct.pack("<e", x))[0]
    except OverflowError:
        return 0xFC00 if x < 0 else 0x7C00


def fp16_cut(x: float) -> int:
    bits = fp16_bits(x)
    return bits - 1 if math.isfinite(x) and abs(struct.unpack("<e", struct.pack("<H", bits))[0]) > abs(x) else bits


def bf16(x: float) -> int:
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    if math.isnan(x):
        return bits >> 16 | 0x40
    low, high = bits & 0xFFFF, bits >> 16
    return high + (low > 0x8000 or (low == 0x8000 and high & 1))


def field(a: int, b: int, c: int) -> int:
    return (a >> (b & 31)) & ((1 << (c & 31)) - 1)


def permuted(a: int, b: int, selectors: int) -> int:
    source = (a << 32 | b).to_bytes(8, "little")
    picked = [source[s] if s < 8 else 0 if s == 12 else 255 for s in selectors.to_bytes(4, "little")]
    return int.from_bytes(bytes(picked), "little")


def binary_exponent(x: float) -> int:
    return math.frexp(x)[1] if math.isfinite(x) else 0


def middle(*x: float) -> float:
    return sorted(x)[1]


REFERENCE: dict[str, Callable] = {
    **dict.fromkeys(
        ("v_mov_b32", "v_mov_b64", "v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32"), lambda a: a
    ),
    "v_not_b32": lambda a: ~a,
    "v_bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_ffbl_b32": lambda a: (a & -a).bit_length() - 1,
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32": lambda a, b: b << a % 32,
    "v_lshrrev_b32": lambda a, b: b >> a % 32,
    "v_ashrrev_i32": lambda a, b: i32(b) >> a % 32,
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_hi_i32": lambda a, b: i32(a) * i32(b) >> 32,
    "v_mul_u32_u24": lambda a, b: a % 2**24 * (b % 2**24),
    "v_mul_i32_i24": lambda a, b: i24(a) * i24(b),
    "v_min_u32": min,
    "v_max_u32": max,
    "v_min_i32": lambda a, b: min(i32(a), i32(b)),
    "v_max_i32": lambda a, b: max(i32(a), i32(b)),
    "v_bcnt_u32_b32": lambda a, b: a.bit_count() + b,
    "v_pack_b32_f16": lambda a, b: a % 2**16 | b % 2**16 << 16,
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << b % 32) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << c % 32,
    "v_lshl_or_b32": lambda a, b, c: a << b % 32 | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_bfe_u32": field,
    "v_bfe_i32": lambda a, b, c: signed(field(a, b, c), c % 32) if c % 32 else 0,
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_perm_b32": permuted,
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> c % 32,
    "v_mad_u32_u24": lambda a, b, c: a % 2**24 * (b % 2**24) + c,
    "v_mad_i32_i24": lambda a, b, c: i24(a) * i24(b) + c,
    "v_med3_i32": lambda a, b, c: middle(i32(a), i32(b), i32(c)),
    "v_max3_u32": max,
    "v_max3_i32": lambda a, b, c: max(i32(a), i32(b), i32(c)),
    "v_min3_i32": lambda a, b, c: min(i32(a), i32(b), i32(c)),
    "v_lshlrev_b16": lambda a, b: (b << a % 16) % 2**16,
    "v_lshrrev_b16": lambda a, b: b % 2**16 >> a % 16,
    "v_add_u16": lambda a, b: (a + b) % 2**16,
    "v_sub_u16": lambda a, b: (a - b) % 2**16,
    "v_mul_lo_u16": lambda a, b: a * b % 2**16,
    "v_max_u16": lambda a, b: max(a % 2**16, b % 2**16),
    "v_min_u16": lambda a, b: min(a % 2**16, b % 2**16),
    "v_lshlrev_b64": lambda a, b: b << a % 64,
    "v_lshrrev_b64": lambda a, b: b >> a % 64,
    "v_ashrrev_i64": lambda a, b: signed(b, 64) >> a % 64,
    "v_lshl_add_u64": lambda a, b, c: (a << b % 64) + c,
    "v_add_f32": lambda a, b: a + b,
    "v_sub_f32": lambda a, b: a - b,
    "v_subrev_f32": lambda a, b: b - a,
    "v_mul_f32": lambda a, b: a * b,
    "v_max_f32": larger,
    "v_min_f32": smaller,
    **dict.fromkeys(("v_fma_f32", "v_fmamk_f32", "v_fmaak_f32"), fma),
    "v_max3_f32": lambda a, b, c: larger(larger(a, b), c),
    "v_min3_f32": lambda a, b, c: smaller(smaller(a, b), c),
    "v_med3_f32": lambda a, b, c: math.nan if any(map(math.isnan, (a, b, c))) else middle(a, b, c),
    "v_maximum3_f32": nan_if_any(max),
    "v_minimum3_f32": nan_if_any(min),
    "v_exp_f32": transcendental(lambda x: math.inf if x > 200 else math.exp2(x)),
    "v_log_f32": transcendental(lambda x: -math.inf if x == 0 else math.log2(x)),
    **dict.fromkeys(("v_rcp_f32", "v_rcp_iflag_f32"), transcendental(inverse)),
    "v_rsq_f32": transcendental(lambda x: inverse(math.sqrt(x))),
    "v_sqrt_f32": transcendental(math.sqrt),
    "v_rndne_f32": lambda a: float(round(a)) if math.isfinite(a) else a,
    "v_floor_f32": lambda a: float(math.floor(a)) if math.isfinite(a) else a,
    "v_ceil_f32": lambda a: float(math.ceil(a)) if math.isfinite(a) else a,
    "v_trunc_f32": lambda a: float(math.trunc(a)) if math.isfinite(a) else a,
    "v_fract_f32": lambda a: min(a - math.floor(a), 1 - 2**-24) if math.isfinite(a) else math.nan,
    "v_ldexp_f32": lambda a, b: a * 2.0 ** max(-400, min(400, i32(b))),
    "v_frexp_mant_f32": lambda a: math.frexp(a)[0],
    "v_frexp_exp_i32_f32": binary_exponent,
    "v_frexp_exp_i32_f64": lambda a: binary_exponent(struct.unpack("<d", a.to_bytes(8, "little"))[0]),
    "v_cvt_f64_f32": lambda a: int.from_bytes(struct.pack("<d", a), "little"),
    "v_cvt_f32_u32": float,
    "v_cvt_f32_i32": lambda a: float(i32(a)),
    "v_cvt_u32_f32": whole(0, 2**32 - 1),
    "v_cvt_i32_f32": whole(-(2**31), 2**31 - 1),
    "v_cvt_f32_f16": lambda a: a,
    "v_cvt_f16_f32": fp16_bits,
    "v_cvt_pk_bf16_f32": lambda a, b: bf16(a) | bf16(b) << 16,
    "v_cvt_pk_f16_f32": lambda a, b: fp16_bits(a) | fp16_bits(b) << 16,
    "v_cvt_pkrtz_f16_f32": lambda a, b: fp16_cut(a) | fp16_cut(b) << 16,
    **{f"v_cvt_f32_ubyte{n}": lambda a, n=n: float(a >> 8 * n & 255) for n in range(4)},
    "v_add_f16": lambda a, b: fp16_bits(a + b),
    "v_sub_f16": lambda a, b: fp16_bits(a - b),
    "v_mul_f16": lambda a, b: fp16_bits(a * b),
    "v_max_f16": lambda a, b: fp16_bits(larger(a, b)),
    "v_min_f16": lambda a, b: fp16_bits(smaller(a, b)),
}
# Which NaN comes out, and the sign of the larger of two zeros, no program of ours asks.
ONE_ULP = ("v_exp_f32", "v_log_f32", "v_rsq_f32")
TEXT = {
    "v_fmamk_f32": "v_fmamk_f32 v0, v2, 0x40200000, v6",
    "v_fmaak_f32": "v_fmaak_f32 v0, v2, v4, 0x40200000",
    "v_accvgpr_read_b32": "v_accvgpr_read_b32 v0, a2",
    "v_accvgpr_write_b32": "v_accvgpr_write_b32 a0, v2",
    "v_accvgpr_mov_b32": "v_accvgpr_mov_b32 a0, a2",
}


def test_every_row_has_a_reference() -> None:
    assert set(REFERENCE) == set(TABLE)


def operands(kind: str, count: int, seed: int) -> list[int]:
    """Bits of `count` operands of a kind: the awkward ones in every pairing, then random ones."""
    random = np.random.default_rng(seed)
    if kind == "w":
        return [WORDS[i % len(WORDS)] if i < 200 else int(random.integers(2**32)) for i in random.permutation(count)]
    if kind == "q":
        return [int(x) for x in random.integers(2**64, size=count, dtype=np.uint64)]
    values = [FLOATS[i % len(FLOATS)] if i < 200 else float(random.normal()) for i in random.permutation(count)]
    pack, unpack = ("<e", "<H") if kind == "h" else ("<f", "<I")
    values = [max(-6e4, min(6e4, v)) for v in values] if kind == "h" else values
    return [struct.unpack(unpack, struct.pack(pack, v))[0] for v in values]


def as_number(kind: str, bits: int) -> float | int:
    if kind in "wq":
        return bits
    return struct.unpack("<e" if kind == "h" else "<f", bits.to_bytes(2 if kind == "h" else 4, "little"))[0]


def text_of(op: str, shape: str) -> str:
    """The instruction with destination v0 and sources v2, v4, v6, in pairs where they are wide."""
    target, sources = shape.split(":")
    names = [
        f"v[{n}:{n + 1}]" if kind == "q" else f"v{n}" for n, kind in zip((0, 2, 4, 6), target + sources, strict=False)
    ]
    return TEXT.get(op, f"{op} {', '.join(names)}")


@pytest.mark.parametrize("op", TABLE)
def test_row(op: str) -> None:
    target, sources = TABLE[op][0].split(":")
    w = front(waves=8)
    on, count, accumulators = lanes_off(w).ravel(), 8 * 64, 256 * ("accvgpr" in op)
    bits = [operands(kind, count, seed) for seed, kind in enumerate(sources)]
    if op == "v_perm_b32":
        bits[2] = [
            int.from_bytes(bytes(x % 15 if x % 15 < 8 else 12 + x % 2 for x in v.to_bytes(4, "little")), "little")
            for v in bits[2]
        ]
    for place, column in zip((2, 4, 6), bits, strict=False):
        for offset in (0, accumulators):
            w.v[place + offset][...] = np.array([b & 0xFFFFFFFF for b in column], np.uint32).reshape(8, 64)
            w.v[place + 1 + offset][...] = np.array([b >> 32 for b in column], np.uint32).reshape(8, 64)
    execute(text_of(op, TABLE[op][0]), w, among=tuple(text_of(op, shape) for op, (shape, _) in TABLE.items()))
    first = 256 if op in ("v_accvgpr_write_b32", "v_accvgpr_mov_b32") else 0
    low, high = w.v[first].ravel().tolist(), w.v[first + 1].ravel().tolist()
    literal = {"v_fmamk_f32": 1, "v_fmaak_f32": 2}.get(op)
    for lane in range(count):
        if not on[lane]:
            assert low[lane] == POISON
            continue
        numbers = [as_number(kind, column[lane]) for kind, column in zip(sources, bits, strict=True)]
        if literal is not None:
            numbers[literal] = 2.5
        expected = REFERENCE[op](*numbers)
        found = low[lane] | high[lane] << 32 if target == "q" else low[lane]
        same(op, target, found, expected, numbers)


def same(op: str, kind: str, found: int, expected: float | int, numbers: list[float | int]) -> None:
    """One lane's result, as bits, against the reference's number."""
    if kind in "wq":
        halves = (range(0, 32, 16) if "pk" in op else [0]) if "16" in op and "cvt" in op else []
        if any(is_nan16(int(expected) >> at, "bf16" in op) for at in halves):
            assert any(map(math.isnan, numbers)), (op, numbers)
            return
        assert found == int(expected) % 2 ** (64 if kind == "q" else 32) or (
            "f16" in op and nan_pair(found, int(expected))
        ), (
            op,
            numbers,
            hex(found),
        )
        return
    value, expected = struct.unpack("<f", found.to_bytes(4, "little"))[0], fp32(expected)
    if math.isnan(expected):
        assert math.isnan(value), (op, numbers, value)
    elif op in ONE_ULP and math.isfinite(expected):
        assert abs(value - expected) <= abs(expected) * 2.0**-23, (op, numbers, value)
    else:
        assert value == expected, (op, numbers, value)


def is_nan16(bits: int, is_bf16: bool) -> bool:
    exponent, fraction = (0x7F80, 0x7F) if is_bf16 else (0x7C00, 0x3FF)
    return bits & exponent == exponent and bits & fraction != 0


def nan_pair(found: int, expected: int) -> bool:
    """Both are NaN in fp16, or zeros of either sign, which min and max need not tell apart."""
    return (is_nan16(found, False) and is_nan16(expected, False)) or (found | expected) & 0x7FFF == 0


def test_references_round_as_ieee_does() -> None:
    assert fp32(Fraction(1) + Fraction(1, 2**24)) == 1.0
    assert fp32(Fraction(1) + Fraction(1, 2**24) + Fraction(1, 2**80)) == 1 + 2**-23
    assert all(fma(a, b, 0.25) == a * b + 0.25 for a, b in itertools.product((1.0, 2.0, 3.0), repeat=2))
