"""What a compiled kernel takes of a GPU, and what it may take."""

from dataclasses import dataclass

from fusedce.arch import Arch

# What a 16-bit matrix product must have become, by architecture. Other instructions give the same numbers at a fraction
# of the rate, and nothing else would tell.
MATRIX_16BIT = {
    "sm_80": "mma.sync.m16n8k16",
    "sm_90": "wgmma.m64",
    "sm_100": "tcgen05.mma",
    "gfx942": "mfma.16x16x16",
    "gfx950": "mfma.16x16x32",
}

# Bytes a lane that an NVIDIA kernel may spill once a tile, outside the loop that multiplies: beside the operands that
# the loop loads meanwhile (hundreds of KiB a tile) they are little. Inside the loop nothing may spill; on AMD nothing
# may go to memory anywhere.
SPILL_BYTES_AROUND_LOOP = 128
# Loads of one 16-bit element that the main loop may have: a bias of the epilogue, where tile follows tile in one loop.
# An operand that is read so has dozens.
NARROW_LOADS = 8


@dataclass(frozen=True)
class Resources:
    """registers: a lane's; AMD's V and A registers together. shared: bytes of shared memory (LDS) of a workgroup.
    spills: what is kept in memory for want of registers; bytes, and for AMD spilled registers too: 0 is what counts.
    loop_spills: instructions that move spills inside a loop with matrix instructions; without such a loop, all spills.
    narrow_loads: loads of a single 16-bit element inside such a loop.
    workgroups: how many fit an AMD CU at once; 1 for NVIDIA, where it follows from the others. matrix: the matrix
    instructions, as name.shape.
    """

    threads: int
    wave_size: int
    registers: int
    shared: int
    spills: int
    loop_spills: int
    narrow_loads: int
    workgroups: int
    matrix: tuple[str, ...]


def within_product_loops(places: list[int], jumps: list[tuple[int, int]], products: list[int]) -> int | None:
    """How many of `places` lie in innermost loops with matrix instructions; None if there is no such loop.

    jumps: (where to, from where); products: where the matrix instructions are.
    """
    loops = [(first, last) for first, last in jumps if any(first <= at <= last for at in products)]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return sum(any(first <= at <= last for first, last in inner) for at in places) if inner else None


def over_budget(used: Resources, arch: Arch, gemm_16bit: bool) -> list[str]:
    """Why a kernel should not, or could not, be launched on `arch`; empty if nothing speaks against it.

    gemm_16bit: whether the kernel multiplies 16-bit matrices, which must then run on the matrix units.
    """
    wrong = []
    if used.wave_size != arch.wave_size:
        wrong.append(f"waves of {used.wave_size}, {arch.name} has {arch.wave_size}")
    if used.threads > arch.max_threads:
        wrong.append(f"{used.threads} threads, {arch.name} runs {arch.max_threads}")
    if used.shared > arch.shared_bytes:
        wrong.append(f"{used.shared} bytes of shared memory, {arch.name} has {arch.shared_bytes}")
    if used.loop_spills:
        wrong.append(f"{used.spills} spilled, in {used.loop_spills} places of the main loop")
    elif used.spills > SPILL_BYTES_AROUND_LOOP:
        wrong.append(f"{used.spills} spilled around the main loop")
    if used.narrow_loads > NARROW_LOADS:
        wrong.append(f"{used.narrow_loads} loads of one 16-bit element in the main loop")
    if used.workgroups < 1:
        wrong.append("not one workgroup fits a CU")
    if any("xf32" in name or "tf32" in name for name in used.matrix):
        wrong.append(f"fp32 operands lose bits in {', '.join(used.matrix)}")
    expected = MATRIX_16BIT[arch.name]
    if gemm_16bit and not any(name.startswith(expected) for name in used.matrix):
        wrong.append(f"no {expected} among the matrix instructions ({', '.join(used.matrix) or 'none'})")
    return wrong
