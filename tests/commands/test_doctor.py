"""`fusedce doctor`: its findings on a CPU and on GPUs that stand in, the traps, JSON and exit codes."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusedce import arch, cli, hip
from fusedce.doctor import Line, examine, exit_code, facts
from fusedce.doctor.examine import release
from fusedce.doctor.settings import SETTINGS
from fusedce.ops import registry

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """gpu(row, hip): torch seems to see one of the architecture, by CUDA or by ROCm."""

    def make(row: str, rocm: bool = False, triton: bool = True) -> None:
        properties = SimpleNamespace(name=f"card {row}", total_memory=80 << 30)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(arch, "of_device", lambda device: arch.ARCHS[row])
        monkeypatch.setattr(torch.version, "hip", "7.1" if rocm else None)
        monkeypatch.setattr(torch.version, "cuda", None if rocm else "13.0")
        monkeypatch.setattr(facts, "DRIVERS", {"nvidia": facts.Path("/nowhere"), "amd": facts.Path("/nowhere")})
        monkeypatch.setattr(registry, "_triton_missing", lambda: None if triton else "Triton is not installed")
        monkeypatch.setattr(facts, "nccl_version", lambda: "2.27.3")
        monkeypatch.setattr(facts, "triton_version", lambda: "3.9.0" if triton else None)
        monkeypatch.setattr(hip, "unavailable", lambda: "it is not built")

    return make


def lines_of(lines: list[Line], topic: str) -> list[Line]:
    return [line for line in lines if line.topic == topic]


def test_a_cpu_is_in_order() -> None:
    lines = examine(CPU)
    assert exit_code(lines) == 0 and not [line for line in lines if line.status == "fail"]
    assert {line.topic for line in lines} > {*registry.OPS, "torch", "triton", "extension", "device", "settings"}
    assert lines_of(lines, "moe_experts")[0].text == "eager (the tensors are on the CPU)"
    assert lines_of(lines, "settings") == [Line("pass", "settings", "no variable that changes how the kernels run")]


def test_an_nvidia_gpu(gpu: Any) -> None:
    gpu("sm_90")
    lines = examine(GPU)
    assert exit_code(lines) == 0 and "cuda 13.0 nccl 2.27.3" in lines_of(lines, "torch")[0].text
    assert lines_of(lines, "device")[0].text == "8 × card sm_90, 80 GiB, driver unknown"
    (limits,) = lines_of(lines, "arch")
    assert limits.status == "pass" and "32 lanes a wave" in limits.text and "227 KiB" in limits.text
    assert lines_of(lines, "linear_logprob")[0].text.startswith("triton (")
    assert "FUSEDCE_TUNED=0" in examine_with(FUSEDCE_TUNED="0")


def examine_with(**variables: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return " ".join(f"{line.status} {line.text}" for line in examine(GPU))


def test_an_amd_gpu_is_said_to_be_untried(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu("gfx942", rocm=True)
    examine_module = importlib.import_module("fusedce.doctor.examine")
    monkeypatch.setattr(examine_module, "NUMA_BALANCING", tmp_path / "none")
    limits, untried = lines_of(examine(GPU), "arch")
    assert "64 lanes a wave" in limits.text and "64 KiB" in limits.text
    assert untried.status == "warn" and "not yet run on AMD hardware" in untried.text
    said = examine_with(GPU_MAX_HW_QUEUES="1", CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert "warn GPU_MAX_HW_QUEUES=1: all streams" in said
    assert "pass CUDA_DEVICE_MAX_CONNECTIONS=1: of no effect on this device" in said
    for value, status in (("0", "pass"), ("1", "warn")):
        (tmp_path / "numa_balancing").write_text(f"{value}\n")
        monkeypatch.setattr(examine_module, "NUMA_BALANCING", tmp_path / "numa_balancing")
        assert [line.status for line in lines_of(examine(GPU), "host")] == [status]
    assert "pass GPU_MAX_HW_QUEUES=4" in examine_with(GPU_MAX_HW_QUEUES="4")


def test_what_will_be_slow_and_what_will_not_work(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu("generic", triton=False)
    lines = examine(GPU)
    assert lines_of(lines, "arch")[0].status == "warn" and "no table for this one" in lines_of(lines, "arch")[0].text
    assert lines_of(lines, "triton")[0].status == "fail" and exit_code(lines) == 1
    assert lines_of(lines, "moe_plan")[0].status == "warn"
    monkeypatch.setenv("FUSEDCE_BACKEND", "triton")
    assert lines_of(examine(GPU), "moe_plan")[0].status == "fail"
    monkeypatch.setenv("FUSEDCE_BACKEND", "nativ")
    assert "FUSEDCE_BACKEND is 'nativ'" in lines_of(examine(GPU), "settings")[-1].text
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    assert lines_of(examine(GPU), "torch")[0].text == "2.10.1 is older than 2.11"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_has_a_reason_a_source_and_no_trap_at_its_default(setting: Any) -> None:
    assert len(setting.reason) > 10 and setting.source.startswith(("https://", "docs/"))
    assert not setting.bad("0") or setting.name == "FUSEDCE_BACKEND"
    assert setting.vendor in ("any", "nvidia", "amd")


@pytest.mark.parametrize(("text", "numbers"), [("2.13.0+cpu", (2, 13)), ("3.10.0a0", (3, 10)), ("of x", ())])
def test_releases_are_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert release(text) == numbers


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "wait() holds the host" in printed and " pass, 1 warn, 0 fail" in printed
    assert cli.main(["doctor", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["machine"]["vendor"] == "cpu" and len(found["lines"]) > len(registry.OPS)
    monkeypatch.setenv("FUSEDCE_WORKSPACE_MB", "much")
    assert cli.main(["doctor", "--device", "cpu", "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["ok"]
