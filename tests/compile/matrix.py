"""The compile matrix: every Triton kernel × the tile its table gives × dtypes × GPUs, compiled without any of them.

A file under fusedce/triton with a kernel (a @triton.jit function whose name ends in _kernel) exposes

    KERNEL                 that function
    STAGE                  its stage in fusedce.configs, or None for kernels that need no tile
    STAGE_WITH_OPTIONS     where it differs, the stage with all options on
    STAGE_FEW              where there is one, the stage for few rows an expert
    signature(dtype[, tile, …])  argument name -> Triton type, for operands of "bf16", "fp16" or "fp32"; else
                           "constexpr". With a tile, and options by name, where the type depends on them: a
                           descriptor's block is part of its type
    constexprs(tile, …)    constant name -> value for a tile (None where STAGE is None)
    UNIT_STRIDES           names of strides that are 1 at a usual launch, where Triton makes them constants

Parameters of constexprs() that default to True or False are options of the kernel: it is compiled with all of them off,
with all of them on, and, where bias and softcap have a stage of their own, with the others on ("rest"); with the tile
for few rows all of them are off ("few").
"""

import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from types import ModuleType

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

import fusedce.triton
from fusedce.arch import ARCHS, Arch
from fusedce.configs import GemmTile, table_tile
from fusedce.triton.common import ROW_LAUNCH, launch_options
from tests.compile import amd, nvidia
from tests.compile.resources import Resources

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
# The dtypes beside bf16 are compiled for one GPU of each vendor: what they change, they change everywhere.
OTHER_DTYPE_TARGETS = ("sm_90", "gfx942")


@dataclass(frozen=True)
class Case:
    """One kernel to compile. module: where it lives under fusedce.triton; options: "off", "on", "rest" or "few"."""

    module: str
    dtype: str
    target: str
    options: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What names the row of the golden table: kernel, options, target, dtype."""
        return self.module, self.options, self.target, self.dtype

    @property
    def switches(self) -> dict[str, bool]:
        """The kernel's options by name."""
        off = ("has_bias", "has_softcap") if self.options == "rest" else ()
        return {name: self.options not in ("off", "few") and name not in off for name in options_of(self.source)}

    @property
    def source(self) -> ModuleType:
        """The kernel's module."""
        return importlib.import_module(f"fusedce.triton.{self.module}")

    @property
    def arch(self) -> Arch:
        """The architecture's row."""
        return ARCHS[self.target]

    @property
    def tile(self) -> GemmTile | None:
        """The tile that a launch on this GPU would take."""
        stage = self.source.STAGE
        if self.options == "on":
            stage = getattr(self.source, "STAGE_WITH_OPTIONS", stage)
        if self.options == "few":
            stage = self.source.STAGE_FEW
        return table_tile(stage, self.arch, ITEMSIZE[self.dtype]) if stage else None


def kernels_in(module: ModuleType) -> list[str]:
    """The names of the kernels defined in a module, as opposed to imported or called by other kernels."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel") and value.fn.__module__ == module.__name__
    ]


def kernel_modules() -> list[str]:
    """Every module under fusedce.triton that defines a kernel, found by walking the package."""
    found = []
    for info in pkgutil.walk_packages(fusedce.triton.__path__, "fusedce.triton."):
        if kernels_in(importlib.import_module(info.name)):
            found.append(info.name.removeprefix("fusedce.triton."))
    return found


def options_of(module: ModuleType) -> list[str]:
    """The constants that a launch chooses as True or False."""
    given = inspect.signature(module.constexprs).parameters.values()
    return [parameter.name for parameter in given if isinstance(parameter.default, bool)]


def cases() -> list[Case]:
    """The whole matrix, without kernels that a dtype does not change."""
    matrix = []
    for name in kernel_modules():
        module = Case(name, "bf16", "sm_90", "off").source
        settings = ["off"] + ["on"] * bool(options_of(module))
        settings += ["rest"] * (hasattr(module, "STAGE_WITH_OPTIONS") and "has_bias" in options_of(module))
        settings += ["few"] * hasattr(module, "STAGE_FEW")
        matrix += [Case(name, "bf16", target, options) for options in settings for target in TARGETS]
        for dtype in ("fp16", "fp32"):
            if dtype_matters(module, dtype):
                matrix += [Case(name, dtype, target, "off") for target in OTHER_DTYPE_TARGETS]
    return matrix


def signature_of(
    module: ModuleType, dtype: str, tile: GemmTile | None, switches: dict[str, bool] | None = None
) -> dict[str, str]:
    """The module's signature for a tile and options."""
    known = inspect.signature(module.signature).parameters
    given = {name: value for name, value in ({"tile": tile} | (switches or {})).items() if name in known}
    return module.signature(dtype, **given)


def dtype_matters(module: ModuleType, dtype: str) -> bool:
    """Whether operands of `dtype` make another kernel than bf16's."""
    tile = table_tile(module.STAGE, ARCHS["sm_80"], ITEMSIZE["bf16"]) if module.STAGE else None
    return signature_of(module, dtype, tile) != signature_of(module, "bf16", tile)


def compile_case(case: Case) -> CompiledKernel:
    """The kernel as a launch with sizes that are multiples of 16 would compile it."""
    module, tile = case.source, case.tile
    unit_strides = getattr(module, "UNIT_STRIDES", ())
    signature = signature_of(module, case.dtype, tile, case.switches) | dict.fromkeys(unit_strides, "constexpr")
    constants = module.constexprs(tile, **case.switches) | dict.fromkeys(unit_strides, 1)
    launch = launch_options(tile, case.arch) if tile else ROW_LAUNCH
    return compile_kernel(module.KERNEL, signature, constants, launch, case.arch)


def compile_kernel(
    kernel: triton.JITFunction, signature: dict[str, str], constants: dict[str, int], launch: dict[str, int], arch: Arch
) -> CompiledKernel:
    """A kernel for an architecture. Pointers and integers count as divisible by 16, as they are in real models."""
    assert set(signature) == set(kernel.arg_names), f"{kernel.__name__}: signature() is not the kernel's arguments"
    ordered = {name: signature[name] for name in kernel.arg_names}
    divisible = {
        (position,): [["tt.divisibility", 16]]
        for position, kind in enumerate(ordered.values())
        if kind.startswith("*") or kind in ("i32", "i64")
    }
    source = ASTSource(fn=kernel, signature=ordered, constexprs=constants, attrs=divisible)
    if arch.vendor == "amd":
        target = GPUTarget("hip", arch.name, arch.wave_size)
    else:
        target = GPUTarget("cuda", int(arch.name.removeprefix("sm_")), arch.wave_size)
    return triton.compile(source, target=target, options=launch)


def measure(compiled: CompiledKernel, arch: Arch) -> Resources:
    """What the compiled kernel takes of its GPU."""
    return amd.resources(compiled, arch) if arch.vendor == "amd" else nvidia.resources(compiled)
