"""The device compilers of a machine without a GPU: nvcc, and clang with a ROCm tree made from Triton's wheel.

AMD's own packages are not needed to compile for gfx942 and gfx950. Triton's wheel holds the HIP headers and the two
device libraries that kernels call; missing are only the one-constant modules by which clang tells those its options.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

CLANG_VERSIONS = (22, 21, 20)  # clang 19 does not know gfx950
# The constants __oclc_<name> of the device libraries: (file, name, type, value).
OPTIONS = [
    (f"{name}_{word}", symbol, "i8", value)
    for name, symbol in (
        ("daz_opt", "daz_opt"),
        ("unsafe_math", "unsafe_math_opt"),
        ("finite_only", "finite_only_opt"),
        ("correctly_rounded_sqrt", "correctly_rounded_sqrt32"),
        ("wavefrontsize64", "wavefrontsize64"),
    )
    for word, value in (("on", 1), ("off", 0))
]
ISA_VERSIONS = [(f"isa_version_{name}", "ISA_version", "i32", value) for name, value in
                (("90a", 9010), ("942", 9402), ("950", 9500))]  # fmt: skip
ABI_VERSIONS = [(f"abi_version_{value}", "ABI_version", "i32", value) for value in (400, 500, 600)]


def require(tool: str) -> str:
    """The path of `tool`. RuntimeError that names it if it is missing: a test must fail, not pass unseen."""
    path = shutil.which(tool)
    if path is None:
        raise RuntimeError(f"{tool} is not in PATH; docs/install.md says what the native tests need")
    return path


@cache
def llvm_tool(name: str) -> str:
    """An LLVM tool, such as "clang++" or "llvm-readelf", of one version for all tools."""
    for version in CLANG_VERSIONS:
        if shutil.which(f"clang++-{version}"):
            return require(f"{name}-{version}")
    raise RuntimeError(f"clang++-{CLANG_VERSIONS[0]} is not in PATH; docs/install.md says what the native tests need")


def triton_backend(vendor: str) -> Path:
    """The folder of Triton's wheel that holds what it brings for "nvidia" or "amd"."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise RuntimeError("Triton is not installed, and its wheel brings the HIP headers and cuobjdump")
    return Path(spec.origin).parent / "backends" / vendor


def cuobjdump() -> str:
    """NVIDIA's disassembler: Triton's wheel has one, too."""
    return shutil.which("cuobjdump") or str(triton_backend("nvidia") / "bin" / "cuobjdump")


def output(command: list[str]) -> str:
    """What `command` prints, both streams. AssertionError, with all of it, unless it succeeds."""
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


def make_rocm_tree(folder: Path) -> Path:
    """A minimal ROCm tree in `folder`, for `clang++ --rocm-path`."""
    source = triton_backend("amd")
    bitcode = folder / "amdgcn" / "bitcode"
    for directory in (bitcode, folder / "bin", folder / "share" / "hip"):
        directory.mkdir(parents=True, exist_ok=True)
    (folder / "include").symlink_to(source / "include")
    for library in ("ocml.bc", "ockl.bc"):
        shutil.copy(source / "lib" / library, bitcode / library)
    version = _hip_version(source / "include" / "hip" / "hip_version.h")
    for path in (folder / "share" / "hip" / "version", folder / "bin" / ".hipVersion"):
        path.write_text(version)
    layout = _data_layout(bitcode / "ockl.bc")
    header = f'target datalayout = "{layout}"\ntarget triple = "amdgcn-amd-amdhsa"\n'
    for name, symbol, kind, value in (*OPTIONS, *ISA_VERSIONS, *ABI_VERSIONS):
        constant = f"@__oclc_{symbol} = linkonce_odr protected addrspace(4) constant {kind} {value}\n"
        _assemble(header + constant, bitcode / f"oclc_{name}.bc")
    for name in ("opencl", "hip"):  # clang links them; nothing of theirs is called
        _assemble(header, bitcode / f"{name}.bc")
    return folder


def hip_flags(rocm_tree: Path) -> tuple[str, ...]:
    """Flags by which plain clang++ compiles HIP. The tree's headers go before any that the system has."""
    return (f"--rocm-path={rocm_tree}", "-isystem", f"{rocm_tree}/include", "-Werror", "-Wall")


def code_object(fat_object: Path, arch: str, to: Path) -> Path:
    """The gfx9 code object for `arch` inside a compiled HIP object file."""
    bundle = to.with_suffix(".bundle")
    output([llvm_tool("llvm-objcopy"), f"--dump-section=.hip_fatbin={bundle}", str(fat_object), os.devnull])
    target = f"hipv4-amdgcn-amd-amdhsa--{arch}"
    output([llvm_tool("clang-offload-bundler"), "--type=o", "--unbundle", f"--input={bundle}", f"--output={to}",
            f"--targets={target}"])  # fmt: skip
    return to


def _hip_version(header: Path) -> str:
    text = header.read_text()
    lines = []
    for part in ("MAJOR", "MINOR", "PATCH", "GITHASH"):
        match = re.search(rf'^#define HIP_VERSION_{part} *"?([^"\n]*)"?', text, re.MULTILINE)
        assert match, f"{header} does not define HIP_VERSION_{part}"
        lines.append(f"HIP_VERSION_{part}={match[1]}\n")
    return "".join(lines)


def _data_layout(library: Path) -> str:
    text = output([llvm_tool("llvm-dis"), str(library), "-o", "-"])
    match = re.search(r'^target datalayout = "(.*)"', text, re.MULTILINE)
    assert match, f"{library} has no data layout"
    return match[1]


def _assemble(text: str, to: Path) -> None:
    subprocess.run([llvm_tool("llvm-as"), "-o", str(to)], input=text, text=True, check=True)
