"""Loads, stores and LDS: what arrives where, and every access that must be a fault."""

import numpy as np
import pytest

from tests.gfx9emu.assembler import execute, front, lanes_off
from tests.gfx9emu.faults import FaultError
from tests.gfx9emu.front import M0, Front
from tests.gfx9emu.machine import Machine
from tests.gfx9emu.memory import LDS, Memory

pytestmark = pytest.mark.amd
LANE = np.arange(64)
SIZES = {"dword": 1, "dwordx2": 2, "dwordx3": 3, "dwordx4": 4}


def machine(size: int, data: np.ndarray | None = None, lds: int = 4096, groups: int = 1) -> tuple[Machine, int]:
    """Memory with one buffer, and its address."""
    memory = Memory.for_buffers(size)
    address = memory.allocate(size, "buffer", data)
    return Machine(memory, LDS(lds, groups)), address


def addresses(w: Front, values: np.ndarray) -> None:
    """64-bit addresses in v[0:1]."""
    w.v[0][...], w.v[1][...] = values & 0xFFFFFFFF, values >> 32


def octets(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=count, dtype=np.uint8)


@pytest.mark.parametrize("name", SIZES)
def test_global_words(name: str) -> None:
    count, data = SIZES[name], octets(4096)
    m, start = machine(4096, data)
    w = front()
    on = lanes_off(w)
    addresses(w, start + 16 * np.arange(128).reshape(2, 64) + 64)
    registers = f"v[4:{3 + count}]" if count > 1 else "v4"
    execute(f"global_load_{name} {registers}, v[0:1], off offset:-48", w, m)
    expected = data.view(np.uint32).reshape(-1, 4)[1:129].reshape(2, 64, 4)
    for number in range(count):
        assert np.array_equal(w.v[4 + number][on], expected[..., number][on])
    assert (w.v[4][~on] == 0x7FC0DEAD).all()
    target = Memory.for_buffers(4096)
    out = target.allocate(4096, "out")
    m.memory = target
    w.v[2][...] = 16 * np.arange(128).reshape(2, 64)
    w.s64[2][...] = out
    execute(f"global_store_{name} v2, {registers}, s[4:5]", w, m)
    written = target.contents(out, 2048).view(np.uint32).reshape(2, 64, 4)
    assert np.array_equal(written[..., :count][on], expected[..., :count][on])
    assert not written[~on].any()


@pytest.mark.parametrize(("name", "size", "signed", "half"), [
    ("ubyte", 1, False, ""), ("sbyte", 1, True, ""), ("ushort", 2, False, ""), ("sshort", 2, True, ""),
    ("short_d16", 2, False, "lo"), ("short_d16_hi", 2, False, "hi"),
])  # fmt: skip
def test_global_parts(name: str, size: int, signed: bool, half: str) -> None:
    data = octets(256)
    m, start = machine(256, data)
    w = front(1)
    w.v[4][...] = 0xAAAABBBB
    addresses(w, start + size * LANE[None])
    execute(f"global_load_{name} v4, v[0:1], off", w, m)
    values = data.view({1: np.int8, 2: np.int16}[size] if signed else {1: np.uint8, 2: np.uint16}[size])[:64]
    words = values.astype(np.int32).view(np.uint32)
    expected = {"": words, "lo": words | 0xAAAA0000, "hi": words << 16 | 0xBBBB}[half]
    assert np.array_equal(w.v[4][0], expected)


def test_stores_of_parts() -> None:
    m, start = machine(256)
    w = front(1)
    w.v[4][...] = 0x12345678 + LANE
    addresses(w, start + 2 * LANE[None])
    for text, shift in (("global_store_short", 0), ("global_store_short_d16_hi", 16)):
        execute(f"{text} v[0:1], v4, off", w, m)
        assert np.array_equal(m.memory.contents(start, 128).view(np.uint16), (0x12345678 + LANE) >> shift & 0xFFFF)
    addresses(w, start + LANE[None])
    execute("global_store_byte v[0:1], v4, off", w, m)
    assert np.array_equal(m.memory.contents(start, 64), (0x78 + LANE) & 255)


def test_global_faults_name_the_buffer() -> None:
    m, start = machine(100)
    w = front(1)
    addresses(w, start + 4 * LANE[None])
    with pytest.raises(FaultError, match=r"global store out of bounds: byte 100 of buffer \(100 bytes\)"):
        execute("global_store_dword v[0:1], v4, off", w, m)
    addresses(w, np.full((1, 64), start + 4))
    with pytest.raises(FaultError, match="global load of bytes that nobody wrote: byte 4 of buffer"):
        execute("global_load_dword v4, v[0:1], off", w, m)
    addresses(w, np.full((1, 64), 64))
    with pytest.raises(FaultError, match="far out of bounds"):
        execute("global_load_dword v4, v[0:1], off", w, m)


@pytest.mark.parametrize("unit", [1, 2, 4])
def test_workgroups_that_meet_in_global_memory(unit: int) -> None:
    """A launch orders nothing between them."""
    name = {1: "byte", 2: "short", 4: "dword"}[unit]
    load = {1: "ubyte", 2: "ushort", 4: "dword"}[unit]

    def place(group: int, shift: int) -> Front:
        w = front(1)
        w.group[...] = group
        addresses(w, start + unit * (LANE[None] + shift))
        w.v[4][...] = 7 + group
        return w

    m, start = machine(1024, octets(1024))
    execute(f"global_store_{name} v[0:1], v4, off", place(0, 0), m)
    execute(f"global_store_{name} v[0:1], v4, off", place(1, 64), m)
    execute(f"global_load_{load} v5, v[0:1], off", place(0, 0), m)
    with pytest.raises(FaultError, match="workgroup 2 reads what another workgroup wrote of the same launch"):
        execute(f"global_load_{load} v5, v[0:1], off", place(2, 127), m)
    with pytest.raises(FaultError, match="workgroup 1 overwrites what another workgroup read"):
        execute(f"global_store_{name} v[0:1], v4, off", place(1, 63), m)
    with pytest.raises(FaultError, match="workgroup 3 overwrites what another workgroup wrote"):
        execute(f"global_store_{name} v[0:1], v4, off", place(3, 127), m)
    m.memory.conflicts.forget()
    execute(f"global_store_{name} v[0:1], v4, off", place(3, 127), m)
    both = Front.joined([place(0, 100), place(1, 100)])
    with pytest.raises(FaultError, match="overwrites what another workgroup wrote"):
        execute(f"global_store_{name} v[0:1], v4, off", both, m)


def test_buffers_end_where_their_descriptor_says() -> None:
    data = octets(256)
    m, start = machine(256, data)
    w = front(1)
    w.s[8][...], w.s[9][...], w.s[10][...], w.s[11][...] = start & 0xFFFFFFFF, start >> 32, 128, 0
    w.s[3][...] = 4
    w.v[2][...] = 4 * LANE
    execute("buffer_load_dword v4, v2, s[8:11], s3 offen offset:8", w, m)
    expected = np.where(4 * LANE + 12 <= 128, data.view(np.uint32)[np.minimum(LANE + 3, 63)], 0)
    assert np.array_equal(w.v[4][0], expected)
    w.v[4][...] = 5
    execute("buffer_store_dword v4, v2, s[8:11], 0 offen", w, m)
    assert np.array_equal(m.memory.contents(start, 256).view(np.uint32)[:33], [5] * 32 + [data.view(np.uint32)[32]])
    w.s[9][...] |= 16 << 16
    with pytest.raises(FaultError, match="a buffer with a stride"):
        execute("buffer_load_dword v4, v2, s[8:11], 0 offen", w, m)


@pytest.mark.parametrize(
    "text", ["global_load_lds_dwordx4 v[0:1], off", "buffer_load_dwordx4 v2, s[8:11], 0 offen lds"]
)
def test_loads_past_the_registers(text: str) -> None:
    data = octets(1024)
    m, start = machine(1024, data)
    w = front(1)
    addresses(w, start + 16 * LANE[None])
    w.v[2][...] = 16 * LANE
    w.s[8][...], w.s[9][...], w.s[10][...] = start & 0xFFFFFFFF, start >> 32, 1024
    w.s[M0][...] = 512
    execute(text, w, m)
    assert np.array_equal(m.lds.data[512:1536], data)


@pytest.mark.parametrize(("name", "words"), [("b32", 1), ("b64", 2), ("b96", 3), ("b128", 4)])
def test_lds_words(name: str, words: int) -> None:
    m, _ = machine(0, lds=8192)
    w = front()
    on, width = lanes_off(w), 4 * words
    values = np.random.default_rng(0).integers(2**32, size=(words, 2, 64), dtype=np.uint32)
    for number in range(words):
        w.v[4 + number][...] = values[number]
    w.v[0][...] = width * np.arange(128).reshape(2, 64)
    source = f"v[4:{3 + words}]" if words > 1 else "v4"
    execute(f"ds_write_{name} v0, {source} offset:16", w, m)
    target = f"v[10:{9 + words}]" if words > 1 else "v10"
    execute(f"ds_read_{name} {target}, v0 offset:16", w, m)
    for number in range(words):
        assert np.array_equal(w.v[10 + number][on], values[number][on])


@pytest.mark.parametrize(("suffix", "unit"), [("", 1), ("st64", 64)])
@pytest.mark.parametrize(("name", "words"), [("b32", 1), ("b64", 2)])
def test_lds_two_places(name: str, words: int, suffix: str, unit: int) -> None:
    m, _ = machine(0, lds=32768)
    w = front(1)
    for number in range(4):
        w.v[4 + number][...] = 1000 * number + LANE
    w.v[0][...] = 4 * words * LANE
    first, second = ("v[4:5]", "v[6:7]") if words == 2 else ("v4", "v5")
    far = 1 if unit == 64 else 64
    execute(f"ds_write2{suffix}_{name} v0, {first}, {second} offset1:{far}", w, m)
    execute(f"ds_read2{suffix}_{name} v[10:{9 + 2 * words}], v0 offset1:{far}", w, m)
    for number in range(2 * words):
        assert np.array_equal(w.v[10 + number], w.v[4 + number])


def test_lds_parts() -> None:
    m, _ = machine(0)
    w = front(1)
    w.v[4][...], w.v[0][...] = 0xFEDC8000 + LANE, 2 * LANE
    execute("ds_write_b16 v0, v4", w, m)
    for text, expected in (("ds_read_u16 v5, v0", 0x8000 + LANE), ("ds_read_i16 v5, v0", 0xFFFF8000 + LANE)):
        execute(text, w, m)
        assert np.array_equal(w.v[5][0], expected)
    execute("ds_write_b16_d16_hi v0, v4", w, m)
    execute("ds_read_u16_d16_hi v4, v0", w, m)
    assert np.array_equal(w.v[4][0], 0xFEDC8000 + LANE)
    w.v[0][...] = LANE
    execute("ds_write_b8 v0, v4", w, m)
    execute("ds_read_u8 v5, v0", w, m)
    assert np.array_equal(w.v[5][0], LANE)
    w.v[0][...] = 0
    m.lds.data[0] = 0x85
    execute("ds_read_i8 v5, v0", w, m)
    assert (w.v[5] == 0xFFFFFF85).all()


def race(first: str, second: str, *, shift: int = 0, barrier: bool = False, values: tuple[int, int] = (1, 2)) -> None:
    """Two waves on the same 64 words, one instruction each."""
    m, _ = machine(0)
    w = front(2)
    w.v[0][...], w.v[4][...] = 4 * LANE, np.array(values)[:, None]
    one, other = w.part(np.array([True, False])), w.part(np.array([False, True]))
    other.v[0][...] += shift
    m.lds.state[:] = 3
    execute(first, one, m)
    if barrier:
        m.lds.barrier(0)
    execute(second, other, m)


WRITE, READ = "ds_write_b32 v0, v4", "ds_read_b32 v5, v0"


@pytest.mark.parametrize(("first", "second", "what"), [
    (WRITE, READ, "wave 1 reads what another wave wrote"), (READ, WRITE, "wave 1 overwrites what another wave read"),
    (WRITE, WRITE, "wave 1 overwrites what another wave wrote"),
    (WRITE, "ds_read_u8 v5, v0 offset:3", "wave 1 reads what another wave wrote"),
    ("ds_write_b16 v0, v4", READ, "wave 1 reads what another wave wrote"),
])  # fmt: skip
def test_lds_races(first: str, second: str, what: str) -> None:
    with pytest.raises(FaultError, match=f"LDS race: {what} in the same barrier interval"):
        race(first, second)
    race(first, second, barrier=True)


def test_what_is_no_race() -> None:
    race(READ, READ)
    race(WRITE, WRITE, values=(3, 3))
    race(WRITE, WRITE, shift=256)
    race(WRITE, READ, shift=256)
    race("ds_write_b16 v0, v4", "ds_write_b16 v0, v4 offset:2")


def test_waves_that_race_in_one_instruction() -> None:
    m, _ = machine(0)
    w = front(2)
    w.v[0][...], w.v[4][...] = 4 * LANE, np.array([1, 2])[:, None]
    with pytest.raises(FaultError, match="LDS race"):
        execute(WRITE, w, m)


def test_workgroups_have_lds_of_their_own() -> None:
    m, _ = machine(0, lds=256, groups=2)
    w = front(2)
    w.group[...], w.wave[...] = [0, 1], 0
    w.v[0][...], w.v[4][...] = 4 * LANE, np.array([1, 2])[:, None]
    execute(WRITE, w, m)
    execute(READ, w, m)
    assert (w.v[5] == np.array([1, 2])[:, None]).all()
    with pytest.raises(FaultError, match="LDS access out of bounds: byte 256 and 3 more of 256"):
        execute("ds_read_b32 v5, v0 offset:4", w, m)


def test_lds_that_nobody_wrote() -> None:
    m, _ = machine(0)
    w = front(1)
    w.v[0][...] = 4 * LANE
    with pytest.raises(FaultError, match="LDS load of bytes that nobody wrote: byte 0 of workgroup 0"):
        execute(READ, w, m)


def test_data_from_other_lanes() -> None:
    w = front(1)
    on = lanes_off(w)[0]
    w.v[1][...], w.v[2][...] = 1000 + LANE, 4 * (63 - LANE)
    execute("ds_bpermute_b32 v0, v2, v1 offset:4", w)
    source = (64 - LANE) % 64
    assert np.array_equal(w.v[0][0], np.where(on, np.where(on[source], 1000 + source, 0), 0x7FC0DEAD))
    for text, source in (
        ("swizzle(QUAD_PERM,1,0,3,2)", LANE ^ 1), ("swizzle(SWAP,16)", LANE ^ 16), ("swizzle(REVERSE,8)", LANE ^ 7),
        ("swizzle(BROADCAST,8,3)", LANE // 8 * 8 + 3),
    ):  # fmt: skip
        execute(f"ds_swizzle_b32 v0, v1 offset:{text}", w)
        assert np.array_equal(w.v[0][0][on], np.where(on[source], 1000 + source, 0)[on])


def test_transposed_read() -> None:
    """Each 16 lanes read a 16 × 4 block of halves, and get its columns."""
    m, _ = machine(0)
    w = front(1)
    w.v[0][...] = 8 * LANE
    halves = np.arange(256, dtype=np.uint16)
    m.lds.data[:512], m.lds.state[:512] = halves.view(np.uint8), 3
    execute("ds_read_b64_tr_b16 v[4:5], v0", w, m)
    found = np.stack([w.v[4][0], w.v[5][0]], 1).view(np.uint16)
    for lane in range(64):
        block = halves.reshape(64, 4)[lane // 16 * 16 : lane // 16 * 16 + 16]
        assert found[lane].tolist() == [block[4 * j + lane % 16 // 4, lane % 4] for j in range(4)]


def test_scratch_is_each_lane_s_own() -> None:
    w = front(2, scratch_bytes=64)
    on = lanes_off(w)
    w.v[2][...], w.v[3][...], w.v[1][...], w.s[4][...] = LANE, LANE + 100 * w.wave[:, None], 8, 4
    execute("scratch_store_dwordx2 v1, v[2:3], s4 offset:16", w)
    execute("scratch_load_dword v5, off, s4 offset:28", w)
    assert np.array_equal(w.v[5][on], (LANE + 100 * w.wave[:, None])[on])
    with pytest.raises(FaultError, match="scratch access out of bounds"):
        execute("scratch_load_dword v5, v1, off offset:56", w)
