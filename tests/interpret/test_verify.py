"""`fusedce verify` of the Triton backend, by Triton's interpreter."""

import pytest
import torch

from fusedce.ops import registry
from fusedce.verify.check import check
from fusedce.verify.primitives import PRIMITIVES

pytestmark = pytest.mark.interpret


@pytest.mark.parametrize("primitive", PRIMITIVES, ids=lambda primitive: primitive.op)
def test_an_op_passes(primitive) -> None:  # type: ignore[no-untyped-def]
    result = check(primitive, "triton", torch.bfloat16, torch.device("cpu"), repeats=1)
    assert (result.status, result.reason) == ("pass", "") and result.op in registry.OPS
