"""Global memory and LDS: bytes, which of them may be touched, and who touched them since the last barrier.

Every access is checked for bounds, for bytes that nobody wrote, and for conflicts: in LDS between waves of a workgroup
within one barrier interval, in global memory between workgroups of one launch, which nothing orders.
"""

from dataclasses import dataclass

import numpy as np

from tests.gfx9emu.faults import FaultError

Array = np.ndarray

UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
FORBIDDEN, UNWRITTEN, WRITTEN = 0, 1, 3  # what may be done with a byte
SEVERAL = 255
MOST_AGENTS = 254


class Conflicts:
    """Which agent (wave or workgroup, 1 … 254) read and wrote each byte since `forget`.

    A write beside another agent's write is a conflict unless it writes what is there: Triton's layouts replicate
    values, and lanes that hold the same one all store it.
    """

    def __init__(self, size: int) -> None:
        self.reader, self.writer = np.zeros(size, np.uint8), np.zeros(size, np.uint8)

    def forget(self, first: int = 0, last: int | None = None) -> None:
        """What happened in bytes first … last − 1 is over."""
        self.reader[first:last] = 0
        self.writer[first:last] = 0

    def note(self, record: Array, at: Array, agent: Array, dtype: type) -> None:
        """Enter accesses. at: indices in units of `dtype`; agent: who, of the same shape."""
        record = record.view(dtype)
        own = agent.astype(dtype) * dtype(0x01010101 & np.iinfo(dtype).max)
        before = record[at]
        record[at] = own
        # Of several agents that touch a unit at once, one stays entered: the others find it and make it several.
        several = (record[at] != own) | ((before != 0) & (before != own))
        if several.any():
            record[at[several]] = dtype(0xFFFFFFFF & np.iinfo(dtype).max)

    @staticmethod
    def others(record: Array, at: Array, agent: Array, dtype: type) -> Array:
        """(accesses,) bool: which touch a byte that another agent is entered for."""
        found = record.view(dtype)[at]
        own = agent.astype(dtype) * dtype(0x01010101 & np.iinfo(dtype).max)
        suspect = (found != 0) & (found != own)
        if suspect.any():  # some of the unit's bytes may be nobody's
            parts = np.ascontiguousarray(found).view(np.uint8).reshape(*found.shape, -1)
            suspect = ((parts != 0) & (parts != agent[..., None].astype(np.uint8))).any(-1)
        return suspect


@dataclass(frozen=True)
class Access:
    """Where the lanes that are on touch memory.

    at: (lanes, units) indices in units of `dtype`; agent: (lanes, 1) who; on: (waves, 64) bool; size: bytes a lane.
    """

    at: Array
    agent: Array
    on: Array
    size: int
    dtype: type

    @property
    def agents(self) -> Array:
        """`agent` in the shape of `at`."""
        return np.broadcast_to(self.agent, self.at.shape)


class Bytes:
    """A stretch of memory. kind: "global" or "LDS", for messages; data: what is in it; state: FORBIDDEN … of each byte.

    Addresses are byte offsets into `data`. SEEN: what conflicts are called, by kind.
    """

    def __init__(self, kind: str, size: int) -> None:
        padded = -(-size // 8) * 8
        self.kind, self.size = kind, size
        self.data, self.state = np.zeros(padded, np.uint8), np.zeros(padded, np.uint8)
        self.conflicts = Conflicts(padded)

    def access(self, address: Array, size: int, on: Array, agent: Array) -> Access:
        """Lanes at `address` (waves, 64) bytes, `size` each. agent: (waves,). FaultError if one is outside."""
        offset = address[on].astype(np.int64)
        if offset.size and (offset.min() < 0 or offset.max() + size > self.size):
            lane = int(np.argmax((offset < 0) | (offset + size > self.size)))
            raise FaultError(f"{self.kind} access far out of bounds: {self.where(int(offset[lane]))}")
        unit = min(size, 4)
        while unit > 1 and (offset & (unit - 1)).any():
            unit //= 2
        at = (offset // unit)[:, None] + np.arange(size // unit)
        agents = np.broadcast_to(agent[:, None], on.shape)[on][:, None]
        return Access(at, agents, on, size, UNITS[unit])

    def load(self, access: Access) -> Array:
        """(waves, 64, size) bytes; 0 in lanes that are off."""
        out = np.zeros((*access.on.shape, access.size), np.uint8)
        if access.at.size:
            self._demand(access, WRITTEN)
            self._no_other(access, self.conflicts.writer, "reads what another {} wrote")
            self.conflicts.note(self.conflicts.reader, access.at, access.agents, access.dtype)
            values = self.data.view(access.dtype)[access.at]
            out[access.on] = values.view(np.uint8).reshape(len(values), access.size)
        return out

    def store(self, access: Access, values: Array) -> None:
        """Writes (waves, 64, size) bytes where lanes are on."""
        if not access.at.size:
            return
        given = np.ascontiguousarray(values[access.on]).view(access.dtype).reshape(access.at.shape)
        self._demand(access, UNWRITTEN)
        self._no_other(access, self.conflicts.reader, "overwrites what another {} read")
        data = self.data.view(access.dtype)
        changes = data[access.at] != given
        if changes.any():
            self._no_other(access, self.conflicts.writer, "overwrites what another {} wrote", changes)
        data[access.at] = given
        self.state.view(access.dtype)[access.at] = access.dtype(0x03030303 & np.iinfo(access.dtype).max)
        self.conflicts.note(self.conflicts.writer, access.at, access.agents, access.dtype)
        lost = data[access.at] != given
        if lost.any() and Conflicts.others(self.conflicts.writer, access.at, access.agents, access.dtype)[lost].any():
            self._conflict(access, lost, "overwrites what another {} wrote")

    def _demand(self, access: Access, least: int) -> None:
        found = self.state.view(access.dtype)[access.at]
        mask = access.dtype((0x01010101 * least) & np.iinfo(access.dtype).max)
        bad = (found & mask) != mask
        if bad.any():
            offset = self._first(access, bad)
            unit = np.dtype(access.dtype).itemsize
            outside = (self.state[offset : offset + unit] == FORBIDDEN).any()
            what = "out of bounds" if outside else "of bytes that nobody wrote"
            raise FaultError(f"{self.kind} {'load' if least == WRITTEN else 'store'} {what}: {self.where(offset)}")

    def _no_other(self, access: Access, record: Array, what: str, among: Array | None = None) -> None:
        bad = self.conflicts.others(record, access.at, access.agents, access.dtype)
        bad = bad if among is None else bad & among
        if bad.any():
            self._conflict(access, bad, what)

    def _conflict(self, access: Access, bad: Array, what: str) -> None:
        agent = "wave" if self.kind == "LDS" else "workgroup"
        first = int(access.agents[bad][0]) - 1
        when = "in the same barrier interval" if self.kind == "LDS" else "of the same launch"
        where = self.where(self._first(access, bad))
        raise FaultError(f"{self.kind} race: {agent} {first} {what.format(agent)} {when}: {where}")

    @staticmethod
    def _first(access: Access, bad: Array) -> int:
        return int(access.at[bad][0]) * np.dtype(access.dtype).itemsize

    def where(self, offset: int) -> str:
        """A byte in words."""
        return f"byte {offset}"


class Memory(Bytes):
    """Global memory: buffers between red zones, at addresses no host pointer has."""

    BASE = 0x7F00_0000_0000
    RED_ZONE = 4096

    def __init__(self, size: int) -> None:
        super().__init__("global", size)
        self.top, self.buffers = self.RED_ZONE, []

    @classmethod
    def for_buffers(cls, *sizes: int) -> "Memory":
        """Room for buffers of these sizes."""
        return cls(sum(sizes) + (len(sizes) + 2) * 2 * cls.RED_ZONE)

    def allocate(self, size: int, name: str, data: Array | None = None) -> int:
        """The address of a new buffer with `data`, or with bytes that nobody wrote."""
        first = self.top
        self.top = (first + size + 2 * self.RED_ZONE) // 256 * 256
        if self.top > self.size:
            raise FaultError("the emulated memory is too small")
        self.buffers.append((first, first + size, name))
        self.state[first : first + size] = UNWRITTEN if data is None else WRITTEN
        if data is not None:
            self.data[first : first + size] = data
        return self.BASE + first

    def contents(self, address: int, size: int) -> Array:
        """The bytes of a buffer."""
        first = address - self.BASE
        return self.data[first : first + size]

    def access(self, address: Array, size: int, on: Array, agent: Array) -> Access:
        """As `Bytes.access`, at addresses as the machine code has them."""
        return super().access(address - np.uint64(self.BASE), size, on, agent)

    def where(self, offset: int) -> str:
        """The nearest buffer, and where in it."""
        first, last, name = min(self.buffers, key=lambda b: max(b[0] - offset, offset - b[1] + 1, 0))
        return f"byte {offset - first} of {name} ({last - first} bytes)"


class LDS(Bytes):
    """The LDS of every workgroup of a launch, one after the other. size: bytes of one, as the launch asks for."""

    def __init__(self, size: int, num_groups: int) -> None:
        self.stride = -(-size // 8) * 8
        super().__init__("LDS", self.stride * num_groups)
        self.each = size
        self.state[:] = UNWRITTEN

    def barrier(self, group: int) -> None:
        """A new barrier interval of a workgroup."""
        self.conflicts.forget(group * self.stride, (group + 1) * self.stride)

    def of_waves(self, address: Array, size: int, on: Array, group: Array, wave: Array) -> Access:
        """Lanes at `address` (waves, 64) in the LDS of their workgroup."""
        inside = address[on]
        if inside.size and (inside.min() < 0 or inside.max() + size > self.each):
            raise FaultError(f"LDS access out of bounds: byte {int(inside.max())} and {size - 1} more of {self.each}")
        return super().access(address + (group * self.stride)[:, None], size, on, wave + 1)

    def where(self, offset: int) -> str:
        """The byte in its workgroup's LDS."""
        return f"byte {offset % self.stride} of workgroup {offset // self.stride}" if self.stride else "byte 0"
