"""What one lane computes: the tables of vector instructions that look at nothing but their operands.

A row is (shape, function), as in `scalar`: "f:ff" is fp32 of two fp32, "w" a word, "q" a pair of words, "h" an fp16 in
the low half of a word. Functions get arrays that broadcast to (waves, 64).
"""

from collections.abc import Callable

import numpy as np

from tests.gfx9emu.scalar import bit_field, count_ones, first_one, i32, i64, low, reversed_bits, u64, wide

Array = np.ndarray
Row = tuple[str, Callable]

U16, U32, U64, F16, F32, F64 = np.uint16, np.uint32, np.uint64, np.float16, np.float32, np.float64
HALF, LOW24, SHIFT = U32(0xFFFF), U32(0xFFFFFF), U32(31)
SMALLEST_NORMAL = np.finfo(F32).smallest_normal


def flushed(x: Array) -> Array:
    """0 for what is too small for a full fp32: the transcendental units know no subnormal numbers."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(F32(0), x), x)


def by_fp64(function: Callable) -> Callable:
    """A unit that is right to rounding and flushes: computed in fp64 and rounded."""
    return lambda x: flushed(function(flushed(x).astype(F64)).astype(F32))


def fma(a: Array, b: Array, c: Array) -> Array:
    """a·b + c, rounded once: in fp64, where the product is exact, then to fp32; and where the first rounding made a tie
    of what is none, back to the side on which it was. (Subnormal results may be one unit off.)"""
    product = a.astype(F64) * b
    total = product + c
    tie = (np.asarray(total).view(U64) & U64(0x1FFFFFFF)) == U64(0x10000000)
    if tie.any():
        part = total - product
        lost = (product - (total - part)) + (c - part)
        towards = np.where(lost > 0, np.inf, -np.inf)
        total = np.where(tie & (lost != 0) & np.isfinite(total), np.nextafter(total, towards), total)
    return total.astype(F32)


def to_integer(lowest: int, highest: int, dtype: type) -> Callable:
    """Rounded towards 0, saturated; NaN is 0."""
    return lambda x: np.clip(np.nan_to_num(np.trunc(x.astype(F64)), nan=0.0), lowest, highest).astype(dtype).view(U32)


def binary_exponent(x: Array) -> Array:
    """e with x = m · 2^e and m within 0.5 … 1; 0 for what has none."""
    return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(np.int32).view(U32)


def bf16_bits(x: Array) -> Array:
    """fp32 as bf16, to nearest even, in the low half of a word."""
    bits = np.ascontiguousarray(x).view(U32)
    nearest = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(x), (bits >> U32(16)) | U32(0x40), nearest)


def half_bits(x: Array) -> Array:
    """fp32 or fp16 as fp16, to nearest even, in the low half of a word."""
    return np.asarray(x).astype(F16).view(U16).astype(U32)


def towards_zero(x: Array) -> Array:
    """fp32 as fp16 bits, cut off."""
    nearest = x.astype(F16)
    away = np.abs(nearest.astype(F32)) > np.abs(x)
    return np.where(away, np.nextafter(nearest, F16(0)), nearest).view(U16).astype(U32)


def permuted_bytes(a: Array, b: Array, selectors: Array) -> Array:
    """v_perm_b32: each byte of the result is one of b's four, a's four, 0x00 or 0xFF. Sign selectors are not known."""
    a, b, selectors = np.broadcast_arrays(a, b, selectors)
    source = u64(a) << U64(32) | u64(b)
    out = np.zeros(source.shape, U64)
    for byte in range(4):
        which = u64((selectors >> U32(8 * byte)) & U32(255))
        if ((which >= 8) & (which < 12)).any():
            raise ValueError("v_perm_b32 with a selector of signs")
        picked = (source >> (U64(8) * np.minimum(which, U64(7)))) & U64(255)
        picked = np.where(which == 12, U64(0), np.where(which > 12, U64(255), picked))
        out |= picked << U64(8 * byte)
    return out.astype(U32)


def any_of_three(a: Array, b: Array, c: Array, truth: int) -> Array:
    """v_bitop3: bit number 4a + 2b + c of the truth table, bit by bit."""
    out = np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c)), U32)
    for case in range(8):
        if truth >> case & 1:
            out = out | (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    return out


def field(x: Array, offset: Array, width: Array, is_signed: bool) -> Array:
    """v_bfe: offset and width are words of their own."""
    return bit_field(x, (offset & SHIFT) | (width & SHIFT) << U32(16), is_signed)


def low24(x: Array) -> Array:
    """The low 24 bits, signed."""
    return i32(x << U32(8)) >> 8


def median(kind: Callable) -> Callable:
    """The middle one of three."""
    return lambda a, b, c: np.maximum(np.minimum(kind(a), kind(b)), np.minimum(np.maximum(kind(a), kind(b)), kind(c)))


def half(function: Callable) -> Callable:
    """A function of fp16, its result as bits of a word."""
    return lambda *x: half_bits(function(*x))


def low16(function: Callable) -> Callable:
    """A function of whole numbers of 16 bits."""
    return lambda a, b: function(a & HALF, b & HALF) & HALF


WHOLE: dict[str, Row] = {
    "v_mov_b32": ("w:w", lambda a: a),
    "v_accvgpr_read_b32": ("w:w", lambda a: a),
    "v_accvgpr_write_b32": ("w:w", lambda a: a),
    "v_accvgpr_mov_b32": ("w:w", lambda a: a),
    "v_not_b32": ("w:w", lambda a: ~a),
    "v_bfrev_b32": ("w:w", reversed_bits),
    "v_ffbl_b32": ("w:w", first_one),
    "v_add_u32": ("w:ww", lambda a, b: a + b),
    "v_sub_u32": ("w:ww", lambda a, b: a - b),
    "v_subrev_u32": ("w:ww", lambda a, b: b - a),
    "v_and_b32": ("w:ww", lambda a, b: a & b),
    "v_or_b32": ("w:ww", lambda a, b: a | b),
    "v_xor_b32": ("w:ww", lambda a, b: a ^ b),
    "v_xnor_b32": ("w:ww", lambda a, b: ~(a ^ b)),
    "v_lshlrev_b32": ("w:ww", lambda a, b: b << (a & SHIFT)),
    "v_lshrrev_b32": ("w:ww", lambda a, b: b >> (a & SHIFT)),
    "v_ashrrev_i32": ("w:ww", lambda a, b: (i32(b) >> i32(a & SHIFT)).view(U32)),
    "v_mul_lo_u32": ("w:ww", lambda a, b: a * b),
    "v_mul_hi_u32": ("w:ww", lambda a, b: (u64(a) * u64(b) >> U64(32)).astype(U32)),
    "v_mul_hi_i32": ("w:ww", lambda a, b: low(wide(a) * wide(b) >> 32)),
    "v_mul_u32_u24": ("w:ww", lambda a, b: (a & LOW24) * (b & LOW24)),
    "v_mul_i32_i24": ("w:ww", lambda a, b: (low24(a) * low24(b)).view(U32)),
    "v_min_u32": ("w:ww", np.minimum),
    "v_max_u32": ("w:ww", np.maximum),
    "v_min_i32": ("w:ww", lambda a, b: np.minimum(i32(a), i32(b)).view(U32)),
    "v_max_i32": ("w:ww", lambda a, b: np.maximum(i32(a), i32(b)).view(U32)),
    "v_bcnt_u32_b32": ("w:ww", lambda a, b: count_ones(a) + b),
    "v_pack_b32_f16": ("w:ww", lambda a, b: (a & HALF) | (b & HALF) << U32(16)),
    "v_add3_u32": ("w:www", lambda a, b, c: a + b + c),
    "v_lshl_add_u32": ("w:www", lambda a, b, c: (a << (b & SHIFT)) + c),
    "v_add_lshl_u32": ("w:www", lambda a, b, c: (a + b) << (c & SHIFT)),
    "v_lshl_or_b32": ("w:www", lambda a, b, c: (a << (b & SHIFT)) | c),
    "v_and_or_b32": ("w:www", lambda a, b, c: (a & b) | c),
    "v_or3_b32": ("w:www", lambda a, b, c: a | b | c),
    "v_xad_u32": ("w:www", lambda a, b, c: (a ^ b) + c),
    "v_bfe_u32": ("w:www", lambda a, b, c: field(a, b, c, False)),
    "v_bfe_i32": ("w:www", lambda a, b, c: field(a, b, c, True)),
    "v_bfi_b32": ("w:www", lambda a, b, c: (a & b) | (~a & c)),
    "v_perm_b32": ("w:www", permuted_bytes),
    "v_alignbit_b32": ("w:www", lambda a, b, c: ((u64(a) << U64(32) | b) >> u64(c & SHIFT)).astype(U32)),
    "v_mad_u32_u24": ("w:www", lambda a, b, c: (a & LOW24) * (b & LOW24) + c),
    "v_mad_i32_i24": ("w:www", lambda a, b, c: (low24(a) * low24(b)).view(U32) + c),
    "v_med3_i32": ("w:www", lambda a, b, c: median(i32)(a, b, c).view(U32)),
    "v_max3_u32": ("w:www", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_max3_i32": ("w:www", lambda a, b, c: np.maximum(np.maximum(i32(a), i32(b)), i32(c)).view(U32)),
    "v_min3_i32": ("w:www", lambda a, b, c: np.minimum(np.minimum(i32(a), i32(b)), i32(c)).view(U32)),
    "v_lshlrev_b16": ("w:ww", low16(lambda a, b: b << (a & U32(15)))),
    "v_lshrrev_b16": ("w:ww", low16(lambda a, b: b >> (a & U32(15)))),
    "v_add_u16": ("w:ww", low16(lambda a, b: a + b)),
    "v_sub_u16": ("w:ww", low16(lambda a, b: a - b)),
    "v_mul_lo_u16": ("w:ww", low16(lambda a, b: a * b)),
    "v_max_u16": ("w:ww", low16(np.maximum)),
    "v_min_u16": ("w:ww", low16(np.minimum)),
}
WIDE: dict[str, Row] = {
    "v_mov_b64": ("q:q", lambda a: a),
    "v_lshlrev_b64": ("q:wq", lambda a, b: b << u64(a & U32(63))),
    "v_lshrrev_b64": ("q:wq", lambda a, b: b >> u64(a & U32(63))),
    "v_ashrrev_i64": ("q:wq", lambda a, b: (i64(b) >> (a & U32(63)).astype(np.int64)).view(U64)),
    "v_lshl_add_u64": ("q:qwq", lambda a, b, c: (a << u64(b & U32(63))) + c),
}
FLOATING: dict[str, Row] = {
    "v_add_f32": ("f:ff", lambda a, b: a + b),
    "v_sub_f32": ("f:ff", lambda a, b: a - b),
    "v_subrev_f32": ("f:ff", lambda a, b: b - a),
    "v_mul_f32": ("f:ff", lambda a, b: a * b),
    "v_max_f32": ("f:ff", np.fmax),
    "v_min_f32": ("f:ff", np.fmin),
    "v_fma_f32": ("f:fff", fma),
    "v_fmamk_f32": ("f:fff", fma),
    "v_fmaak_f32": ("f:fff", fma),
    "v_max3_f32": ("f:fff", lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "v_min3_f32": ("f:fff", lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    "v_med3_f32": ("f:fff", median(lambda x: x)),
    "v_maximum3_f32": ("f:fff", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_minimum3_f32": ("f:fff", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_exp_f32": ("f:f", by_fp64(np.exp2)),
    "v_log_f32": ("f:f", by_fp64(np.log2)),
    "v_rcp_f32": ("f:f", by_fp64(np.reciprocal)),
    "v_rcp_iflag_f32": ("f:f", by_fp64(np.reciprocal)),
    "v_rsq_f32": ("f:f", by_fp64(lambda x: 1.0 / np.sqrt(x))),
    "v_sqrt_f32": ("f:f", by_fp64(np.sqrt)),
    "v_rndne_f32": ("f:f", np.rint),
    "v_floor_f32": ("f:f", np.floor),
    "v_ceil_f32": ("f:f", np.ceil),
    "v_trunc_f32": ("f:f", np.trunc),
    "v_fract_f32": ("f:f", lambda a: np.minimum(a - np.floor(a), F32(1 - 2**-24))),
    "v_ldexp_f32": ("f:fw", lambda a, b: np.ldexp(a.astype(F64), np.clip(i32(b), -400, 400)).astype(F32)),
    "v_frexp_mant_f32": ("f:f", lambda a: np.frexp(a)[0]),
    "v_frexp_exp_i32_f32": ("w:f", binary_exponent),
    "v_frexp_exp_i32_f64": ("w:q", lambda a: binary_exponent(a.view(F64))),
    "v_cvt_f64_f32": ("q:f", lambda a: a.astype(F64).view(U64)),
    "v_cvt_f32_u32": ("f:w", lambda a: a.astype(F32)),
    "v_cvt_f32_i32": ("f:w", lambda a: i32(a).astype(F32)),
    "v_cvt_u32_f32": ("w:f", to_integer(0, 2**32 - 1, np.uint32)),
    "v_cvt_i32_f32": ("w:f", to_integer(-(2**31), 2**31 - 1, np.int32)),
    "v_cvt_f32_f16": ("f:h", lambda a: a.astype(F32)),
    "v_cvt_f16_f32": ("w:f", half_bits),
    "v_cvt_pk_bf16_f32": ("w:ff", lambda a, b: bf16_bits(a) | bf16_bits(b) << U32(16)),
    "v_cvt_pk_f16_f32": ("w:ff", lambda a, b: half_bits(a) | half_bits(b) << U32(16)),
    "v_cvt_pkrtz_f16_f32": ("w:ff", lambda a, b: towards_zero(a) | towards_zero(b) << U32(16)),
    **{f"v_cvt_f32_ubyte{n}": ("f:w", lambda a, n=n: (a >> U32(8 * n) & U32(255)).astype(F32)) for n in range(4)},
    "v_add_f16": ("w:hh", half(lambda a, b: a + b)),
    "v_sub_f16": ("w:hh", half(lambda a, b: a - b)),
    "v_mul_f16": ("w:hh", half(lambda a, b: a * b)),
    "v_max_f16": ("w:hh", half(np.fmax)),
    "v_min_f16": ("w:hh", half(np.fmin)),
}
TABLE = {**WHOLE, **WIDE, **FLOATING}
# For two functions of one instruction, low half and high half.
PACKED = {
    "v_pk_add_f32": lambda a, b: a + b,
    "v_pk_mul_f32": lambda a, b: a * b,
    "v_pk_fma_f32": fma,
}
COMPARISONS: dict[str, Callable] = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "ne": np.not_equal,
    # Of floats, the ones that are false for NaN and the ones that are true.
    "lg": lambda a, b: (a < b) | (a > b),
    "neq": np.not_equal,
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
}


def exponent(x: Array) -> Array:
    """The biased exponent of fp32."""
    return (np.ascontiguousarray(x).view(U32) >> U32(23) & U32(255)).astype(np.int32)


def is_subnormal(x: Array) -> Array:
    """Whether fp32 is neither 0 nor of full precision."""
    return (x != 0) & (np.abs(x) < SMALLEST_NORMAL)


def divide_scale(x: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """v_div_scale_f32: `x` (one of the other two) brought to where a Newton step neither over- nor underflows, and
    whether v_div_fmas must bring the quotient back. Where the manual leaves it open, so that the sequence of
    instructions that compilers emit divides as IEEE has it."""
    quotient, inverse = numerator / denominator, F32(1) / denominator
    far = exponent(numerator) - exponent(denominator) >= 96
    tiny, huge, low_quotient = is_subnormal(denominator), is_subnormal(inverse), is_subnormal(quotient)
    up, down = x * F32(2.0**64), x * F32(2.0**-64)
    is_denominator, is_numerator = x == denominator, x == numerator
    value = np.select(
        [
            (numerator == 0) | (denominator == 0),
            far,
            tiny,
            huge & low_quotient,
            huge,
            low_quotient,
            exponent(numerator) <= 23,
        ],
        [
            np.full_like(quotient, np.nan),
            np.where(is_denominator, up, x),
            up,
            np.where(is_denominator, down, x),
            down,
            np.where(is_numerator, up, x),
            up,
        ],
        x,
    )
    nothing = (numerator == 0) | (denominator == 0)
    back = ~nothing & (far | (~tiny & low_quotient))
    return value, back


def divide_fmas(a: Array, b: Array, c: Array, back: Array) -> Array:
    """v_div_fmas_f32: the last step of the division, scaled back where v_div_scale said so."""
    exact = a.astype(F64) * b + c
    scale = np.where(back, np.where(exponent(c) > 127, 2.0**64, 2.0**-64), 1.0)
    return (exact.astype(F32).astype(F64) * scale).astype(F32)


def divide_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """v_div_fixup_f32: the quotient, and what IEEE has for everything special."""
    sign = np.signbit(denominator) ^ np.signbit(numerator)
    zero, infinite, nan = F32(0), F32(np.inf), F32(np.nan)
    difference = exponent(numerator) - exponent(denominator)
    size = np.select(
        [
            np.isnan(numerator) | np.isnan(denominator),
            ((denominator == 0) & (numerator == 0)) | (np.isinf(denominator) & np.isinf(numerator)),
            (denominator == 0) | np.isinf(numerator),
            np.isinf(denominator) | (numerator == 0),
            difference < -150,
            np.isnan(quotient),  # what a step makes of an infinite quotient
        ],
        [nan, nan, infinite, zero, zero, infinite],
        np.abs(quotient),
    ).astype(F32)
    return np.where(sign, -size, size)
