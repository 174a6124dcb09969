"""What "auto" takes on a GPU, told by functions that stand for one."""

import pytest
import torch

import fusedce
from fusedce import hip
from fusedce.ops import registry

BF16, CUDA = torch.bfloat16, torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """machine(triton, native, multiplies): which backends run, and whether the native one has matrix products there."""

    def make(triton: bool = True, native: bool = True, multiplies: bool = True) -> None:
        monkeypatch.delenv("FUSEDCE_BACKEND", raising=False)
        monkeypatch.setattr(registry, "_triton_missing", lambda: None if triton else "Triton is not installed")
        monkeypatch.setattr(hip, "unavailable", lambda: None if native else "it is not built")
        monkeypatch.setattr(hip, "multiplies_on", lambda device: multiplies)

    return make


def backend(op: str, dtype: torch.dtype = BF16) -> str:
    return registry.choose(op, "auto", CUDA, dtype).backend


def test_native_log_probs_go_first_where_they_were_faster(machine) -> None:  # type: ignore[no-untyped-def]
    machine()
    assert backend("linear_logprob") == "native"
    assert [backend("linear_logprob", dtype) for dtype in (torch.float16, torch.float32)] == ["triton", "triton"]
    assert backend("linear_ce_sum") == backend("moe_experts") == "triton"
    said = fusedce.explain("linear_logprob", "cuda:0")
    assert "native (the fastest measured for this op here)" in said and "triton: could run" in said


def test_elsewhere_triton_goes_first(machine) -> None:  # type: ignore[no-untyped-def]
    machine(multiplies=False)
    assert backend("linear_logprob") == "triton"
    machine(native=False)
    assert backend("linear_logprob") == "triton"


def test_what_cannot_run_is_passed_over_by_name(machine) -> None:  # type: ignore[no-untyped-def]
    machine(triton=False)
    assert backend("linear_ce_sum") == "native"
    machine(triton=False, native=False)
    choice = registry.choose("linear_logprob", "auto", CUDA, BF16)
    assert choice.backend == "eager"
    assert choice.reason == "not triton: Triton is not installed; not native: it is not built"
