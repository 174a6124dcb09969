"""setup.py's choice of a compiler and its architectures, with compilers that only say a version."""

import stat
from pathlib import Path

import pytest
import torch

import setup as build_script
from fusedce.hip.extension import runs_on
from setup import BuildError

pytestmark = pytest.mark.native

NVCC = """#!/bin/sh
[ "$1" = --list-gpu-arch ] && printf '%s\\n' {known} || echo 'Cuda compilation tools, release {version}, V{version}.88'
"""
HIPCC = "#!/bin/sh\necho 'HIP version: {version}.25424-4179531dcd'\n"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No variable that the build reads is set, and PATH begins with an empty folder for the tests' compilers."""
    for name in ("FUSEDCE_BUILD_EXT", "CUDA_HOME", "CUDA_PATH", "ROCM_HOME", "ROCM_PATH", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PYTORCH_ROCM_ARCH", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


def torch_of(monkeypatch: pytest.MonkeyPatch, cuda: str | None = None, hip: str | None = None) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)


def put(folder: Path, name: str, text: str) -> str:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def put_nvcc(folder: Path, version: str = "13.0", known: str = "compute_80 compute_90 compute_100") -> str:
    return put(folder, "nvcc", NVCC.format(version=version, known=known))


def test_auto_takes_a_toolkit_that_fits_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch_of(monkeypatch, cuda="13.1")
    nvcc = put_nvcc(tmp_path)
    assert build_script.wanted_toolkit() == build_script.Toolkit("nvidia", nvcc, "13.0", ("sm_80", "sm_90a", "sm_100a"))


def test_whether_a_gpu_is_visible_plays_no_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch_of(monkeypatch, cuda="13.0")
    put_nvcc(tmp_path)

    def forbidden() -> bool:
        raise AssertionError("the build asked whether a GPU is visible")

    monkeypatch.setattr(torch.cuda, "is_available", forbidden)
    assert build_script.wanted_toolkit() is not None


@pytest.mark.parametrize(
    ("cuda", "nvcc", "reason"),
    [
        (None, "13.0", "this torch is a CPU build"),
        ("13.0", None, "there is no nvcc in CUDA_HOME, CUDA_PATH or PATH"),
        ("13.0", "12.8", "is version 12.8, and torch was built with 13.0"),
    ],
)
def test_auto_without_one_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    cuda: str | None, nvcc: str | None, reason: str,
) -> None:  # fmt: skip
    torch_of(monkeypatch, cuda=cuda)
    if nvcc:
        put_nvcc(tmp_path, nvcc)
    assert build_script.wanted_toolkit() is None
    assert reason in capsys.readouterr().out


def test_1_fails_where_auto_would_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch_of(monkeypatch, cuda="13.0")
    put_nvcc(tmp_path, "12.8")
    monkeypatch.setenv("FUSEDCE_BUILD_EXT", "1")
    with pytest.raises(BuildError, match=r"FUSEDCE_BUILD_EXT=1, .* is version 12.8, and torch was built with 13.0"):
        build_script.wanted_toolkit()


def test_1_builds_for_a_cpu_torch_and_says_what_that_is_good_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_of(monkeypatch)
    put_nvcc(tmp_path)
    monkeypatch.setenv("FUSEDCE_BUILD_EXT", "1")
    toolkit = build_script.wanted_toolkit()
    assert toolkit is not None and toolkit.vendor == "nvidia"
    assert "cannot run on it" in capsys.readouterr().out


def test_cuda_home_goes_before_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch_of(monkeypatch, cuda="13.0")
    put_nvcc(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    chosen = put_nvcc(home, "13.2")
    monkeypatch.setenv("CUDA_HOME", str(home))
    toolkit = build_script.wanted_toolkit()
    assert toolkit is not None and (toolkit.compiler, toolkit.version) == (chosen, "13.2")


def test_an_older_nvcc_is_not_asked_for_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch_of(monkeypatch, cuda="12.6")
    put_nvcc(tmp_path, "12.6", "compute_80 compute_90")
    toolkit = build_script.wanted_toolkit()
    assert toolkit is not None and toolkit.archs == ("sm_80", "sm_90a")


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("9.0a", ("sm_90a",)),
        ("8.0;8.6 9.0+PTX", ("sm_80", "sm_86", "sm_90", "compute_90")),
        ("10.0f, 12.0", ("sm_100f", "sm_120")),
    ],
)
def test_the_list_of_architectures_is_honoured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, archs: tuple[str, ...]
) -> None:
    torch_of(monkeypatch, cuda="13.0")
    put_nvcc(tmp_path)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    toolkit = build_script.wanted_toolkit()
    assert toolkit is not None and toolkit.archs == archs
    command = toolkit.command("a.cu", "a.o")
    for arch in archs:
        assert f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}" in command


@pytest.mark.parametrize("text", ["Hopper", "90", "9.0;", "9.0a+ptx"])
def test_other_lists_are_refused(text: str) -> None:
    with pytest.raises(BuildError, match="TORCH_CUDA_ARCH_LIST"):
        build_script.cuda_archs(text)


def test_a_rocm_torch_takes_hipcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch_of(monkeypatch, hip="7.0.51831")
    hipcc = put(tmp_path, "hipcc", HIPCC.format(version="7.1"))
    toolkit = build_script.wanted_toolkit()
    assert toolkit == build_script.Toolkit("amd", hipcc, "7.1", ("gfx90a", "gfx942", "gfx950"))
    assert "--offload-arch=gfx950" in toolkit.command("a.cu", "a.o")
    assert toolkit.link_arguments() == [f"-L{tmp_path}/lib", "-lamdhip64"]
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx942")
    assert build_script.rocm_toolkit("7.0").archs == ("gfx942",)


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_100a", (10, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("sm_120", (12, 1), True),
        ("compute_80", (12, 0), True),
        ("compute_90", (8, 0), False),
        ("compute_90a", (10, 0), False),
        ("compute_90a", (9, 0), True),
        ("compute_100f", (10, 3), True),
        ("compute_100f", (12, 0), False),
    ],
)
def test_what_runs_where(built: str, capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(built, *capability) is runs
