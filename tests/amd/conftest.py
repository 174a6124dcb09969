"""Ops on CPU tensors with Triton's kernels compiled for an AMD GPU and executed by the emulator."""

from collections.abc import Iterator

import pytest

import fusedce.triton  # noqa: F401  (its constants must be made before the environment is said to be another)
from fusedce import arch, env
from tests.gfx9emu.driver import emulated


@pytest.fixture
def chip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A GPU for CPU tensors, named by the test's parameter: they get its tiles, and backend "triton" takes them."""
    name = request.param
    monkeypatch.setattr(arch, "of_device", lambda device: arch.ARCHS[name])
    monkeypatch.setattr(env, "triton_interpreted", lambda: True)
    with emulated(name):
        yield name
