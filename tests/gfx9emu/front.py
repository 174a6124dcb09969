"""The registers of waves that stand at the same instruction.

Waves of one launch mostly do the same at the same time, so the emulator holds them side by side and one NumPy call does
an instruction for all of them: this, not the Python around it, is what makes it fast. Where waves part at a branch the
front splits; where they meet again it is joined (see `schedule`).
"""

import numpy as np

Array = np.ndarray

LANES = 64
# Numbers of the scalars that have names, as the machine code has them.
VCC, M0, EXEC = 106, 124, 126
NUM_SCALARS = 128
# What registers hold before anything is written: a NaN and no address.
POISON, SCALAR_POISON = 0x7FC0DEAD, 0xDEADBEEF


class Front:
    """Waves at one instruction.

    group, wave: (waves,) which workgroup of the launch, which wave of it. vector: (registers, waves, 64) uint32;
    scalars: (waves, 128) uint32; scc: (waves,) bool. `v`, `f`, `s`, `s64`, `sv` are views of them by number: lanes as
    uint32 and as fp32, scalars as (waves,), pairs as uint64, and scalars as (waves, 1) for use beside lanes.
    active: (waves, 64) bool, exec by lane; full: whether every lane of every wave is on. at: number of a basic block.
    num_v: how many of the rows of `vector` are v0, v1, …; the others are a0, a1, …, which `v` and `f` have from 256 on.
    scratch: (waves, 64, bytes) uint8, the lanes' private memory.
    """

    def __init__(self, group: Array, wave: Array, vector: Array, scalars: Array, num_v: int, scratch: Array) -> None:
        self.group, self.wave, self.at = group, wave, 0
        self.vector, self.scalars, self.num_v, self.scratch = vector, scalars, num_v, scratch
        self.scc = np.zeros(len(wave), bool)
        gap = [None] * (256 - num_v)
        self.v = [*vector[:num_v], *gap, *vector[num_v:]]
        self.f = [*vector[:num_v].view(np.float32), *gap, *vector[num_v:].view(np.float32)]
        self.s = [scalars[:, i] for i in range(NUM_SCALARS)]
        self.sv = [scalars[:, i : i + 1] for i in range(NUM_SCALARS)]
        self.s64 = list(scalars.view(np.uint64).T)
        self.exec_changed()

    @classmethod
    def fresh(cls, group: Array, wave: Array, num_v: int, num_a: int, scratch_bytes: int = 0) -> "Front":
        """Waves before their first instruction: every register is poison, every lane on."""
        vector = np.full((num_v + num_a, len(wave), LANES), POISON, np.uint32)
        scalars = np.full((len(wave), NUM_SCALARS), SCALAR_POISON, np.uint32)
        scalars[:, EXEC : EXEC + 2] = 0xFFFFFFFF
        return cls(group, wave, vector, scalars, num_v, np.zeros((len(wave), LANES, scratch_bytes), np.uint8))

    def __len__(self) -> int:
        return len(self.wave)

    def exec_changed(self) -> None:
        """Look at exec again."""
        self.active = self.lanes(self.s64[EXEC // 2])
        self.full = bool(self.active.all())

    def lanes(self, bits: Array) -> Array:
        """(waves,) uint64 -> (waves, 64) bool."""
        whole = np.ascontiguousarray(np.broadcast_to(bits, len(self)))
        return np.unpackbits(whole.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little").view(bool)

    def bits(self, lanes: Array) -> Array:
        """(waves, 64) bool -> (waves,) uint64."""
        return np.packbits(lanes, axis=1, bitorder="little").view(np.uint64)[:, 0]

    def part(self, chosen: Array) -> "Front":
        """A copy of the waves that `chosen` (waves,) bool names."""
        some = Front(
            self.group[chosen], self.wave[chosen], np.ascontiguousarray(self.vector[:, chosen]),
            self.scalars[chosen], self.num_v, self.scratch[chosen],
        )  # fmt: skip
        some.scc, some.at = self.scc[chosen], self.at
        return some

    @classmethod
    def joined(cls, fronts: list["Front"]) -> "Front":
        """One front of several that stand at the same block."""
        if len(fronts) == 1:
            return fronts[0]
        whole = cls(
            np.concatenate([f.group for f in fronts]), np.concatenate([f.wave for f in fronts]),
            np.concatenate([f.vector for f in fronts], 1), np.concatenate([f.scalars for f in fronts]),
            fronts[0].num_v, np.concatenate([f.scratch for f in fronts]),
        )  # fmt: skip
        whole.scc, whole.at = np.concatenate([f.scc for f in fronts]), fronts[0].at
        return whole
