"""One tile of a GEMM-shaped kernel and the one rule for whether a machine can run it."""

from dataclasses import dataclass, replace

from fusedce.arch import Arch


@dataclass(frozen=True)
class GemmTile:
    """A block_m × block_n tile of the output, block_k deep a step, by num_warps warps (or wavefronts).

    group_m: how many row blocks share one sweep over the columns, so that both operands stay in L2.
    num_stages: buffers of the software pipeline. matrix_instr: AMD's MFMA edge (16 or 32); 0 leaves it to the compiler.
    tma: operands come by tensor descriptors, and one program a unit goes from tile to tile, loading the next one's
    operands during the epilogue. staged_bytes: bytes of an output element that the epilogue stages in shared memory.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    matrix_instr: int = 0
    tma: bool = False
    staged_bytes: int = 0

    def reached(self, by_tma: bool) -> "GemmTile":
        """This tile where descriptors reach the operands, else the same without them."""
        return self if by_tma or not self.tma else replace(self, tma=False)

    def shared_bytes(self, itemsize: int) -> int:
        """Bytes of shared memory that the pipelined operands take, and the output where it is staged."""
        operands = self.num_stages * (self.block_m + self.block_n) * self.block_k * itemsize
        return operands + self.staged_bytes * self.block_m * self.block_n

    def accumulators(self, wave_size: int) -> int:
        """fp32 accumulator registers a lane."""
        return self.block_m * self.block_n // (self.num_warps * wave_size)


def fits(tile: GemmTile, arch: Arch, itemsize: int) -> str | None:
    """None if `tile` runs on `arch` with operands of `itemsize` bytes, else the reason why not.

    192 of the 255 registers a lane may go to accumulators; a wavefront has 512 with its AGPRs, of which the compiler
    uses as many.
    """
    threads = tile.num_warps * arch.wave_size
    if threads > arch.max_threads:
        return f"{threads} threads, {arch.name} runs {arch.max_threads}"
    shared = tile.shared_bytes(itemsize)
    if shared > arch.shared_bytes:
        return f"{shared} bytes of shared memory, {arch.name} has {arch.shared_bytes}"
    accumulators = tile.accumulators(arch.wave_size)
    if accumulators > 192:
        return f"{accumulators} accumulators a lane, more than 192"
    return None
