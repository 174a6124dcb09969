"""The native kernels under the thread sanitizer: their barriers and shuffles alone must order what they share."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.simt.host_kernels import KERNELS, compile_for

pytestmark = pytest.mark.native


def run_sanitized(wave_size: int, folder: Path, kernels: Path) -> subprocess.CompletedProcess[str]:
    program = compile_for("races.cpp", wave_size, folder / "races", kernels, "-fsanitize=thread", "-g")
    return subprocess.run([str(program)], text=True, capture_output=True)


@pytest.mark.parametrize("wave_size", [32, 64])
def test_no_races(wave_size: int, tmp_path: Path) -> None:
    done = run_sanitized(wave_size, tmp_path, KERNELS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ran\n"


def test_a_missing_barrier_is_a_race(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    shutil.copytree(KERNELS, kernels)
    text = (kernels / "wave.cuh").read_text()
    barrier = "= value;\n  __syncthreads();\n"
    assert text.count(barrier) == 1
    (kernels / "wave.cuh").write_text(text.replace(barrier, "= value;\n"))
    done = run_sanitized(64, tmp_path, kernels)
    assert done.returncode != 0 and "data race" in done.stderr and "wave.cuh" in done.stderr


def test_divergence_is_reported(tmp_path: Path) -> None:
    """A thread that leaves before a barrier would hang a GPU."""
    kernels = tmp_path / "kernels"
    shutil.copytree(KERNELS, kernels)
    text = (kernels / "wave.cuh").read_text()
    first = "  value = wave_reduce(value, merge);\n  __syncthreads();"
    assert text.count(first) == 1
    (kernels / "wave.cuh").write_text(text.replace(first, "  if (thread == 7) return value;\n" + first))
    done = run_sanitized(64, tmp_path, kernels)
    assert done.returncode != 0 and "divergence" in done.stdout
