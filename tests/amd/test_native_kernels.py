"""The native row kernels, built for HIP by clang and executed: their host code, their fat binary, the machine code for
both chips. The checks are those that the same sources pass on the host (tests/simt)."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import toolchain
from tests.gfx9emu.hip import CHIPS, Hip
from tests.simt import test_linear_ce_rows as rows_tests
from tests.simt import test_linear_ce_seeded as seeded_tests
from tests.simt import test_linear_ce_sums as sums_tests
from tests.simt import test_linear_ce_words as words_tests
from tests.simt.host_kernels import KERNELS, ROOT, HostKernels
from tests.simt.host_seeded import HostRows
from tests.simt.host_sums import HostSums
from tests.simt.host_words import HostWords

pytestmark = pytest.mark.amd
SIMT = ROOT / "tests" / "simt"
Check = Callable[[Any], None]
BIAS_CAP = {"bias": True, "softcap": 5.0, "temperature": 1.5}


def with_kernels(test: Callable[..., None], *arguments: object) -> Check:
    """A test of tests/simt whose first argument, the kernels, is still to come."""
    return lambda kernels: test(kernels, *arguments)


# source in csrc/kernels -> how its functions are called, and what they must pass
FAMILIES: dict[str, tuple[Callable[[ctypes.CDLL], Any], tuple[Check, ...]]] = {
    "linear_ce_rows": (
        HostKernels,
        (
            with_kernels(rows_tests.test_statistics, 7, {}),
            with_kernels(rows_tests.test_statistics, 8193, {"temperature": 0.7}),
            with_kernels(rows_tests.test_gradient, 1000, BIAS_CAP, torch.float32),
            with_kernels(rows_tests.test_gradient, 1000, {"temperature": 0.7}, torch.bfloat16),
            with_kernels(rows_tests.test_gradient, 7, {}, torch.float16),
            with_kernels(rows_tests.test_parts_of_a_shard, 1000, BIAS_CAP),
            rows_tests.test_words_with_minus_infinity_count_for_nothing,
            with_kernels(rows_tests.test_a_label_out_of_range_makes_its_row_nan, 2**32),
        ),
    ),
    "linear_ce_seeded": (
        HostRows,
        (
            with_kernels(seeded_tests.test_statistics_and_gradient, (9, 257, 264), {}),
            with_kernels(seeded_tests.test_statistics_and_gradient, (33, 600, 72), {"bias": True, "softcap": 5.0}),
            seeded_tests.test_far_targets,
            with_kernels(seeded_tests.test_scaled, 2056),
        ),
    ),
    "linear_ce_words": (
        HostWords,
        (
            with_kernels(words_tests.test_argmax, 8193, True),
            with_kernels(words_tests.test_argmax_of_nan_and_infinities, 500),
            with_kernels(words_tests.test_words_by_their_ids, (40, 130), {"bias": True, "softcap": 2.5}),
            with_kernels(words_tests.test_an_id_out_of_range_is_not_read_or_written, 2**32),
        ),
    ),
    "linear_ce_sums": (HostSums, tuple(with_kernels(sums_tests.test_results, shape) for shape in ((33, 32), (40, 45)))),
}


def test_every_source_that_amd_has_is_executed() -> None:
    """Hopper's kernels are no kernels there (tests/native/test_device_code.py)."""
    assert set(FAMILIES) == {path.stem for path in KERNELS.glob("*.cu")} - {"linear_ce_hopper"}


@pytest.fixture(scope="module")
def hip(tmp_path_factory: pytest.TempPathFactory) -> Hip:
    return Hip(tmp_path_factory.mktemp("hip"))


@pytest.fixture(scope="module")
def rocm_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toolchain.make_rocm_tree(tmp_path_factory.mktemp("rocm"))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, hip: Hip, rocm_tree: Path) -> tuple[Any, tuple[Check, ...]]:
    """The functions of one source, built for both chips, and what they must pass."""
    functions, checks = FAMILIES[request.param]
    library = hip.build(SIMT / f"{request.param}.cpp", rocm_tree, f"-I{KERNELS}", f"-I{SIMT}")
    return functions(ctypes.CDLL(str(library))), checks


@pytest.mark.parametrize("chip", CHIPS)
def test_family(chip: str, hip: Hip, family: tuple[Any, tuple[Check, ...]]) -> None:
    functions, checks = family
    for check in checks:
        with hip.on(chip):
            check(functions)
