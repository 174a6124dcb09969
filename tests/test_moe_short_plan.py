"""Plans without room for slots that take no part: what the whole plan gives, in rows that the caller has counted."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import fusedce
from fusedce.options import MoEPlan
from tests.conftest import Place
from tests.linear_ce_cases import with_gradients
from tests.moe_cases import Case, upstream

CASE = Case(13, 8, 6, 5, 3)


def plans(index: Tensor, num_experts: int, place: Place) -> tuple[MoEPlan, MoEPlan]:
    """The plan and the same without the rows that serve no slot."""
    plan = fusedce.moe_plan(index, num_experts, backend=place.backend)
    count = int((index >= 0).sum())
    return plan, dataclasses.replace(plan, row_slot=plan.row_slot[:count])


def layer(plan: MoEPlan, place: Place, *tensors: Tensor) -> list[Tensor]:
    rows = fusedce.moe_experts(*tensors, plan, backend=place.backend)
    assert rows.shape[0] == plan.row_slot.shape[0]
    through = fusedce.moe_dispatch(tensors[0], plan, backend=place.backend)
    return [fusedce.moe_combine(rows + through, plan, backend=place.backend)]


@pytest.mark.parametrize("missing", ["some", "all"])
def test_a_shortened_plan_gives_the_same(missing: str, place: Place) -> None:
    *tensors, index = CASE.inputs(place.device)
    index[::2, 1] = -1
    index[4] = -1
    if missing == "all":
        index.fill_(-1)
    whole, short = plans(index, CASE.num_experts, place)
    grad = upstream(CASE, "random", place.device)
    results = [with_gradients(lambda *t, p=plan: layer(p, place, *t), tensors, [grad]) for plan in (whole, short)]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    if missing == "all":
        assert not any(result.any() for result in results[1])


def test_a_plan_with_more_rows_than_slots_is_refused(place: Place) -> None:
    *tensors, index = CASE.inputs(place.device)
    plan, _ = plans(index, CASE.num_experts, place)
    long = dataclasses.replace(plan, row_slot=torch.cat((plan.row_slot, plan.row_slot[:1])))
    with pytest.raises(ValueError, match=r"'plan.row_slot' has shape \(40,\) .* expected at most N·K = 39 rows"):
        fusedce.moe_experts(*tensors, long, backend=place.backend)
    with pytest.raises(ValueError, match=r"row_slot \(40,\) and slot_row \(13, 3\) are not \(R,\) with R at most N·K"):
        torch.ops.fusedce.moe_dispatch(tensors[0], long.row_slot, long.slot_row, backend=place.backend)


def test_opcheck_with_a_shortened_plan(place: Place) -> None:
    *tensors, index = CASE.inputs(place.device)
    index[:, 0] = -1
    _, short = plans(index, CASE.num_experts, place)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    arguments = (*leaves, short.offsets, short.row_slot, short.slot_row)
    opcheck(torch.ops.fusedce.moe_experts.default, arguments, {"backend": place.backend})
