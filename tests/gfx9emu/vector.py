"""Instructions on lanes: the tables of `arithmetic` bound to registers, with the modifiers of DPP and SDWA; and those
that need more than their operands: carries, masks, lanes of other numbers."""

import re
from collections.abc import Callable

import numpy as np

from tests.gfx9emu import arithmetic, matrix
from tests.gfx9emu.arithmetic import COMPARISONS, F16, F32, HALF, PACKED, TABLE, U16, U32, U64
from tests.gfx9emu.decode import Instruction
from tests.gfx9emu.faults import FaultError
from tests.gfx9emu.front import LANES, VCC, Front
from tests.gfx9emu.lanes import Moved, moved_lanes, part_of_word, placed_in_word
from tests.gfx9emu.machine import Machine
from tests.gfx9emu.operands import (
    Reader,
    floats,
    lanes_register,
    mask,
    pairs,
    register,
    scalar,
    signs,
    words,
    write_floats,
    write_mask,
    write_pairs,
    write_scalar,
    write_words,
)
from tests.gfx9emu.scalar import i32, i64, u64, wide

Array = np.ndarray
Step = Callable[[Front], None]
WRITE = {"w": write_words, "f": write_floats, "q": write_pairs}
LANE = np.arange(LANES)


def bind(ins: Instruction, machine: Machine) -> Step:
    """The step of an instruction whose name begins with v_."""
    if ins.op in TABLE:
        return _table_step(ins)
    if ins.op.startswith("v_cmp_"):
        return _compare(ins)
    if ins.op.startswith("v_mfma_"):
        return matrix.bind(ins)
    special = SPECIAL.get(ins.op) or (_packed if ins.op in PACKED else None)
    if special is None:
        raise ins.unknown()
    return special(ins, *ins.args)


def source(ins: Instruction, number: int, kind: str, moved: Moved | None = None) -> Reader:
    """Operand `number` (0 is the first source) with what the modifiers do to it."""
    text, selected = ins.args[number + 1], ins.take(f"src{number}_sel", "DWORD")
    if moved is None and selected == "DWORD" and kind != "h":
        return {"w": words, "f": floats, "q": pairs}[kind](text)
    text, negated, magnitude = signs(text) if kind == "h" else (text, False, False)
    read = words(text) if kind != "f" else _bits(floats(text))
    if moved is not None:
        read = moved.reads(read)
    if selected != "DWORD":
        read = part_of_word(read, selected)
    if kind == "f":
        return lambda w: read(w).view(F32)
    if kind == "h":
        keep, flip = U16(0x7FFF if magnitude else 0xFFFF), U16(0x8000 if negated else 0)
        return lambda w: ((read(w).astype(U16) & keep) ^ flip).view(F16)
    return read


def _bits(read: Reader) -> Reader:
    return lambda w: read(w).view(U32)


def _table_step(ins: Instruction) -> Step:
    shape, function = TABLE[ins.op]
    target, kinds = shape.split(":")
    if len(ins.args) != 1 + len(kinds):
        raise ins.unknown()
    moved = moved_lanes(ins)
    reads = [source(ins, i, kind, moved if i == 0 else None) for i, kind in enumerate(kinds)]
    function = _clamped(ins, function, target)
    placed = placed_in_word(ins)
    if moved is not None:
        write = moved.writes(ins.args[0])
    elif placed is not None:
        write = placed
    else:
        write = WRITE[target](ins.args[0])
    if target == "f" and (moved is not None or placed is not None):
        words_of, function = function, lambda *x: np.asarray(words_of(*x), F32).view(U32)
    if len(reads) == 1:
        (a,) = reads
        return lambda w: write(w, function(a(w)))
    if len(reads) == 2:
        a, b = reads
        return lambda w: write(w, function(a(w), b(w)))
    a, b, c = reads
    return lambda w: write(w, function(a(w), b(w), c(w)))


def _clamped(ins: Instruction, function: Callable, target: str) -> Callable:
    """With the flag: fp32 is kept within 0 … 1, sums of words saturate."""
    if "clamp" not in ins.modifiers:
        return function
    ins.take("clamp")
    if ins.op == "v_sub_u32":
        return lambda a, b: np.where(a < b, U32(0), a - b)
    if ins.op == "v_add_u32":
        return lambda a, b: np.where(a + b < a, U32(0xFFFFFFFF), a + b)
    if target == "f":
        return lambda *x: np.clip(function(*x), F32(0), F32(1))
    raise ins.unknown()


def _compare(ins: Instruction) -> Step:
    _, _, name, number = ins.op.split("_")
    kind = {"f32": "f", "u64": "q", "i64": "q", "f16": "h"}.get(number, "w")
    if name not in COMPARISONS or number not in ("f32", "u64", "i64", "f16", "i32", "u32", "u16", "i16"):
        raise ins.unknown()
    compare, write = COMPARISONS[name], write_mask(ins.args[0])
    a, b = source(ins, 0, kind), source(ins, 1, kind)
    as_number = {
        "i32": i32, "i64": i64, "u16": lambda x: x & HALF, "i16": lambda x: x.astype(U16).view(np.int16),
    }.get(number, lambda x: x)  # fmt: skip
    return lambda w: write(w, compare(as_number(a(w)), as_number(b(w))))


def _packed(ins: Instruction, target: str, *texts: str) -> Step:
    """Two fp32 in two registers; op_sel says which of a source's two each half takes."""
    function, row, count = PACKED[ins.op], lanes_register(target), len(texts)
    halves = []
    for half, select, negate in (("lo", "op_sel", "neg_lo"), ("hi", "op_sel_hi", "neg_hi")):
        chosen = ins.numbers(select, [int(half == "hi")] * count)
        signs = ins.numbers(negate, [0] * count)
        halves.append([_half_of_pair(*given) for given in zip(texts, chosen, signs, strict=True)])
    low, high = halves

    def step(w: Front) -> None:
        first, second = function(*(read(w) for read in low)), function(*(read(w) for read in high))
        for register_row, value in ((row, first), (row + 1, second)):
            np.copyto(w.f[register_row], value, where=w.active)

    return step


def _half_of_pair(text: str, second: int, negative: int) -> Reader:
    found = register(text)
    if found is None:
        read = floats(text)
    elif found[0] == "s":
        number = found[1] + (second if found[2] == 2 else 0)
        read = lambda w: w.sv[number].view(F32)  # noqa: E731
    else:
        row = lanes_register(text) + second
        read = lambda w: w.f[row]  # noqa: E731
    return (lambda w: -read(w)) if negative else read


def _packed_move(ins: Instruction, target: str, a: str, b: str) -> Step:
    """v_pk_mov_b32: the low half of the result from a, the high one from b."""
    low, high = ins.numbers("op_sel", [0, 0])
    ins.numbers("op_sel_hi", [1, 1])
    reads = [_half_of_pair(a, low, 0), _half_of_pair(b, high, 0)]
    row = lanes_register(target)

    def step(w: Front) -> None:
        # Copies: the first result may be the second source.
        for register_row, value in zip((row, row + 1), [read(w).copy() for read in reads], strict=True):
            np.copyto(w.f[register_row], value, where=w.active)

    return step


def _select(ins: Instruction, target: str, a: str, b: str, chosen: str) -> Step:
    kind = "f" if any(sign in a + b for sign in ("-v", "-s", "-|", "|")) else "w"
    read_a, read_b, read_mask = source(ins, 0, kind), source(ins, 1, kind), mask(chosen)
    write = placed_in_word(ins) or WRITE[kind](target)
    return lambda w: write(w, np.where(read_mask(w), read_b(w), read_a(w)))


def _multiply_add_wide(ins: Instruction, target: str, carry: str, a: str, b: str, c: str) -> Step:
    """v_mad_u64_u32 and v_mad_i64_i32: a·b + c in 64 bits."""
    read_a, read_b, read_c = words(a), words(b), pairs(c)
    write, write_carry = write_pairs(target), write_mask(carry)
    to_wide = u64 if ins.op == "v_mad_u64_u32" else lambda x: wide(x).astype(U64)

    def step(w: Front) -> None:
        product, c64 = to_wide(read_a(w)) * to_wide(read_b(w)), read_c(w)
        total = np.broadcast_to(product + c64, w.active.shape)
        carried = total < c64
        write(w, total)
        write_carry(w, carried)

    return step


def _with_carry(ins: Instruction, target: str, carry_out: str, a: str, b: str, carry_in: str | None = None) -> Step:
    write, write_carry = write_words(target), write_mask(carry_out)
    read_a, read_b = words(a), words(b)
    read_carry = mask(carry_in) if carry_in else lambda w: np.False_
    sign = 1 if ins.op.startswith("v_add") else -1
    if ins.op.startswith("v_subbrev") or ins.op.startswith("v_subrev"):
        read_a, read_b = read_b, read_a

    def step(w: Front) -> None:
        total = read_a(w).astype(np.int64) + sign * (read_b(w).astype(np.int64) + read_carry(w))
        total = np.broadcast_to(total, w.active.shape)
        write(w, total.astype(U32))
        write_carry(w, (total >> 32) != 0)

    return step


def _bit_operation(ins: Instruction, target: str, a: str, b: str, c: str) -> Step:
    reads, write, truth = [words(text) for text in (a, b, c)], write_words(target), ins.number("bitop3")
    keep = HALF if ins.op.endswith("b16") else U32(0xFFFFFFFF)
    return lambda w: write(w, arithmetic.any_of_three(*(read(w) for read in reads), truth) & keep)


def _multiply_add_to(ins: Instruction, target: str, *_: str) -> Step:
    """v_fmac_f32: what is there is the summand."""
    moved = moved_lanes(ins)
    a, b, c = source(ins, 0, "f", moved), source(ins, 1, "f"), floats(target)
    if moved is None:
        write = write_floats(target)
        return lambda w: write(w, arithmetic.fma(a(w), b(w), c(w)))
    write = moved.writes(target)
    return lambda w: write(w, arithmetic.fma(a(w), b(w), c(w)).view(U32))


def _multiply_add_mixed(ins: Instruction, target: str, *texts: str) -> Step:
    """v_fma_mix…: each source is fp32 or, by op_sel_hi, fp16, from the half that op_sel says. The result is fp32, or
    fp16 in one half of a register whose other half stays."""
    halves, is_half = ins.numbers("op_sel", [0, 0, 0]), ins.numbers("op_sel_hi", [0, 0, 0])
    reads = [_mixed(*given) for given in zip(texts, is_half, halves, strict=True)]
    function = _clamped(ins, lambda *x: arithmetic.fma(*x), "f")
    if ins.op == "v_fma_mix_f32":
        write = write_floats(target)
        return lambda w: write(w, function(*(read(w) for read in reads)))
    row, put = lanes_register(target), write_words(target)
    shift, kept = (U32(16), HALF) if ins.op == "v_fma_mixhi_f16" else (U32(0), ~HALF)
    half_bits = arithmetic.half_bits
    return lambda w: put(w, half_bits(function(*(read(w) for read in reads))) << shift | w.v[row] & kept)


def _mixed(text: str, is_half: int, half: int) -> Reader:
    bare, negated, magnitude = signs(text)
    if not is_half or register(bare) is None:
        return floats(text)
    read, shift = words(bare), U32(16 * half)

    def value(w: Front) -> Array:
        x = ((read(w) >> shift) & HALF).astype(U16).view(F16).astype(F32)
        x = np.abs(x) if magnitude else x
        return -x if negated else x

    return value


def _divide_scale(ins: Instruction, target: str, back: str, x: str, denominator: str, numerator: str) -> Step:
    reads, write, write_back = [floats(t) for t in (x, denominator, numerator)], write_floats(target), write_mask(back)

    def step(w: Front) -> None:
        value, scaled = arithmetic.divide_scale(*(np.broadcast_to(r(w), w.active.shape) for r in reads))
        write(w, value)
        write_back(w, scaled)

    return step


def _divide_fmas(ins: Instruction, target: str, *texts: str) -> Step:
    reads, write = [floats(text) for text in texts], write_floats(target)
    return lambda w: write(w, arithmetic.divide_fmas(*(read(w) for read in reads), w.lanes(w.s64[VCC // 2])))


def _divide_fixup(ins: Instruction, target: str, *texts: str) -> Step:
    reads, write = [floats(text) for text in texts], write_floats(target)
    return lambda w: write(w, arithmetic.divide_fixup(*(read(w) for read in reads)))


def _read_first_lane(ins: Instruction, target: str, text: str) -> Step:
    write, read = write_scalar(target), words(text)

    def step(w: Front) -> None:
        lanes = np.broadcast_to(read(w), w.active.shape)
        write(w, lanes[np.arange(len(w)), w.active.argmax(1)])

    return step


def _read_lane(ins: Instruction, target: str, text: str, lane: str) -> Step:
    write, row, which = write_scalar(target), lanes_register(text), scalar(lane)
    return lambda w: write(w, w.v[row][np.arange(len(w)), which(w) & U32(63)])


def _write_lane(ins: Instruction, target: str, text: str, lane: str) -> Step:
    row, read, which = lanes_register(target), scalar(text), scalar(lane)

    def step(w: Front) -> None:
        w.v[row][np.arange(len(w)), which(w) & U32(63)] = read(w)

    return step


def _swap_rows(ins: Instruction, a: str, b: str) -> Step:
    """v_permlane16_swap, v_permlane32_swap: the odd groups of a change places with the even ones of b."""
    size = int(re.sub(r"\D*(\d+)_.*", r"\1", ins.op))
    row_a, row_b = lanes_register(a), lanes_register(b)

    def step(w: Front) -> None:
        if not w.full:
            raise FaultError("lanes change places while some are off")
        pair_a, pair_b = (w.v[row].reshape(len(w), -1, 2, size) for row in (row_a, row_b))
        odd = pair_a[:, :, 1].copy()
        pair_a[:, :, 1] = pair_b[:, :, 0]
        pair_b[:, :, 0] = odd

    return step


def _count_below(ins: Instruction, target: str, bits: str, start: str) -> Step:
    """v_mbcnt: how many bits of a mask's half belong to lanes below this one, added to `start`."""
    write, read_bits, read_start = write_words(target), words(bits), words(start)
    position = np.clip(LANE - 32 if "_hi_" in ins.op else LANE, 0, 32).astype(U64)
    below = ((U64(1) << position) - U64(1)).astype(U32)
    return lambda w: write(w, np.bitwise_count(read_bits(w) & below).astype(U32) + read_start(w))


SPECIAL: dict[str, Callable[..., Step]] = {
    "v_cndmask_b32": _select,
    "v_pk_mov_b32": _packed_move,
    **dict.fromkeys(("v_mad_u64_u32", "v_mad_i64_i32"), _multiply_add_wide),
    **dict.fromkeys(
        ("v_add_co_u32", "v_addc_co_u32", "v_sub_co_u32", "v_subb_co_u32", "v_subrev_co_u32", "v_subbrev_co_u32"),
        _with_carry,
    ),
    **dict.fromkeys(("v_bitop3_b32", "v_bitop3_b16"), _bit_operation),
    "v_fmac_f32": _multiply_add_to,
    **dict.fromkeys(("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"), _multiply_add_mixed),
    "v_div_scale_f32": _divide_scale,
    "v_div_fmas_f32": _divide_fmas,
    "v_div_fixup_f32": _divide_fixup,
    "v_readfirstlane_b32": _read_first_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    **dict.fromkeys(("v_permlane16_swap_b32", "v_permlane32_swap_b32"), _swap_rows),
    **dict.fromkeys(("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32"), _count_below),
}
