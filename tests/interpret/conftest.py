"""Triton's interpreter: kernels run in Python on CPU tensors. It must be chosen before Triton is imported, so this
folder is a pytest run of its own.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest

from tests.conftest import Place


@pytest.fixture
def place() -> Place:
    """In the stead of the machines of tests/conftest.py."""
    return Place("cpu", "triton")
