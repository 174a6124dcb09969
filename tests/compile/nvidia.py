"""What NVIDIA's object file says of a kernel, by cuobjdump, and which matrix instructions its PTX has."""

import re
import tempfile

from triton.compiler import CompiledKernel

from tests import toolchain
from tests.compile.resources import Resources, within_product_loops

NARROW = re.compile(r"\bLDG\S*\.[US](8|16)\b")


def resources(compiled: CompiledKernel) -> Resources:
    """Reads the object file and the PTX of a kernel compiled for an sm_… target."""
    usage = resource_usage(compiled.asm["cubin"])
    # ptxas keeps spilled registers on the stack, which is local memory.
    spills = usage["STACK"] + usage["LOCAL"]
    code = disassembly(compiled.asm["cubin"])
    return Resources(
        threads=compiled.metadata.num_warps * compiled.metadata.target.warp_size,
        wave_size=compiled.metadata.target.warp_size,
        registers=usage["REG"],
        shared=compiled.metadata.shared,
        spills=spills,
        loop_spills=spills and spills_in_loop(code),
        narrow_loads=in_loop(code, NARROW) or 0,
        workgroups=1,
        matrix=matrix_instructions(compiled.asm["ptx"]),
    )


def resource_usage(cubin: bytes) -> dict[str, int]:
    """cuobjdump's line for the one kernel of an object file: REG, STACK, SHARED, LOCAL."""
    text = dump(cubin, "--dump-resource-usage")
    (line,) = [line for line in text.splitlines() if "REG:" in line]
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", line)}


def dump(cubin: bytes, what: str) -> str:
    """What cuobjdump prints of an object file."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return toolchain.output([toolchain.cuobjdump(), what, file.name])


def disassembly(cubin: bytes) -> list[tuple[int, str]]:
    """The machine code: address and instruction."""
    return [(int(at, 16), code) for at, code in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(\S.*?);", dump(cubin, "-sass"))]


def spills_in_loop(code: list[tuple[int, str]]) -> int:
    """How many loads and stores of local memory lie in innermost loops with matrix instructions; all, without such."""
    pattern = re.compile(r"\b(LDL|STL)\b")
    inside = in_loop(code, pattern)
    return sum(bool(pattern.search(text)) for _, text in code) if inside is None else inside


def in_loop(code: list[tuple[int, str]], pattern: re.Pattern) -> int | None:
    """How many instructions like `pattern` lie in innermost loops with matrix instructions; None without such."""
    places = [at for at, text in code if pattern.search(text)]
    products = [at for at, text in code if "MMA" in text]
    jumps = [(int(target[1], 16), at) for at, text in code if (target := re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text))]
    return within_product_loops(places, jumps, products)


def matrix_instructions(ptx: str) -> tuple[str, ...]:
    """mma.sync.m16n8k16.bf16, wgmma.m64n256k16.bf16, tcgen05.mma.f16 and the like: every kind, sorted."""
    kinds = set()
    for shape, types in re.findall(r"\bmma\.sync\.aligned\.(m\d+n\d+k\d+)\.row\.col\.([\w.]+)", ptx):
        kinds.add(f"mma.sync.{shape}.{operand(types)}")
    for shape, types in re.findall(r"\bwgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)\.([\w.]+)", ptx):
        kinds.add(f"wgmma.{shape}.{operand(types)}")
    for kind in re.findall(r"\btcgen05\.mma\.[\w:.]*kind::(\w+)", ptx):
        kinds.add(f"tcgen05.mma.{kind}")
    return tuple(sorted(kinds))


def operand(types: str) -> str:
    """The operands' type in PTX's list result.a.b.sum."""
    return types.split(".")[1]
