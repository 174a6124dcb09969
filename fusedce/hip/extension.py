"""The compiled module fusedce._C: loaded on first use, and the reason in words where it cannot be."""

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any

import torch

BUILD_COMMAND = "FUSEDCE_BUILD_EXT=1 pip install --no-build-isolation -e ."


@functools.cache
def module() -> ModuleType:
    """fusedce._C; importing it registers `torch.ops.fusedce_native`. ImportError where it is missing or unloadable."""
    return importlib.import_module("fusedce._C")


def build_info() -> dict[str, Any]:
    """What the extension was built with: vendor "nvidia" or "amd", compiler, archs, torch, wave_size (lanes in step).

    Raises RuntimeError with the reason if there is no extension that this torch can load.
    """
    reason = _not_loadable()
    if reason:
        raise RuntimeError(f"fusedce.hip.build_info: {reason}")
    return module().build_info()


def tile(kernel: str) -> dict[str, int]:
    """The C++ constants of a kernel: threads a block, vector_width in fp32 words a load, unroll in loads in flight."""
    return module().tile_table()[kernel]


def unavailable() -> str | None:
    """None if the native backend can run on the current GPU, else why not and what to do about it."""
    reason = _not_loadable()
    if reason:
        return reason
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return _not_for_device(torch.cuda.current_device())


@functools.cache
def _not_loadable() -> str | None:
    if importlib.util.find_spec("fusedce._C") is None:
        return f"the native extension is not built; to build it: {BUILD_COMMAND}"
    try:
        info = module().build_info()
    except ImportError as error:
        return f"the native extension does not load ({error}); to build it again: {BUILD_COMMAND}"
    if info["torch"] != torch.__version__:
        # C++ symbols and layouts change between releases of torch, with or without an error at load.
        return f"the native extension was built with torch {info['torch']}, not {torch.__version__}: {BUILD_COMMAND}"
    return None


@functools.cache
def _not_for_device(index: int) -> str | None:
    info = module().build_info()
    vendor = "amd" if torch.version.hip else "nvidia"
    if info["vendor"] != vendor:
        return f"the native extension was built for {info['vendor']}, and this torch for {vendor}: {BUILD_COMMAND}"
    if vendor == "amd":
        arch = torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
        runs = arch in info["archs"]
    else:
        major, minor = torch.cuda.get_device_capability(index)
        arch = f"sm_{major}{minor}"
        runs = any(runs_on(built, major, minor) for built in info["archs"])
    if runs:
        return None
    variable = "PYTORCH_ROCM_ARCH" if vendor == "amd" else "TORCH_CUDA_ARCH_LIST"
    built = ", ".join(info["archs"])
    return f"the native extension has {built}, and this GPU is {arch}; name it in {variable}: {BUILD_COMMAND}"


def runs_on(built: str, major: int, minor: int) -> bool:
    """Whether code for `built` ("sm_90a", "sm_80", "compute_90") runs on an NVIDIA GPU of this compute capability.

    Machine code runs within its major version, from its minor on; PTX on its own version and all later ones. With the
    suffix "a" both run on their own version alone, with "f" within its family, the major version.
    """
    kind, _, number = built.partition("_")
    suffix = number[-1] if number[-1].isalpha() else ""
    built_major, built_minor = divmod(int(number.removesuffix(suffix)), 10)
    if suffix == "a":
        return (built_major, built_minor) == (major, minor)
    if kind == "compute" and not suffix:
        return (built_major, built_minor) <= (major, minor)
    return built_major == major and built_minor <= minor


def has_hopper() -> bool:
    """Whether the extension was built with the kernels that only Hopper runs."""
    return any(name in ("sm_90a", "compute_90a") for name in build_info()["archs"])
