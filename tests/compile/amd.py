"""What AMD's code object says of a kernel: the metadata at the end of its assembly, and the assembly itself."""

import re

from triton.compiler import CompiledKernel

from fusedce.arch import Arch
from tests.compile.resources import Resources

SIMDS_PER_CU = 4


def resources(compiled: CompiledKernel, arch: Arch) -> Resources:
    """Reads the assembly text of a kernel compiled for gfx942 or gfx950."""
    text = compiled.asm["amdgcn"]
    num_warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    wave_size = number(text, r"\.wavefront_size:")
    spills = number(text, r"\.vgpr_spill_count:") + number(text, r"\.sgpr_spill_count:")
    # A kernel without spills may still keep an array in scratch memory, which costs the same.
    scratch = number(text, r"\.private_segment_fixed_size:")
    by_registers = number(text, r"; Occupancy:") * SIMDS_PER_CU // num_warps
    by_lds = arch.shared_bytes // shared if shared else by_registers
    return Resources(
        # Not .max_flat_workgroup_size: Triton lowers that to 1,024 and launches num_warps waves all the same.
        threads=num_warps * wave_size,
        wave_size=wave_size,
        registers=number(text, r"; TotalNumVgprs:"),
        shared=shared,
        spills=spills + scratch,
        loop_spills=spills + scratch,
        workgroups=min(by_registers, by_lds),
        matrix=matrix_instructions(text),
    )


def number(text: str, label: str) -> int:
    """The whole number after a label, which must be there once."""
    found = re.findall(label + r"\s*(\d+)", text)
    assert len(found) == 1, f"{len(found)} times {label!r} in the assembly"
    return int(found[0])


def matrix_instructions(text: str) -> tuple[str, ...]:
    """mfma.16x16x16.bf16 and the like: every kind in the assembly, sorted."""
    kinds = re.findall(r"\bv_mfma_f32_(\d+x\d+x\d+)_?(\w+)", text)
    return tuple(sorted({f"mfma.{shape}.{dtype}" for shape, dtype in kinds}))
