"""Every device source compiled for every architecture, and what the compilers say of the result: nothing spilled, wide
accesses, and within what the architecture has. No GPU is needed."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fusedce.arch import by_name
from setup import Toolkit
from tests import toolchain

pytestmark = pytest.mark.native

SOURCES = sorted(Path("csrc/kernels").glob("*.cu"))
# source -> kernels: one for each softcap or none (× three dtypes of the gradient); an epilogue for each set of options
KERNELS = {
    "linear_ce_rows": {"logprob_rows_kernel": 2, "parts_rows_kernel": 2, "d_logits_rows_kernel": 6},
    "linear_ce_words": {"argmax_rows_kernel": 1, "selected_logits_kernel": 2, "selected_gradient_kernel": 6},
    "linear_ce_seeded": dict.fromkeys(
        ("target_logits_kernel", "seeded_sums_kernel", "rescue_kernel", "seeded_scale_kernel", "scaled_kernel"), 1
    ),
    "linear_ce_sums": {"merged_sums_kernel": 2},
    "linear_ce_hopper": {"LogitSums": 8, "LogitGradient": 8, "SeededExponentials": 4, "ScaledRows": 1, "Plain": 2},
}
HOPPER = [source for source in SOURCES if source.stem.endswith("_hopper")]
ROWS = [source for source in SOURCES if source not in HOPPER]
# Neighbouring threads read neighbouring rows of a tile's sums, a word each; or the few words of a row that are named.
NARROW = ("seeded_sums_kernel", "merged_sums_kernel", "selected_logits_kernel", "selected_gradient_kernel")
# A block of 512 threads shall leave room for a second one: 65,536 registers / 1,024 threads.
MAX_REGISTERS = 64


def test_every_source_has_its_kernels_named_here() -> None:
    assert {source.stem for source in SOURCES} == set(KERNELS)


@pytest.fixture(scope="module")
def rocm_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toolchain.make_rocm_tree(tmp_path_factory.mktemp("rocm"))


@pytest.mark.parametrize("source", HOPPER, ids=lambda source: source.stem)
@pytest.mark.parametrize("name", ["sm_80", "sm_90a", "sm_100a"])
def test_hopper(source: Path, name: str, tmp_path: Path) -> None:
    """Tensor cores fed by TMA on sm_90a, with nothing spilled and no product waiting for the one before it (ptxas says
    so in C7510 and its kin); elsewhere a trap."""
    toolkit = Toolkit("nvidia", toolchain.require("nvcc"), "", (name,), ("-Xptxas=-v", "-Werror=all-warnings"))
    compiled = tmp_path / "kernels.o"
    report = toolchain.output(toolkit.command(str(source), str(compiled)))
    assert "(C75" not in report, report
    entries = re.split(r"Compiling entry function '", report)[1:]
    for kernel, count in KERNELS[source.stem].items():
        assert sum(kernel in entry.split("'")[0] for entry in entries) == count
    for entry in entries:
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in entry, entry
    for function, instructions in sass(compiled).items():
        wanted = ("HGMMA", "UTMALDG", "USETMAXREG") if name == "sm_90a" else ("BPT.TRAP",)
        assert all(word in instructions for word in wanted), function
        assert not re.search(r"\b(LDL|STL)\b", instructions), f"{function} keeps values in local memory"


@pytest.mark.parametrize("source", ROWS, ids=lambda source: source.stem)
@pytest.mark.parametrize("name", ["sm_80", "sm_90a", "sm_100a"])
def test_nvidia(source: Path, name: str, tmp_path: Path) -> None:
    toolkit = Toolkit("nvidia", toolchain.require("nvcc"), "", (name,), ("-Xptxas=-v", "-Werror=all-warnings"))
    compiled = tmp_path / "kernels.o"
    report = toolchain.output(toolkit.command(str(source), str(compiled)))
    arch = by_name(name.removesuffix("a"))
    entries = re.split(r"Compiling entry function '", report)[1:]
    for kernel, count in KERNELS[source.stem].items():
        assert sum(kernel in entry.split("'")[0] for entry in entries) == count
    for entry in entries:
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in entry, entry
        assert int(first(r"Used (\d+) registers", entry)) <= MAX_REGISTERS, entry
        shared = re.search(r"(\d+) bytes smem", entry)
        assert int(shared[1] if shared else 0) <= arch.shared_bytes
    for function, instructions in sass(compiled).items():
        assert "LDG.E.128" in instructions or any(name in function for name in NARROW), (
            f"{function} reads its row a word at a time"
        )
        assert not re.search(r"\b(LDL|STL)\b", instructions), f"{function} keeps values in local memory"


@pytest.mark.parametrize(
    ("source", "kernel", "count"), [("linear_ce_rows", "d_logits", 6), ("linear_ce_seeded", "scale", 2)]
)
def test_nvidia_stores_are_wide(source: str, kernel: str, count: int, tmp_path: Path) -> None:
    """4 elements of d_logits a store: 16 bytes of fp32, 8 of bf16 and fp16; elsewhere 8 of bf16."""
    compiled = tmp_path / "kernels.o"
    toolkit = Toolkit("nvidia", toolchain.require("nvcc"), "", ("sm_90a",))
    toolchain.output(toolkit.command(f"csrc/kernels/{source}.cu", str(compiled)))
    kernels = {name: text for name, text in sass(compiled).items() if kernel in name}
    assert len(kernels) == count
    for name, text in kernels.items():
        width = "STG.E.64" if kernel == "d_logits" and ("bfloat16" in name or "half" in name) else "STG.E.128"
        assert width in text, f"{name} has no {width}"


@pytest.mark.parametrize("source", ROWS, ids=lambda source: source.stem)
@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
def test_amd(source: Path, name: str, rocm_tree: Path, tmp_path: Path) -> None:
    clang = toolchain.llvm_tool("clang++")
    compiled = tmp_path / "kernels.o"
    toolkit = Toolkit("amd", clang, "", (name,), toolchain.hip_flags(rocm_tree))
    toolchain.output(toolkit.command(str(source), str(compiled)))
    code = toolchain.code_object(compiled, name, tmp_path / "kernels.hsaco")
    notes = toolchain.output([toolchain.llvm_tool("llvm-readelf"), "--notes", str(code)])
    entries = re.split(r"^  - \.agpr_count:", notes, flags=re.MULTILINE)[1:]
    arch = by_name(name)
    for kernel, count in KERNELS[source.stem].items():
        assert sum(kernel in first(r"\.name:\s+(\S+)", entry) for entry in entries) == count
    for entry in entries:
        value = {key: int(first(rf"\.{key}:\s+(\d+)", entry)) for key in AMD_LIMITS}
        assert value["wavefront_size"] == arch.wave_size == 64
        assert value["vgpr_spill_count"] == value["sgpr_spill_count"] == value["private_segment_fixed_size"] == 0, entry
        assert value["max_flat_workgroup_size"] <= arch.max_threads
        assert value["group_segment_fixed_size"] <= arch.shared_bytes
        # 512 registers a lane for all waves of a SIMD: 64 each let 8 waves live there, the most there are
        assert value["vgpr_count"] <= MAX_REGISTERS, entry
    for function, text in gcn(code).items():
        assert "global_load_dwordx4" in text or any(name in function for name in NARROW), (
            f"{function} reads its row a word at a time"
        )
        assert "scratch_" not in text and "flat_load" not in text, f"{function} does not know where its memory is"


@pytest.mark.parametrize("source", HOPPER, ids=lambda source: source.stem)
def test_hopper_on_amd(source: Path, rocm_tree: Path, tmp_path: Path) -> None:
    """No kernel, and functions that say so."""
    compiled = tmp_path / "kernels.o"
    toolkit = Toolkit("amd", toolchain.llvm_tool("clang++"), "", ("gfx942",), toolchain.hip_flags(rocm_tree))
    toolchain.output(toolkit.command(str(source), str(compiled)))
    listing = toolchain.output([toolchain.llvm_tool("llvm-readelf"), "--sections", "--symbols", str(compiled)])
    assert "hip_fatbin" not in listing and "launch_d_weight" in listing


AMD_LIMITS = (
    "wavefront_size",
    "vgpr_count",
    "vgpr_spill_count",
    "sgpr_spill_count",
    "private_segment_fixed_size",
    "group_segment_fixed_size",
    "max_flat_workgroup_size",
)


def test_a_warning_of_either_compiler_fails(rocm_tree: Path, tmp_path: Path) -> None:
    """The bite: what these tests compile with does not let an unused variable pass."""
    source = tmp_path / "unused.cu"
    source.write_text("__global__ void kernel(int* p) { int unused; *p = 1; }\n")
    nvidia = Toolkit("nvidia", toolchain.require("nvcc"), "", ("sm_90a",), ("-Werror=all-warnings",))
    amd = Toolkit("amd", toolchain.llvm_tool("clang++"), "", ("gfx942",), toolchain.hip_flags(rocm_tree))
    for toolkit in (nvidia, replace(amd, flags=(*amd.flags, "-include", "hip/hip_runtime.h"))):
        with pytest.raises(AssertionError, match="unused"):
            toolchain.output(toolkit.command(str(source), str(tmp_path / "unused.o")))


def first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, f"{pattern!r} is not in\n{text}"
    return match[1]


def sass(compiled: Path) -> dict[str, str]:
    """The machine code of every kernel of a CUDA object file, by its mangled name."""
    parts = toolchain.output([toolchain.cuobjdump(), "-sass", str(compiled)]).split("Function : ")[1:]
    return {part.split("\n")[0].strip(): part for part in parts}


def gcn(code: Path) -> dict[str, str]:
    """The machine code of every kernel of an AMD code object, by its mangled name."""
    text = toolchain.output([toolchain.llvm_tool("llvm-objdump"), "-d", str(code)])
    parts = re.split(r"^[0-9a-f]+ <(\S+)>:$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))
