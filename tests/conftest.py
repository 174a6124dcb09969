"""Fixtures for all tests: poisoned fresh memory everywhere, one device parameter, seeded inputs."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch


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


def on_gpu(backend: str):  # type: ignore[no-untyped-def]
    """A parameter that only a GPU machine runs."""
    return pytest.param(Place("cuda", backend), marks=pytest.mark.gpu, id=f"{backend}-cuda")


@pytest.fixture(params=[pytest.param(Place("cpu", "eager"), id="eager-cpu"), on_gpu("eager"), on_gpu("triton")])
def place(request: pytest.FixtureRequest) -> Place:
    """Every op test runs on all of them; tests/interpret puts Triton's interpreter in their stead."""
    return request.param
