"""Every Triton kernel of the package, executed: its machine code for gfx942 and gfx950, on the package's own launches.

Values and gradients against the eager twin in fp64 by the tests' one tolerance. On the way the emulator faults for
accesses out of bounds, bytes that nobody wrote, races and diverging barriers. What this proves is in docs/amd.md.
"""

import pytest

from tests.amd.cases import RUNS, Run
from tests.compile.matrix import Case, kernel_modules
from tests.gfx9emu.hip import CHIPS
from tests.gfx9emu.launch import STATS

pytestmark = pytest.mark.amd


def kernel_name(module: str) -> str:
    """The name of the kernel of a module under fusedce.triton."""
    return Case(module, "bf16", "gfx942", "off").source.KERNEL.__name__


PAIRS = [pytest.param(chip, run, id=f"{chip}-{run.name}") for chip in CHIPS for run in RUNS if chip in run.chips]


@pytest.mark.parametrize(("chip", "run"), PAIRS, indirect=["chip"])
def test_values(run: Run, chip: str) -> None:
    STATS.by_kernel.clear()
    run.run()
    assert not {kernel_name(module) for module in run.kernels} - set(STATS.by_kernel)


@pytest.mark.parametrize("module", kernel_modules())
def test_kernel_has_a_case(module: str) -> None:
    assert any(module in run.kernels for run in RUNS), f"fusedce.triton.{module} needs a Run in tests/amd/cases.py"
