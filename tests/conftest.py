"""Fixtures for all tests: poisoned fresh memory everywhere, one device parameter, seeded inputs, the tables' tiles."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from fusedce import env, hip

# What a machine's owner tuned is not what the tests are about. Also for the processes that tests start.
os.environ["FUSEDCE_TUNED"] = "0"


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty returns NaN (or the largest integer), so that what a kernel forgets to write shows; warnings stay
    quiet."""
    was_on, was_warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(was_on, warn_only=was_warn_only)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every test that asks for it runs on the CPU and, marked gpu, on a GPU."""
    return request.param


@dataclass(frozen=True)
class Place:
    """Where an op runs in a test: on which device, by which backend."""

    device: str
    backend: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes a `place` on the CPU and, marked gpu, with every backend that a GPU has for its op.

    NATIVE = True in a test's module: its op has native kernels. In tests/interpret there is one place: Triton on the
    CPU.
    """
    if "place" not in metafunc.fixturenames:
        return
    if env.triton_interpreted():
        places = [Place("cpu", "triton")]
    else:
        native = getattr(metafunc.module, "NATIVE", False) and hip.unavailable() is None
        on_gpu = [Place("cuda", backend) for backend in ("eager", "triton", *(("native",) if native else ()))]
        places = [Place("cpu", "eager"), *(pytest.param(p, marks=pytest.mark.gpu, id=str(p)) for p in on_gpu)]
    metafunc.parametrize("place", places, ids=str)
