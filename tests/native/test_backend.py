"""fusedce.hip from Python to its kernels, which the host runs, against the eager twin."""

import pytest

from tests.native.wheels import ROOT, Build

# One worker: the build takes minutes, and is made once a process.
pytestmark = [pytest.mark.native, pytest.mark.xdist_group("native_build")]


@pytest.mark.parametrize(
    "case",
    [
        "vocab=1000, with_bias=False, temperature=1.0, softcap=0.0",
        "vocab=1001, with_bias=True, temperature=0.8, softcap=20.0",
        "vocab=1001, with_bias=True, temperature=None, softcap=0.0",
    ],
)
def test_the_backend_agrees_with_its_twin(native_build: Build, case: str) -> None:
    code = f"""
import sys
sys.path.append({str(ROOT)!r})
from tests.simt.backend import check
check(num_rows=300, {case})
import fusedce
print(fusedce.__file__)
"""
    assert native_build.python(code) == str(native_build.unpacked / "fusedce" / "__init__.py")


@pytest.mark.parametrize(
    "case",
    [
        "with_bias=False, softcap=0.0, with_temperatures=False, with_lse=False, own_d_hidden=True",
        "with_bias=True, softcap=0.0, with_temperatures=True, with_lse=True, own_d_hidden=False",
        "with_bias=True, softcap=5.0, with_temperatures=True, with_lse=True, own_d_hidden=True",
    ],
)
def test_the_seeded_loss_agrees_with_its_twin(native_build: Build, case: str) -> None:
    code = f"""
import sys
sys.path.append({str(ROOT)!r})
from tests.simt.seeded_backend import check
check({case})
"""
    assert native_build.python(code) == ""


@pytest.mark.parametrize(
    "case",
    [
        "with_bias=False, softcap=0.0, with_temperatures=False, entropy='none', own_d_hidden=True",
        "with_bias=True, softcap=0.0, with_temperatures=True, entropy='value', own_d_hidden=False",
        "with_bias=True, softcap=5.0, with_temperatures=True, entropy='gradient', own_d_hidden=True",
    ],
)
def test_hopper_s_log_probs_agree_with_their_twin(native_build: Build, case: str) -> None:
    code = f"""
import sys
sys.path.append({str(ROOT)!r})
from tests.simt.hopper_backend import check
check({case})
"""
    assert native_build.python(code) == ""


@pytest.mark.parametrize(
    "case",
    [
        "with_bias=False, temperature=0.8, softcap=0.0",
        "with_bias=True, temperature=None, softcap=4.0",
    ],
)
def test_single_words_agree_with_their_twin(native_build: Build, case: str) -> None:
    code = f"""
import sys
sys.path.append({str(ROOT)!r})
from tests.simt.words_backend import check
check({case})
"""
    assert native_build.python(code) == ""


def test_who_takes_hopper_s_products(native_build: Build) -> None:
    """bf16 operands on compute capability 9.0, aligned for TMA."""
    code = """
import torch
from types import SimpleNamespace
from fusedce.hip import hopper

def suits(dtype=torch.bfloat16, depth=16, rows=4, stride=16, start=0, capability=(9, 0)):
    hopper._is_hopper.cache_clear()
    torch.cuda.get_device_capability = lambda index: capability
    hidden = SimpleNamespace(
        dtype=dtype, shape=(rows, depth), is_cuda=True, device=SimpleNamespace(index=0)
    )
    weight = torch.zeros(8 * stride + start, dtype=dtype)[start:].as_strided((8, depth), (stride, 1))
    return hopper.suits(hidden, weight)

print(suits(), suits(stride=24, start=8))
print(suits(torch.float16), suits(torch.float32), suits(depth=12), suits(rows=0), suits(stride=20), suits(start=4))
print(suits(capability=(8, 0)), suits(capability=(10, 0)))
"""
    assert native_build.python(code).splitlines() == ["True True", "False " * 5 + "False", "False False"]
