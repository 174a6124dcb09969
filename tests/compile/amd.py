"""What AMD's code object says of a kernel: the metadata at the end of its assembly, and the assembly itself."""

import re

from triton.compiler import CompiledKernel

from fusedce.arch import Arch
from tests.compile.resources import Resources, within_product_loops

SIMDS_PER_CU = 4
NARROW = re.compile(r"\b(global|flat|buffer)_load_([us]?short|[us]byte)")


def resources(compiled: CompiledKernel, arch: Arch) -> Resources:
    """Reads the assembly text of a kernel compiled for gfx942 or gfx950."""
    text = compiled.asm["amdgcn"]
    num_warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    wave_size = number(text, r"\.wavefront_size:")
    vectors, scalars = number(text, r"\.vgpr_spill_count:"), number(text, r"\.sgpr_spill_count:")
    # A kernel without spills may still keep an array in scratch memory, which costs the same.
    in_memory = vectors + number(text, r"\.private_segment_fixed_size:")
    by_registers = number(text, r"; Occupancy:") * SIMDS_PER_CU // num_warps
    by_lds = arch.shared_bytes // shared if shared else by_registers
    return Resources(
        # Not .max_flat_workgroup_size: Triton lowers that to 1,024 and launches num_warps waves all the same.
        threads=num_warps * wave_size,
        wave_size=wave_size,
        registers=number(text, r"; TotalNumVgprs:"),
        shared=shared,
        spills=in_memory + scalars,
        # Scalars go to lanes of a vector register: free around the loop, not in it.
        loop_spills=in_memory or (scalars and lane_moves_in_loop(text)),
        narrow_loads=in_loop(text, NARROW) or 0,
        workgroups=min(by_registers, by_lds),
        matrix=matrix_instructions(text),
    )


def number(text: str, label: str) -> int:
    """The whole number after a label, which must be there once."""
    found = re.findall(label + r"\s*(\d+)", text)
    assert len(found) == 1, f"{len(found)} times {label!r} in the assembly"
    return int(found[0])


def lane_moves_in_loop(text: str) -> int:
    """How many instructions move spilled scalars in innermost loops with matrix instructions; all, without such."""
    pattern = re.compile(r"\bv_(write|read)lane_b32\b")
    inside = in_loop(text, pattern)
    return len(pattern.findall(text)) if inside is None else inside


def in_loop(text: str, pattern: re.Pattern) -> int | None:
    """How many instructions like `pattern` lie in innermost loops with matrix instructions; None without such."""
    lines = text.splitlines()
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if re.match(r"\.LBB\d+_\d+:", line)}
    places = [at for at, line in enumerate(lines) if pattern.search(line)]
    products = [at for at, line in enumerate(lines) if "v_mfma" in line]
    jumps = [
        (labels[to[1]], at)
        for at, line in enumerate(lines)
        if (to := re.search(r"\bs_c?branch\w*\s+(\.LBB\d+_\d+)", line)) and to[1] in labels
    ]
    return within_product_loops(places, jumps, products)


def matrix_instructions(text: str) -> tuple[str, ...]:
    """mfma.16x16x16.bf16 and the like: every kind in the assembly, sorted."""
    kinds = re.findall(r"\bv_mfma_f32_(\d+x\d+x\d+)_?(\w+)", text)
    return tuple(sorted({f"mfma.{shape}.{dtype}" for shape, dtype in kinds}))
