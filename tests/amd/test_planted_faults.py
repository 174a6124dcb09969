"""The gates bite: faults as they are made on AMD GPUs, planted one at a time, and which gate catches each.

`pytest -s` prints the table. The same for the package's Triton kernels: `python tools/mutants.py amd`.
"""

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import toolchain
from tests.gfx9emu.faults import FaultError
from tests.gfx9emu.hip import CHIPS, Hip
from tests.simt import test_linear_ce_rows as rows_tests
from tests.simt.host_kernels import KERNELS, ROOT, HostKernels

pytestmark = pytest.mark.amd
VALUES = "wrong values"
Run = Callable[[ctypes.CDLL, int], None]


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.allclose(out.double(), expected.double(), rtol=1e-5, atol=1e-5), VALUES


def run(library: ctypes.CDLL, fault: int, kernel: str, a: torch.Tensor, out: torch.Tensor, blocks: int, n: int,
        b: torch.Tensor | None = None) -> None:  # fmt: skip
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (a, a if b is None else b, out))
    library.run(fault, kernel.encode(), *pointers, blocks, n)


def log_sum_exp(library: ctypes.CDLL, fault: int) -> None:
    x, out = 4 * torch.randn(3, 1000), torch.full((3,), torch.nan)
    run(library, fault, "l", x, out, 3, 1000)
    close(out, x.double().logsumexp(1))


def count_positive(library: ctypes.CDLL, fault: int) -> None:
    x, out = torch.randn(5, 64), torch.full((5,), -1, dtype=torch.int32)
    run(library, fault, "c", x, out, 5, 0)
    assert torch.equal(out, (x > 0).sum(1).int()), VALUES


def to_bf16(library: ctypes.CDLL, fault: int) -> None:
    """13 blocks: 8 dies do not divide them. The last one is not full."""
    x, out = torch.randn(13 * 64 - 5).bfloat16().float(), torch.full((13 * 64 - 5,), torch.nan).bfloat16()
    run(library, fault, "b", x, out, 13, len(x))
    assert torch.equal(out.float(), x), VALUES


def transpose(library: ctypes.CDLL, fault: int) -> None:
    x, out = torch.randn(16, 16), torch.full((16, 16), torch.nan)
    run(library, fault, "t", x, out, 1, 0)
    assert torch.equal(out, x.t()), VALUES


def product(library: ctypes.CDLL, fault: int) -> None:
    a, b, out = torch.randn(32, 16).bfloat16(), torch.randn(32, 16).bfloat16(), torch.full((32, 32), torch.nan)
    run(library, fault, "p", a, out, 1, 16, b)
    close(out, a.double() @ b.double().t())


CHECKS: tuple[Run, ...] = (log_sum_exp, count_positive, to_bf16, transpose, product)
# In the order of the enum in planted.cpp, whose first is no fault: (name, check that meets it, words of the gate)
FAULTS: tuple[tuple[str, Run, str], ...] = (
    ("a shuffle tree of 32 lanes", log_sum_exp, VALUES),
    ("a missing barrier", log_sum_exp, "LDS race|LDS load of bytes that nobody wrote"),
    ("a wave that leaves before the barrier", log_sum_exp, "barrier divergence"),
    ("a row read one word too far", log_sum_exp, "global load out of bounds"),
    ("a wave's result not written to LDS", log_sum_exp, "LDS load of bytes that nobody wrote"),
    ("a running sum not rescaled", log_sum_exp, VALUES),
    ("a ballot of 32 bits", count_positive, VALUES),
    ("a remap over dies that forgets the remainder", to_bf16, VALUES),
    ("no mask at the end", to_bf16, "global store out of bounds"),
    ("rows of LDS that overlap", transpose, "LDS race"),
    ("16-bit halves swapped", to_bf16, VALUES),
    ("MFMA's result taken for row-major", product, VALUES),
    ("MFMA's result one row down", product, "global store out of bounds"),
    ("two workgroups with one result", log_sum_exp, "global race"),
    ("one workgroup reads another's result", to_bf16, "global race"),
)


@pytest.fixture(scope="module")
def rocm_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toolchain.make_rocm_tree(tmp_path_factory.mktemp("rocm"))


@pytest.fixture(scope="module")
def hip(tmp_path_factory: pytest.TempPathFactory) -> Hip:
    return Hip(tmp_path_factory.mktemp("hip"))


@pytest.fixture(scope="module")
def planted(hip: Hip, rocm_tree: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(hip.build(Path(__file__).with_name("planted.cpp"), rocm_tree)))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_without_a_fault_all_is_well(check: Run, chip: str, hip: Hip, planted: ctypes.CDLL) -> None:
    with hip.on(chip):
        check(planted, 0)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("number", range(1, len(FAULTS) + 1), ids=[name for name, _, _ in FAULTS])
def test_fault_is_caught(number: int, chip: str, hip: Hip, planted: ctypes.CDLL) -> None:
    name, check, gate = FAULTS[number - 1]
    with pytest.raises((FaultError, AssertionError), match=gate) as caught, hip.on(chip):
        check(planted, number)
    print(f"\n{chip}  {name}: {str(caught.value).splitlines()[0]}")


# text of csrc/kernels -> what takes its place, and the gate
NATIVE = {
    "half the lanes are not merged": ("lane_mask = kWaveSize / 2", "lane_mask = kWaveSize / 4", "RMS|error"),
    "a missing barrier": ("= value;\n  __syncthreads();\n", "= value;\n", "LDS race|LDS load of bytes that nobody"),
}


@pytest.mark.parametrize("name", NATIVE)
def test_fault_in_the_native_kernels_is_caught(name: str, hip: Hip, rocm_tree: Path, tmp_path: Path) -> None:
    before, after, gate = NATIVE[name]
    folder = tmp_path / "kernels"
    shutil.copytree(KERNELS, folder)
    texts = {path: path.read_text() for path in folder.iterdir()}
    assert sum(text.count(before) for text in texts.values()) == 1
    for path, text in texts.items():
        path.write_text(text.replace(before, after))
    simt = ROOT / "tests" / "simt"
    flags = (f"-I{folder}", f"-I{simt}")
    library = hip.build(simt / "linear_ce_rows.cpp", rocm_tree, *flags, chips=("gfx942",))
    kernels = HostKernels(ctypes.CDLL(str(library)))
    with pytest.raises((FaultError, AssertionError), match=gate) as caught, hip.on("gfx942"):
        rows_tests.test_statistics(kernels, 1000, {"temperature": 0.7})
    print(f"\ngfx942  {name}: {str(caught.value).splitlines()[0]}")
