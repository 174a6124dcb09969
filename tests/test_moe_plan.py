"""moe_plan: a stable sort of the slots by expert; and what becomes of slots whose id is out of range."""

import pytest
import torch

import fusedce
from fusedce.options import MoEPlan
from tests.conftest import Place
from tests.moe_cases import Case, package

SIZES = [(0, 2, 3), (1, 1, 1), (1, 3, 3), (127, 1, 5), (128, 1, 5), (129, 1, 5), (64, 2, 2), (77, 8, 40), (50, 4, 130)]


def reference(index: torch.Tensor, num_experts: int) -> tuple[list[int], list[int], list[int]]:
    """The plan by Python lists. Slots out of range are in no list of an expert."""
    ids = index.flatten().tolist()
    rows = [slot for expert in range(num_experts) for slot, id_ in enumerate(ids) if id_ == expert]
    offsets = [sum(0 <= id_ < expert for id_ in ids) for expert in range(num_experts + 1)]
    row_of = {slot: row for row, slot in enumerate(rows)}
    return offsets, rows + [-1] * (len(ids) - len(rows)), [row_of.get(slot, -1) for slot in range(len(ids))]


def as_lists(plan: MoEPlan | tuple[torch.Tensor, ...]) -> tuple[list[int], ...]:
    parts = (plan.offsets, plan.row_slot, plan.slot_row) if isinstance(plan, MoEPlan) else plan
    assert all(part.dtype == torch.int32 and part.is_contiguous() for part in parts)
    return tuple(part.flatten().tolist() for part in parts)


@pytest.mark.parametrize("loads", ["random", "one", "half"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_plan(sizes: tuple[int, int, int], loads: str, place: Place) -> None:
    num_tokens, top_k, num_experts = sizes
    index = Case(num_tokens, 1, 1, num_experts, top_k, loads=loads).index(place.device)
    plan = fusedce.moe_plan(index, num_experts, backend=place.backend)
    assert as_lists(plan) == reference(index, num_experts)
    assert (plan.num_tokens, plan.top_k, plan.num_experts) == sizes
    assert torch.equal(plan.counts.cpu(), torch.bincount(index.flatten().cpu(), minlength=num_experts))
    strided = torch.stack((index, index), 2).transpose(0, 2)[0].t()
    assert as_lists(fusedce.moe_plan(strided, num_experts, backend=place.backend)) == as_lists(plan)


def test_a_token_may_name_an_expert_twice(place: Place) -> None:
    index = torch.tensor([[2, 2], [0, 2], [1, 1]], device=place.device)
    assert as_lists(fusedce.moe_plan(index, 3, backend=place.backend)) == reference(index, 3)


@pytest.mark.parametrize("value", [6, 7, -1, -2, 2**31, 2**32, 2**32 + 1, -(2**63), 2**63 - 1])
def test_oo_3_an_id_out_of_range_raises_on_the_cpu(value: int) -> None:
    """Silently accepted, or a corrupt heap, elsewhere."""
    index = Case(9, 1, 1, 6, 2).index("cpu")
    index[4, 1] = value
    with pytest.raises(ValueError, match=f"'top_k_index' has the value {value} at row 9; expected .0, 6"):
        fusedce.moe_plan(index, 6)
    assert fusedce.moe_plan(Case(9, 1, 1, 6, 2).index("cpu"), 6).num_experts == 6


BAD_IDS = (6, -1, 2**32, -(2**63))


@pytest.mark.parametrize("every", [1, 3, 7])
def test_mo_a08_mo_a16_slots_without_a_row(every: int, place: Place) -> None:
    """vllm#46408: id −1 became the last expert, and the sum took in rows that nobody wrote. torchtitan#1237: NaN beyond
    the last group. Ours: such a slot has no row; its token is NaN, forward and backward; the rows left over are 0.
    """
    case, backend = Case(25, 20, 12, 6, 2), package(place)
    hidden, gate_up, down, weights, index = case.inputs(place.device)
    flat = index.flatten()
    for number, slot in enumerate(range(0, flat.shape[0], every)):
        flat[slot] = BAD_IDS[number % len(BAD_IDS)]
    index = flat.view(index.shape)
    plan = backend.moe_plan(index, 6)
    assert as_lists(plan) == reference(index, 6)
    served = int(plan[0][-1])
    rows, pre_act = backend.moe_experts(hidden, gate_up, down, weights, *plan)
    out, dispatched = backend.moe_combine(rows, *plan[1:]), backend.moe_dispatch(hidden, *plan[1:])
    bad = (plan[2] < 0).any(1)
    assert torch.equal(out.isnan().any(1), bad) and torch.equal(out.isnan().all(1), bad)
    for tail in (rows, pre_act, dispatched):
        assert not tail[served:].any() and tail[:served].isfinite().all()
    good_slots = torch.where((index >= 0) & (index < 6), index, 0)
    expected = backend.moe_combine(
        backend.moe_experts(hidden, gate_up, down, weights, *backend.moe_plan(good_slots, 6))[0],
        *backend.moe_plan(good_slots, 6)[1:],
    )
    assert torch.allclose(out[~bad], expected[~bad], atol=1e-5)
    d_rows = torch.randn_like(rows)
    grads = backend.moe_experts_backward(d_rows, hidden, gate_up, down, weights, *plan, pre_act, [True] * 4)
    assert torch.equal(grads[0].isnan().any(1), bad)
    assert torch.equal(grads[3].isnan(), plan[2] < 0)
    assert grads[1].isfinite().all() and grads[2].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_bad_id_on_a_gpu_is_reported_without_a_sync(backend: str) -> None:
    index = Case(9, 1, 1, 6, 2).index("cuda")
    index[4, 1] = 6
    plan = fusedce.moe_plan(index, 6, backend=backend)
    assert plan.slot_row[4, 1] == -1
    with pytest.raises(ValueError, match="value 6 at row 9"):
        fusedce.check_flags()
    with pytest.raises(ValueError, match="value 6 at row 9"):
        fusedce.moe_plan(index, 6, check="sync", backend=backend)
    assert fusedce.moe_plan(Case(9, 1, 1, 6, 2).index("cuda"), 6, check="sync", backend=backend).top_k == 2
