"""The native row kernels, built for HIP by clang and executed: their host code, their fat binary, the machine code for
both chips. The checks are those that the same sources pass on the host (tests/simt)."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import toolchain
from tests.gfx9emu.hip import CHIPS, Hip
from tests.simt import test_linear_ce_rows as rows_tests
from tests.simt import test_linear_ce_seeded as seeded_tests
from tests.simt.host_kernels import KERNELS, ROOT, HostKernels
from tests.simt.host_seeded import HostRows

pytestmark = pytest.mark.amd
SIMT = ROOT / "tests" / "simt"


@pytest.fixture(scope="module")
def rocm_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toolchain.make_rocm_tree(tmp_path_factory.mktemp("rocm"))


@pytest.fixture(scope="module")
def hip(tmp_path_factory: pytest.TempPathFactory) -> Hip:
    return Hip(tmp_path_factory.mktemp("hip"))


@pytest.fixture(scope="module")
def libraries(hip: Hip, rocm_tree: Path) -> tuple[HostKernels, HostRows]:
    return built(hip, rocm_tree, KERNELS)


def built(hip: Hip, rocm_tree: Path, kernels: Path) -> tuple[HostKernels, HostRows]:
    """Both families of row kernels from the sources in `kernels`."""
    paths = [hip.build(SIMT / name, rocm_tree, f"-I{kernels}", f"-I{SIMT}")
             for name in ("linear_ce_rows.cpp", "linear_ce_seeded.cpp")]  # fmt: skip
    rows, seeded = (ctypes.CDLL(str(path)) for path in paths)
    return HostKernels(rows), HostRows(seeded)


BIAS_CAP = {"bias": True, "softcap": 5.0, "temperature": 1.5}
ROWS: list[Callable[[HostKernels], None]] = [
    lambda k: rows_tests.test_statistics(k, 7, {}),
    lambda k: rows_tests.test_statistics(k, 8193, {"temperature": 0.7}),
    lambda k: rows_tests.test_statistics(k, 1000, BIAS_CAP),
    lambda k: rows_tests.test_gradient(k, 8193, {"temperature": 0.7}, torch.float32),
    lambda k: rows_tests.test_gradient(k, 1000, BIAS_CAP, torch.bfloat16),
    lambda k: rows_tests.test_gradient(k, 7, {}, torch.float16),
    rows_tests.test_words_with_minus_infinity_count_for_nothing,
    lambda k: rows_tests.test_a_label_out_of_range_makes_its_row_nan(k, 2**32),
]
SEEDED: list[Callable[[HostRows], None]] = [
    lambda k: seeded_tests.test_statistics_and_gradient(k, (9, 257, 264), {}),
    lambda k: seeded_tests.test_statistics_and_gradient(k, (33, 1000, 520), {"bias": True, "softcap": 5.0}),
    seeded_tests.test_far_targets,
    lambda k: seeded_tests.test_scaled(k, 2056),
]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_rows(number: int, chip: str, hip: Hip, libraries: tuple[HostKernels, HostRows]) -> None:
    with hip.on(chip):
        ROWS[number](libraries[0])


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("number", range(len(SEEDED)))
def test_seeded(number: int, chip: str, hip: Hip, libraries: tuple[HostKernels, HostRows]) -> None:
    with hip.on(chip):
        SEEDED[number](libraries[1])
