"""fusedce.hip from Python to its kernels, which the host runs, against the eager twin."""

import pytest

from tests.native.wheels import ROOT, Build

pytestmark = pytest.mark.native


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
