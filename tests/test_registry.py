"""What "auto" takes on a GPU, told by functions that stand for one."""

import pytest
import torch

import fusedce
from fusedce import arch, hip
from fusedce.ops import registry

BF16, CUDA = torch.bfloat16, torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """machine(triton, native, name, hopper): which backends run, on which GPU, and whether with Hopper's kernels."""

    def make(triton: bool = True, native: bool = True, name: str = "generic", hopper: bool = True) -> None:
        monkeypatch.delenv("FUSEDCE_BACKEND", raising=False)
        monkeypatch.setattr(registry, "_triton_missing", lambda: None if triton else "Triton is not installed")
        monkeypatch.setattr(hip, "unavailable", lambda: None if native else "it is not built")
        monkeypatch.setattr(hip, "has_hopper", lambda: hopper)
        monkeypatch.setattr(arch, "of_device", lambda device: arch.by_name(name))

    return make


def backend(op: str, dtype: torch.dtype = BF16) -> str:
    return registry.choose(op, "auto", CUDA, dtype).backend


def test_triton_goes_first(machine) -> None:  # type: ignore[no-untyped-def]
    for native in (True, False):
        machine(native=native)
        assert {backend(op) for op in registry.OPS} == {"triton"}
    machine()
    said = fusedce.explain("linear_logprob", "cuda:0")
    assert "triton (the first of triton, native, eager that runs here)" in said and "native: could run" in said


def test_native_goes_first_where_rows_have_it_ahead(machine) -> None:  # type: ignore[no-untyped-def]
    machine(name="sm_90")
    assert {op for op in registry.OPS if backend(op) == "native"} == {"linear_logprob", "linear_ce_sum"}
    assert "linear_logprob on cuda:0, bfloat16: native (measured ahead on this GPU)" in fusedce.explain(device="cuda:0")
    assert backend("linear_logprob", torch.float32) == backend("linear_logprob", torch.float16) == "triton"
    for other in ({"native": False}, {"hopper": False}, {"name": "sm_80"}, {"name": "gfx942"}):
        machine(**{"name": "sm_90", **other})
        assert {backend(op) for op in registry.OPS} == {"triton"}


def test_what_cannot_run_is_passed_over_by_name(machine) -> None:  # type: ignore[no-untyped-def]
    machine(triton=False)
    assert backend("linear_ce_sum") == "native"
    machine(triton=False, native=False)
    choice = registry.choose("linear_logprob", "auto", CUDA, BF16)
    assert choice.backend == "eager"
    assert choice.reason == "not triton: Triton is not installed; not native: it is not built"
