"""Builds the native extension fusedce._C, or installs without it and says why. All else is in pyproject.toml.

FUSEDCE_BUILD_EXT      auto (default): build if a toolkit that fits the installed torch is found; 0: never; 1: or fail
CUDA_HOME, CUDA_PATH   where bin/nvcc is looked for, then PATH; for ROCm: ROCM_HOME, ROCM_PATH and bin/hipcc
TORCH_CUDA_ARCH_LIST   such as "8.0;9.0a+PTX"; for ROCm: PYTORCH_ROCM_ARCH, such as "gfx942;gfx950"
MAX_JOBS               compiler processes at a time

Whether a GPU is visible plays no part. Device code (csrc/kernels) holds no torch header, so nvcc or hipcc compile it
directly, without hipify; host code is plain C++ and goes through torch.utils.cpp_extension and ninja.
"""

import os
import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setuptools import setup

CUDA_ARCHS = "8.0;9.0a;10.0a"
ROCM_ARCHS = "gfx90a;gfx942;gfx950"


class BuildError(RuntimeError):
    """The native extension cannot be built; the text says why."""


@dataclass(frozen=True)
class Toolkit:
    """A device compiler and what it shall compile for.

    vendor: "nvidia" or "amd"; archs: "sm_90a" for machine code, "compute_90" for PTX, "gfx942"; flags: further ones.
    """

    vendor: str
    compiler: str
    version: str
    archs: tuple[str, ...]
    flags: tuple[str, ...] = ()

    def command(self, source: str, output: str) -> list[str]:
        """The command that compiles one file of csrc/kernels."""
        if self.vendor == "nvidia":
            targets = [f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}" for arch in self.archs]
            special = [*targets, "-Xcompiler=-fPIC,-fvisibility=hidden"]
        else:
            special = ["-x", "hip", *(f"--offload-arch={arch}" for arch in self.archs), "-fPIC", "-fvisibility=hidden"]
        return [self.compiler, "-std=c++17", "-O3", *special, *self.flags, "-c", source, "-o", output]

    def link_arguments(self) -> list[str]:
        """How the host linker finds the runtime.

        CUDA's is linked statically, nvcc's own default, and hidden, so that it does not meet the one that torch brings.
        """
        if self.vendor == "amd":
            return [f"-L{Path(self.compiler).resolve().parents[1]}/lib", "-lamdhip64"]
        plan = _output([self.compiler, "-dryrun", "-x", "cu", os.devnull, "-o", os.devnull])
        libraries = re.search(r"^#\$ LIBRARIES=(.+)$", plan, re.MULTILINE)
        runtime = "-Wl,--exclude-libs,libcudart_static.a -lcudart_static -lrt -lpthread -ldl"
        return shlex.split(f"{libraries[1] if libraries else ''} {runtime}")


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout


def _find(name: str, *variables: str) -> str:
    """The compiler `name` in the bin folder of the first variable that has it, else in PATH."""
    for home in filter(None, map(os.environ.get, variables)):
        if (Path(home) / "bin" / name).is_file():
            return str(Path(home) / "bin" / name)
    found = shutil.which(name)
    if found is None:
        raise BuildError(f"there is no {name} in {', '.join(variables)} or PATH")
    return found


def _version(compiler: str, pattern: str, torch_has: str | None) -> str:
    """What the compiler says it is; BuildError unless of the major version that torch was built with (None: any)."""
    text = _output([compiler, "--version"])
    match = re.search(pattern, text)
    if match is None:
        raise BuildError(f"{compiler} --version tells no version: {text!r}")
    if torch_has is not None and match[1].split(".")[0] != torch_has.split(".")[0]:
        raise BuildError(f"{compiler} is version {match[1]}, and torch was built with {torch_has}")
    return match[1]


def cuda_archs(text: str) -> tuple[str, ...]:
    """TORCH_CUDA_ARCH_LIST in nvcc's words: "8.0;9.0a+PTX" is sm_80, sm_90a and compute_90a."""
    archs = []
    for word in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", word)
        if match is None:
            raise BuildError(f"TORCH_CUDA_ARCH_LIST has {word!r}; expected numbers such as 9.0, 9.0a or 8.0+PTX")
        archs += [f"sm_{match[1]}{match[2]}"] + ([f"compute_{match[1]}{match[2]}"] if match[3] else [])
    return tuple(archs)


def cuda_toolkit(torch_has: str | None) -> Toolkit:
    """nvcc and the architectures to build. torch_has: torch.version.cuda; None takes any nvcc."""
    nvcc = _find("nvcc", "CUDA_HOME", "CUDA_PATH")
    version = _version(nvcc, r"release (\d+\.\d+)", torch_has)
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST")
    archs = cuda_archs(asked or CUDA_ARCHS)
    if not asked:
        known = _output([nvcc, "--list-gpu-arch"]).split()
        archs = tuple(arch for arch in archs if arch.replace("sm_", "compute_").rstrip("a") in known)
    return Toolkit("nvidia", nvcc, version, archs)


def rocm_toolkit(torch_has: str) -> Toolkit:
    """hipcc and the architectures to build. torch_has: torch.version.hip."""
    hipcc = _find("hipcc", "ROCM_HOME", "ROCM_PATH")
    version = _version(hipcc, r"HIP version: (\d+\.\d+)", torch_has)
    archs = os.environ.get("PYTORCH_ROCM_ARCH") or ROCM_ARCHS
    return Toolkit("amd", hipcc, version, tuple(re.split(r"[;,\s]+", archs.strip())))


def wanted_toolkit() -> Toolkit | None:
    """What to build the extension with, or None to install without it."""
    wish = os.environ.get("FUSEDCE_BUILD_EXT", "auto")
    if wish not in ("auto", "0", "1"):
        raise BuildError(f"FUSEDCE_BUILD_EXT is {wish!r}; expected auto, 0 or 1")
    if wish == "0":
        return None
    try:
        return _toolkit(must=wish == "1")
    except BuildError as reason:
        if wish == "1":
            raise BuildError(f"FUSEDCE_BUILD_EXT=1, and the native extension cannot be built: {reason}") from None
        print(f"fusedce: no native extension: {reason}. FUSEDCE_BUILD_EXT=1 makes this an error.", flush=True)
        return None


def _toolkit(must: bool) -> Toolkit:
    try:
        import torch
    except ImportError as error:
        raise BuildError(f"torch cannot be imported here ({error}); use --no-build-isolation") from None
    if torch.version.hip:
        return rocm_toolkit(torch.version.hip)
    if torch.version.cuda is None:
        if not must:
            raise BuildError("this torch is a CPU build")
        print("fusedce: a CPU build of torch: the native extension will import, but cannot run on it", flush=True)
    return cuda_toolkit(torch.version.cuda)


def compile_kernels(toolkit: Toolkit, folder: Path) -> list[str]:
    """The object files of csrc/kernels/*.cu."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(Path("csrc/kernels").glob("*.cu"))
    objects = [str((folder / source.stem).resolve()) + ".o" for source in sources]

    def compile_one(source: Path, to: str) -> None:
        command = toolkit.command(str(source), to)
        print(*command, flush=True)
        subprocess.run(command, check=True)

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, sources, objects))
    return objects


def arguments(toolkit: Toolkit | None) -> dict[str, Any]:
    """What setup() needs to build the extension; nothing to install without it."""
    if toolkit is None:
        return {}
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    class BuildNative(BuildExtension):
        def build_extensions(self) -> None:
            self.extensions[0].extra_objects += compile_kernels(toolkit, Path(self.build_temp) / "kernels")
            super().build_extensions()

    facts = {
        "FUSEDCE_VENDOR": toolkit.vendor,
        "FUSEDCE_COMPILER": f"{Path(toolkit.compiler).name} {toolkit.version}",
        "FUSEDCE_ARCHS": " ".join(toolkit.archs),
        "FUSEDCE_TORCH_VERSION": torch.__version__,
    }
    extension = CppExtension(
        "fusedce._C",
        ["csrc/module.cpp", *sorted(map(str, Path("csrc/ops").glob("*.cpp")))],
        depends=sorted(map(str, Path("csrc").rglob("*.*"))),
        define_macros=[(name, f'"{value}"') for name, value in facts.items()],
        extra_compile_args=["-O2", "-Wall", "-fvisibility=hidden"],
        extra_link_args=toolkit.link_arguments(),
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildNative}}


if __name__ == "__main__":
    setup(**arguments(wanted_toolkit()))
