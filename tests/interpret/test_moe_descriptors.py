"""The experts' kernels as they are where tiles come by tensor descriptors, by Triton's interpreter."""

import dataclasses

import pytest
import torch

from fusedce.configs import tables
from tests.conftest import Place
from tests.moe_cases import Case
from tests.test_moe_options import Options, check, test_weights_stored_the_other_way_round  # noqa: F401

pytestmark = pytest.mark.interpret


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles of the generic machine, which is the interpreter's, with descriptors."""
    rows = {name: dataclasses.replace(tile, tma=True) for name, tile in tables.TABLES["generic"].items()}
    monkeypatch.setitem(tables.TABLES, "generic", rows)
    monkeypatch.setattr(tables, "_FP32", dataclasses.replace(tables._FP32, tma=True))


@pytest.mark.parametrize("save", ["pre_activation", "plan"])
@pytest.mark.parametrize("options", [Options(), Options("gpt_oss", True, combine=False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_every_gradient(options: Options, dtype: torch.dtype, save: str, place: Place) -> None:
    """Sizes that end inside a tile, and F that is a multiple of 8, as descriptors want it."""
    check(Case(61, 72, 40, 3, 2, dtype=dtype), dataclasses.replace(options, save=save), place)


def test_experts_without_rows_and_one_with_all(place: Place) -> None:
    check(Case(40, 40, 24, 6, 2, loads="half"), Options(), place)
    check(Case(70, 40, 24, 4, 1, loads="one"), Options(), place)
