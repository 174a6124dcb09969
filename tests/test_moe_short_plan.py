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

OPS = torch.ops.fusedce
CASE = Case(13, 8, 6, 5, 3)


def plans(index: Tensor, num_experts: int, place: Place) -> tuple[MoEPlan, MoEPlan]:
    """The plan and the same without the rows that serve no slot."""
    plan = fusedce.moe_plan(index, num_experts, backend=place.backend)
    count = int((index >= 0).sum())
    return plan, dataclasses.replace(plan, row_slot=plan.row_slot[:count])


def layer(plan: MoEPlan, place: Place, *tensors: Tensor) -> list[Tensor]:
    """Rows, sums of rows, and tokens as they are, all summed."""
    slots = (plan.row_slot, plan.slot_row)
    rows, _ = OPS.moe_experts(*tensors, plan.offsets, *slots, backend=place.backend)
    assert rows.shape[0] == plan.row_slot.shape[0]
    sums, _ = OPS.moe_experts(*tensors, plan.offsets, *slots, combine=True, save="plan", backend=place.backend)
    through = OPS.moe_dispatch(tensors[0], *slots, backend=place.backend)
    return [OPS.moe_combine(rows + through, *slots, backend=place.backend) + sums]


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
    with pytest.raises(ValueError, match=r"row_slot \(40,\) and slot_row \(13, 3\) are not \(R,\) with R at most N·K"):
        OPS.moe_dispatch(tensors[0], long.row_slot, long.slot_row, backend=place.backend)


def test_opcheck_with_a_shortened_plan(place: Place) -> None:
    *tensors, index = CASE.inputs(place.device)
    index[:, 0] = -1
    _, short = plans(index, CASE.num_experts, place)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    arguments = (*leaves, short.offsets, short.row_slot, short.slot_row)
    opcheck(OPS.moe_experts.default, arguments, {"backend": place.backend})
