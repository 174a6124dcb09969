"""Instructions on scalars: one number a wave, and the conditions of branches.

A row is (shape, function). The shape says how wide destination and sources are: "w:ww" is a word of two words, "q" is a
pair of words (64 bits), "-" is no destination. Functions get arrays of (waves,); those of FLAGGED return (result, scc).
"""

from collections.abc import Callable

import numpy as np

from tests.gfx9emu.decode import Instruction, signed
from tests.gfx9emu.front import EXEC, VCC, Front
from tests.gfx9emu.machine import Machine
from tests.gfx9emu.operands import U32, U64, constant, register, scalar, scalar_pair, write_scalar, write_scalar_pair

Array = np.ndarray
Step = Callable[[Front], None]

IGNORED = frozenset({
    # Memory is in order here and caches are not there: what these wait for has happened. That a wait is missing is
    # therefore not seen.
    "s_waitcnt", "s_nop", "s_setprio", "s_sleep", "s_code_end", "s_icache_inv", "s_dcache_wb", "s_dcache_inv",
})  # fmt: skip


def i32(x: Array) -> Array:
    """The same bits as signed numbers."""
    return x.view(np.int32)


def i64(x: Array) -> Array:
    """The same bits as signed numbers."""
    return x.view(np.int64)


def wide(x: Array) -> Array:
    """Signed words as 64-bit numbers."""
    return i32(x).astype(np.int64)


def low(x: Array) -> Array:
    """The low 32 bits of 64-bit numbers."""
    return x.astype(np.int64).astype(U32)


def overflows(x: Array) -> Array:
    """Whether a 64-bit number is no signed word."""
    return x != x.astype(np.int32)


def nonzero(x: Array) -> tuple[Array, Array]:
    """A result whose scc says that it is not 0."""
    return x, x != 0


def signed_sum(x: Array) -> tuple[Array, Array]:
    """A signed 64-bit result: its low word, and whether that is not all."""
    return low(x), overflows(x)


def carried(x: Array) -> tuple[Array, Array]:
    """An unsigned sum in 64 bits: its low word, and the carry."""
    return low(x), (x >> U64(32)) != 0


def u64(x: Array) -> Array:
    """Words as unsigned 64-bit numbers."""
    return x.astype(U64)


def bit_field(x: Array, where: Array, is_signed: bool) -> Array:
    """Bits `where` … of x, as many as where >> 16 says."""
    offset, width = where & U32(8 * x.dtype.itemsize - 1), (where >> U32(16)) & U32(127)
    field = (u64(x) >> u64(offset)) & ((U64(1) << u64(width)) - U64(1))
    if is_signed:
        sign = np.where(width > 0, U64(1) << u64(np.maximum(width, 1) - U32(1)), U64(0))
        field = (field ^ sign) - sign
    return field.astype(x.dtype)


def count_ones(x: Array) -> Array:
    """How many bits of each number are 1."""
    return np.bitwise_count(x).astype(U32)


def first_one(x: Array) -> Array:
    """The number of the lowest bit that is 1; all ones for 0."""
    lowest = x & (~x + x.dtype.type(1))
    below = np.bitwise_count(lowest - x.dtype.type(1)).astype(U32)
    return np.where(x == 0, U32(0xFFFFFFFF), below)


FLAGGED: dict[str, tuple[str, Callable]] = {
    "s_add_u32": ("w:ww", lambda a, b: carried(u64(a) + u64(b))),
    "s_sub_u32": ("w:ww", lambda a, b: (a - b, b > a)),
    "s_add_i32": ("w:ww", lambda a, b: signed_sum(wide(a) + wide(b))),
    "s_sub_i32": ("w:ww", lambda a, b: signed_sum(wide(a) - wide(b))),
    "s_min_i32": ("w:ww", lambda a, b: (np.minimum(i32(a), i32(b)).view(U32), i32(a) <= i32(b))),
    "s_max_i32": ("w:ww", lambda a, b: (np.maximum(i32(a), i32(b)).view(U32), i32(a) >= i32(b))),
    "s_min_u32": ("w:ww", lambda a, b: (np.minimum(a, b), a <= b)),
    "s_max_u32": ("w:ww", lambda a, b: (np.maximum(a, b), a >= b)),
    "s_abs_i32": ("w:w", lambda a: nonzero(np.abs(wide(a)).astype(U32))),
    "s_bfe_u32": ("w:ww", lambda a, b: nonzero(bit_field(a, b, False))),
    "s_bfe_i32": ("w:ww", lambda a, b: nonzero(bit_field(a, b, True))),
    "s_bfe_u64": ("q:qw", lambda a, b: nonzero(bit_field(a, b, False))),
    "s_bfe_i64": ("q:qw", lambda a, b: nonzero(bit_field(a, b, True))),
    "s_bcnt1_i32_b32": ("w:w", lambda a: nonzero(count_ones(a))),
    "s_bcnt1_i32_b64": ("w:q", lambda a: nonzero(count_ones(a))),
    **{
        f"s_lshl{n}_add_u32": ("w:ww", lambda a, b, n=n: carried((u64(a) << U64(n)) + u64(b))) for n in (1, 2, 3, 4)
    },
}  # fmt: skip
PLAIN: dict[str, tuple[str, Callable]] = {
    "s_mov_b32": ("w:w", lambda a: a),
    "s_mov_b64": ("q:q", lambda a: a),
    "s_mul_i32": ("w:ww", lambda a, b: a * b),
    "s_mul_hi_u32": ("w:ww", lambda a, b: (u64(a) * u64(b) >> U64(32)).astype(U32)),
    "s_mul_hi_i32": ("w:ww", lambda a, b: low(wide(a) * wide(b) >> 32)),
    "s_brev_b32": ("w:w", lambda a: reversed_bits(a)),
    "s_ff1_i32_b32": ("w:w", first_one),
    "s_ff1_i32_b64": ("w:q", first_one),
    "s_sext_i32_i8": ("w:w", lambda a: a.astype(np.int8).astype(np.int32).view(U32)),
    "s_sext_i32_i16": ("w:w", lambda a: a.astype(np.int16).astype(np.int32).view(U32)),
}
COMPARISONS = {
    "eq": np.equal, "lg": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
# Both widths of each; the shift's distance is a word.
for _width, _shape, _view, _type in (("32", "w", i32, U32), ("64", "q", i64, U64)):
    _two, _shift, _most = f"{_shape}:{_shape}{_shape}", f"{_shape}:{_shape}w", U32(int(_width) - 1)
    FLAGGED |= {
        f"s_and_b{_width}": (_two, lambda a, b: nonzero(a & b)),
        f"s_or_b{_width}": (_two, lambda a, b: nonzero(a | b)),
        f"s_xor_b{_width}": (_two, lambda a, b: nonzero(a ^ b)),
        f"s_andn2_b{_width}": (_two, lambda a, b: nonzero(a & ~b)),
        f"s_orn2_b{_width}": (_two, lambda a, b: nonzero(a | ~b)),
        f"s_nand_b{_width}": (_two, lambda a, b: nonzero(~(a & b))),
        f"s_nor_b{_width}": (_two, lambda a, b: nonzero(~(a | b))),
        f"s_xnor_b{_width}": (_two, lambda a, b: nonzero(~(a ^ b))),
        f"s_not_b{_width}": (f"{_shape}:{_shape}", lambda a: nonzero(~a)),
        f"s_lshl_b{_width}": (_shift, lambda a, b, m=_most, t=_type: nonzero(a << (b & m).astype(t))),
        f"s_lshr_b{_width}": (_shift, lambda a, b, m=_most, t=_type: nonzero(a >> (b & m).astype(t))),
        f"s_ashr_i{_width}": (
            _shift,
            lambda a, b, m=_most, t=_type, v=_view: nonzero((v(a) >> v((b & m).astype(t))).view(t)),
        ),
    }
READ = {"w": scalar, "q": scalar_pair}
WRITE = {"w": write_scalar, "q": write_scalar_pair}


def reversed_bits(x: Array) -> Array:
    """Each word's bits the other way round."""
    octets = np.ascontiguousarray(x).reshape(-1, 1).view(np.uint8)
    bits = np.unpackbits(octets, axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(U32).reshape(np.shape(x))


def bind(ins: Instruction, machine: Machine) -> Step:
    """The step of an instruction whose name begins with s_, branches and barriers aside."""
    op, args = ins.op, ins.args
    if op in IGNORED:
        for name in ins.modifiers:
            ins.take(name)
        return lambda w: None
    if op in FLAGGED or op in PLAIN:
        return _table_step(ins)
    if op.startswith(("s_cmp_", "s_cmpk_")):
        return _compare(ins)
    if op.startswith("s_load_dword"):
        return _load(ins, machine)
    if op.endswith("_saveexec_b64"):
        return _save_exec(ins)
    special = SPECIAL.get(op)
    if special is None:
        raise ins.unknown()
    return special(ins, *args)


def _table_step(ins: Instruction) -> Step:
    shape, function = FLAGGED.get(ins.op) or PLAIN[ins.op]
    target, sources = shape.split(":")
    if len(ins.args) != 1 + len(sources):
        raise ins.unknown()
    write = WRITE[target](ins.args[0])
    reads = [READ[kind](arg) for kind, arg in zip(sources, ins.args[1:], strict=True)]

    def flagged(w: Front) -> None:
        value, scc = function(*(read(w) for read in reads))
        write(w, value)
        w.scc[...] = scc

    return flagged if ins.op in FLAGGED else lambda w: write(w, function(*(read(w) for read in reads)))


def _compare(ins: Instruction) -> Step:
    _, kind, comparison, number = ins.op.split("_")
    compare = COMPARISONS[comparison]
    read_a, read_b = (READ["q" if number == "u64" else "w"](arg) for arg in ins.args)
    if kind == "cmpk":
        right = signed(constant(ins.args[1]), 16) if number == "i32" else constant(ins.args[1]) & 0xFFFF
        value = U32(right & 0xFFFFFFFF)
        read_b = lambda w: value  # noqa: E731

    def step(w: Front) -> None:
        a, b = read_a(w), read_b(w)
        w.scc[...] = compare(i32(a), i32(b)) if number == "i32" else compare(a, b)

    return step


def _load(ins: Instruction, machine: Machine) -> Step:
    count = int(ins.op.partition("dwordx")[2] or 1)
    base, offset = scalar_pair(ins.args[1]), scalar(ins.args[2])
    further = ins.number("offset")
    ins.take("glc")
    found = register(ins.args[0])
    if found is None or found[2] != count:
        raise ins.unknown()
    first = found[1]

    def step(w: Front) -> None:
        address = np.broadcast_to(base(w) + u64(offset(w)) + U64(further), len(w))[:, None]
        access = machine.memory.access(address, 4 * count, np.ones((len(w), 1), bool), machine.agents(w))
        w.scalars[:, first : first + count] = machine.memory.load(access).view(U32)[:, 0]

    return step


def _save_exec(ins: Instruction) -> Step:
    rule = {
        "and": lambda x, old: x & old, "or": lambda x, old: x | old, "xor": lambda x, old: x ^ old,
        "andn2": lambda x, old: x & ~old, "andn1": lambda x, old: ~x & old, "orn2": lambda x, old: x | ~old,
    }.get(ins.op.removeprefix("s_").removesuffix("_saveexec_b64"))  # fmt: skip
    if rule is None:
        raise ins.unknown()
    read, write, write_exec = scalar_pair(ins.args[1]), write_scalar_pair(ins.args[0]), write_scalar_pair("exec")
    pair = EXEC // 2

    def step(w: Front) -> None:
        old = w.s64[pair].copy()
        new = rule(read(w), old)
        write(w, old)
        write_exec(w, new)
        w.scc[...] = new != 0

    return step


def _select(ins: Instruction, target: str, a: str, b: str) -> Step:
    kind = "q" if ins.op.endswith("64") else "w"
    write, read_a, read_b = WRITE[kind](target), READ[kind](a), READ[kind](b)
    return lambda w: write(w, np.where(w.scc, read_a(w), read_b(w)))


def _with_carry(ins: Instruction, target: str, a: str, b: str) -> Step:
    write, read_a, read_b = write_scalar(target), scalar(a), scalar(b)
    sign = U64(1) if ins.op == "s_addc_u32" else ~U64(0)  # modulo 2⁶⁴, minus one

    def step(w: Front) -> None:
        value, carry = carried(u64(read_a(w)) + sign * (u64(read_b(w)) + w.scc))
        write(w, value)
        w.scc[...] = carry

    return step


def _immediate(ins: Instruction, target: str, text: str) -> Step:
    """s_movk, s_addk, s_mulk: a signed half-word."""
    write, read = write_scalar(target), scalar(target)
    value = np.int64(signed(constant(text), 16))

    def step(w: Front) -> None:
        if ins.op == "s_movk_i32":
            write(w, low(value))
        elif ins.op == "s_mulk_i32":
            write(w, low(wide(read(w)) * value))
        else:
            total, w.scc[...] = signed_sum(wide(read(w)) + value)
            write(w, total)

    return step


def _bit_test(ins: Instruction, a: str, b: str) -> Step:
    is_pair, wanted = ins.op.endswith("64"), int(ins.op[len("s_bitcmp")])
    read, position = READ["q" if is_pair else "w"](a), scalar(b)

    def step(w: Front) -> None:
        bit = (u64(read(w)) >> u64(position(w) & U32(63 if is_pair else 31))) & U64(1)
        w.scc[...] = bit == wanted

    return step


SPECIAL: dict[str, Callable[..., Step]] = {
    **dict.fromkeys(("s_cselect_b32", "s_cselect_b64"), _select),
    **dict.fromkeys(("s_addc_u32", "s_subb_u32"), _with_carry),
    **dict.fromkeys(("s_movk_i32", "s_addk_i32", "s_mulk_i32"), _immediate),
    **dict.fromkeys(("s_bitcmp0_b32", "s_bitcmp1_b32", "s_bitcmp0_b64", "s_bitcmp1_b64"), _bit_test),
}
# Which waves take a branch, (waves,) bool.
CONDITIONS: dict[str, Callable[[Front], Array]] = {
    "s_branch": lambda w: np.ones(len(w), bool),
    "s_cbranch_scc0": lambda w: ~w.scc,
    "s_cbranch_scc1": lambda w: w.scc,
    "s_cbranch_vccz": lambda w: w.s64[VCC // 2] == 0,
    "s_cbranch_vccnz": lambda w: w.s64[VCC // 2] != 0,
    "s_cbranch_execz": lambda w: w.s64[EXEC // 2] == 0,
    "s_cbranch_execnz": lambda w: w.s64[EXEC // 2] != 0,
}
