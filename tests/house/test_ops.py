"""Every op of ops/schema.py has what an op must have; every tile fits; public functions are described."""

import ast
import dataclasses
import inspect
import re

import pytest
import torch

import fusedce
from fusedce import functional
from fusedce.arch import ARCHS
from fusedce.configs import STAGES, GemmTile, fits, tile_for
from fusedce.ops import registry
from fusedce.options import ExpertOptions, LogitOptions, Upstream
from tests.house.source import functions, parameters, paths, read

NAMES = sorted(n.removeprefix("fusedce::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("fusedce::"))
# A composite op is made of others, for every backend at once.
COMPOSITE = {
    n for n in NAMES if torch._C._dispatch_has_kernel_for_dispatch_key(f"fusedce::{n}", "CompositeImplicitAutograd")
}
# Ops that are made of a function of the backends that takes what no op can: a Python function, a `Wanted`.
PRIMITIVES = {"linear_ce_sum": "linear_fused", "linear_logprob_into_backward": "linear_logprob_backward"}
# Arguments of a backend's function that stand for several of the op's.
RECORDS = {
    "options": tuple(f.name for f in dataclasses.fields(LogitOptions)),
    "settings": tuple(f.name for f in dataclasses.fields(ExpertOptions)),
    "upstream": Upstream._fields,
    "main_grads": ("gate_up_main_grad", "down_main_grad"),
}
# What an op takes for its autograd alone.
FOR_AUTOGRAD = {"moe_experts": RECORDS["main_grads"]}


def test_the_ops_are_known() -> None:
    head = {"linear_ce", "linear_ce_sum", "linear_ce_heads", "linear_logprob", "linear_logprob_into", "linear_parts"}
    head |= {"linear_argmax", "linear_logprob_of"}
    expected = head | {"moe_route", "moe_plan", "moe_experts", "moe_dispatch", "moe_combine"}
    assert expected.issubset(NAMES)
    assert set(NAMES) > COMPOSITE


@pytest.mark.parametrize("package", ["eager", "triton"])
@pytest.mark.parametrize("op", [n for n in NAMES if n not in COMPOSITE and n not in PRIMITIVES])
def test_backend_has_the_op_with_the_schema_s_arguments(package: str, op: str) -> None:
    # The backend is chosen, and a certificate's value is read by nobody.
    not_passed = ("backend", "certificate")
    schema = [a.name for a in getattr(torch.ops.fusedce, op).default._schema.arguments if a.name not in not_passed]
    schema = [name for name in schema if name not in FOR_AUTOGRAD.get(op, ())]
    given = [name for argument in backend_arguments(package, op) for name in RECORDS.get(argument, (argument,))]
    assert sorted(given) == sorted(schema)


@pytest.mark.parametrize("primitive", PRIMITIVES.values())
def test_backends_agree_on_primitives(primitive: str) -> None:
    """A function that is no op itself has the same arguments in every backend."""
    assert backend_arguments("eager", primitive) == backend_arguments("triton", primitive)
    assert backend_arguments("eager", primitive) == backend_arguments("hip", primitive)


@pytest.mark.parametrize("op", sorted(registry.NATIVE_OPS - set(PRIMITIVES)))
def test_the_native_backend_has_its_ops_with_the_same_arguments(op: str) -> None:
    """And their backward."""
    for name in (op, f"{op}_backward") if f"{op}_backward" in NAMES else (op,):
        assert backend_arguments("eager", name) == backend_arguments("hip", name)


def backend_arguments(package: str, name: str) -> list[str]:
    """The arguments of a backend's function, which must be there once and be exported."""
    found = [
        f for path in paths() if path.startswith(f"fusedce/{package}/") for f in functions(read(path)) if f.name == name
    ]
    assert len(found) == 1, f"fusedce.{package} has {len(found)} functions called {name}"
    assert name in exported(f"fusedce/{package}/__init__.py")
    return parameters(found[0])


def exported(path: str) -> list[str]:
    """The names in a module's __all__, without importing it."""
    (names,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(read(path)).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return names


@pytest.mark.parametrize("op", NAMES)
def test_op_is_opchecked(op: str) -> None:
    """A backward is checked as part of its op: opcheck runs it under AOTAutograd and compares its fake."""
    forward = op.removesuffix("_backward")
    tests = [read(path) for path in paths() if path.startswith("tests/") and "house" not in path]
    assert any("opcheck(" in text and re.search(rf"\b{forward}\b", text) for text in tests)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
@pytest.mark.parametrize("stage", STAGES)
def test_tile_fits(stage: str, arch, itemsize: int) -> None:
    assert fits(tile_for(stage, arch, itemsize), arch, itemsize) is None


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
@pytest.mark.parametrize("few", ["", "_few"])
def test_the_experts_pad_rows_alike_in_every_stage(few: str, arch, itemsize: int) -> None:
    """One GEMM writes the rows that the next one reads, in tiles of as many."""
    gate_up, rows = (tile_for(f"moe_{stage}{few}", arch, itemsize) for stage in ("gate_up", "rows"))
    assert gate_up.block_m == rows.block_m
    for stage in ("moe_wgrad_few",) if few else ("moe_wgrad", "moe_wgrad_add"):
        assert rows.block_m % tile_for(stage, arch, itemsize).block_k == 0


def test_a_tile_that_does_not_fit_is_told() -> None:
    arch = ARCHS["gfx942"]
    assert "threads" in fits(GemmTile(64, 64, 32, num_warps=32, num_stages=1), arch, 2)
    assert "shared" in fits(GemmTile(256, 256, 64, num_warps=8, num_stages=2), arch, 2)
    assert "accumulators" in fits(GemmTile(256, 256, 16, num_warps=4, num_stages=1), arch, 2)


@pytest.mark.parametrize("name", [n for n in functional.__all__ if inspect.isfunction(getattr(functional, n))])
def test_public_function_is_described(name: str) -> None:
    function = getattr(functional, name)
    text = inspect.getdoc(function) or ""
    for argument in inspect.signature(function).parameters:
        assert re.search(rf"\b{argument}\b", text), f"{name}: argument {argument} is not described"
    for word in ("Args:", "Returns:", "Raises", "emory", "etermini"):
        assert word in text, f"{name}: the docstring says nothing of {word!r}"
    assert re.search(r"\([A-Z.][^)]*\)", text), f"{name}: no shape"


@pytest.mark.parametrize("name", fusedce.__all__)
def test_public_name_has_a_docstring(name: str) -> None:
    assert name == "__version__" or inspect.getdoc(getattr(fusedce, name))
