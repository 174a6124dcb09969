"""moe_plan: a stable sort of the slots by expert, whole and in chunks; and what becomes of slots that name no
expert."""

import functools

import pytest
import torch

import fusedce
from fusedce.options import ExpertOptions, MoEPlan
from tests.conftest import Place
from tests.linear_ce_cases import in_fp64, with_gradients
from tests.moe_cases import NAMES, Case, ours, package, plain, upstream
from tests.paired import assert_close

SIZES = [(0, 2, 3), (1, 1, 1), (1, 3, 3), (127, 1, 5), (128, 1, 5), (129, 1, 5), (64, 2, 2), (77, 8, 40), (50, 4, 130)]


def reference(index: torch.Tensor, num_experts: int) -> tuple[list[int], list[int], list[int]]:
    """The plan by Python lists. Slots that name no expert are in no list of one."""
    ids = index.flatten().tolist()
    rows = [slot for expert in range(num_experts) for slot, id_ in enumerate(ids) if id_ == expert]
    offsets = [sum(0 <= id_ < expert for id_ in ids) for expert in range(num_experts + 1)]
    row_of = {slot: row for row, slot in enumerate(rows)}
    without = [-1 if id_ == -1 else -2 for id_ in ids]
    return offsets, rows + [-1] * (len(ids) - len(rows)), [row_of.get(slot, without[slot]) for slot in range(len(ids))]


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


@pytest.mark.parametrize("value", [6, 7, -2, 2**31, 2**32, 2**32 + 1, -(2**63), 2**63 - 1])
def test_oo_3_an_id_out_of_range_raises_on_the_cpu(value: int) -> None:
    """Silently accepted, or a corrupt heap, elsewhere."""
    index = Case(9, 1, 1, 6, 2).index("cpu")
    index[4, 1] = value
    with pytest.raises(ValueError, match=f"'top_k_index' has the value {value} at row 9; expected .0, 6"):
        fusedce.moe_plan(index, 6)
    assert fusedce.moe_plan(Case(9, 1, 1, 6, 2).index("cpu"), 6).num_experts == 6


NO_EXPERT = (6, -1, 2**32, -(2**63))


@pytest.mark.parametrize("every", [1, 3, 7])
def test_mo_a16_slots_without_a_row(every: int, place: Place) -> None:
    """torchtitan#1237: NaN beyond the last group. Ours: a slot that names no expert has no row, and the rows left over
    are 0. With id −1 it adds nothing; with any other its token is NaN, forward and backward.
    """
    case, backend = Case(25, 20, 12, 6, 2), package(place)
    hidden, gate_up, down, weights, index = case.inputs(place.device)
    flat = index.flatten()
    for number, slot in enumerate(range(0, flat.shape[0], every)):
        flat[slot] = NO_EXPERT[number % len(NO_EXPERT)]
    index = flat.view(index.shape)
    plan = backend.moe_plan(index, 6)
    assert as_lists(plan) == reference(index, 6)
    served = int(plan[0][-1])
    arguments = (hidden, gate_up, down, weights, *plan, None, None)
    rows, pre_act = backend.moe_experts(*arguments, ExpertOptions())
    out, dispatched = backend.moe_combine(rows, *plan[1:]), backend.moe_dispatch(hidden, *plan[1:])
    bad = (plan[2] < -1).any(1)
    assert torch.equal(out.isnan().any(1), bad) and torch.equal(out.isnan().all(1), bad)
    for tail in (rows, pre_act, dispatched):
        assert not tail[served:].any() and tail[:served].isfinite().all()
    inside = (index >= 0) & (index < 6)
    (expected,) = plain(hidden, gate_up, down, torch.where(inside, weights, 0.0), torch.where(inside, index, 0))
    assert torch.allclose(out[~bad], expected[~bad], atol=1e-5)
    d_rows = torch.randn_like(rows)
    mask = [True] * 4 + [False] * 2
    grads = backend.moe_experts_backward(d_rows, *arguments, pre_act, ExpertOptions(), mask)
    assert torch.equal(grads[0].isnan().any(1), bad)
    assert torch.equal(grads[3].isnan(), plan[2] < -1) and not grads[3][plan[2] == -1].any()
    assert grads[1].isfinite().all() and grads[2].isfinite().all()


def test_mo_a08_slots_that_take_no_part(place: Place) -> None:
    """vllm#46408: id −1 became the last expert, and the sum took in rows that nobody wrote. Ours: as if the slot were
    not there, in every gradient too, whatever its weight holds.
    """
    case = Case(40, 20, 12, 6, 3)
    *tensors, index = case.inputs(place.device)
    left_out = torch.rand(index.shape, generator=torch.Generator().manual_seed(5)).to(place.device) < 0.3
    left_out[7] = True
    weights = tensors[3]
    spoiled = [*tensors[:3], weights.masked_fill(left_out, torch.nan)]
    zeroed = [*tensors[:3], weights.masked_fill(left_out, 0.0)]
    grads = [upstream(case, "random", place.device)]
    run = functools.partial(ours, place.backend)
    out = with_gradients(lambda *t: run(*t, index.masked_fill(left_out, -1)), spoiled, grads)
    gold = with_gradients(lambda *t: plain(*t, index.cpu()), in_fp64(zeroed), [g.double().cpu() for g in grads])
    twin = with_gradients(lambda *t: plain(*t, index), zeroed, grads)
    assert not out[0][7].any() and not out[4][left_out].any()
    plan = fusedce.moe_plan(index.masked_fill(left_out, -1), 6, backend=place.backend)
    rows = fusedce.moe_experts(*spoiled, plan, backend=place.backend)
    rows[int(plan.offsets[-1]) :] = torch.nan
    assert torch.equal(fusedce.moe_combine(rows, plan, backend=place.backend), out[0])
    for name, o, g, t in zip(NAMES, out, gold, twin, strict=True):
        if name == "d_top_k_weights":  # plain torch has a gradient there, times a weight of 0
            g, t = g.masked_fill(left_out.cpu(), 0.0), t.masked_fill(left_out, 0.0)
        assert_close(o, g, t, name)


CHUNKED = [
    (0, 2, 3, 2),
    (1, 2, 3, 4),
    (7, 2, 5, 1),
    (7, 2, 5, 3),
    (9, 8, 40, 9),
    (130, 3, 12, 2),
    (64, 1, 70, 5),
    (3, 2, 2, 3),
]


@pytest.mark.parametrize("sizes", CHUNKED, ids=str)
def test_chunks_are_the_plans_of_their_tokens(sizes: tuple[int, ...], place: Place) -> None:
    num_tokens, top_k, num_experts, num_chunks = sizes
    index = torch.randint(-1, num_experts, (num_tokens, top_k), generator=torch.Generator().manual_seed(num_tokens))
    index = index.to(place.device)
    chunks = fusedce.moe_plan_chunks(index, num_experts, num_chunks, backend=place.backend)
    length = -(-num_tokens // num_chunks)
    assert chunks.num_chunks == num_chunks and chunks.counts.shape == (num_chunks, num_experts)
    for number in range(num_chunks):
        part = index[number * length : (number + 1) * length]
        start, stop = chunks.tokens(number)
        assert stop - start == part.shape[0] and torch.equal(index[start:stop], part)
        assert as_lists(chunks.chunk(number)) == reference(part, num_experts)
        assert torch.equal(chunks.counts[number], chunks.chunk(number).counts)
    for num_ranks in (1, num_experts):
        expected = chunks.counts.view(num_chunks, num_ranks, -1).sum(2)
        assert torch.equal(chunks.rank_counts(num_ranks), expected.int())
    with pytest.raises(IndexError, match=f"chunk {num_chunks} of {num_chunks}"):
        chunks.chunk(num_chunks)
    with pytest.raises(ValueError, match="expected a divisor of E"):
        chunks.rank_counts(num_experts + 1)


def test_mo_a15_experts_chunk_by_chunk_give_the_same_bits(place: Place) -> None:
    """Megatron-LM#1327: two ways to dispatch trained to different losses."""
    case = Case(50, 20, 12, 6, 2)
    hidden, gate_up, down, weights, index = case.inputs(place.device)
    (whole,) = ours(place.backend, hidden, gate_up, down, weights, index)
    chunks = fusedce.moe_plan_chunks(index, 6, 3, backend=place.backend)
    parts = []
    for number in range(3):
        part, plan = slice(*chunks.tokens(number)), chunks.chunk(number)
        rows = fusedce.moe_experts(hidden[part], gate_up, down, weights[part], plan, backend=place.backend)
        parts.append(fusedce.moe_combine(rows, plan, backend=place.backend))
    # cuBLAS chooses a product's kernel by its number of rows: eager's bits are its own there.
    close = 1e-6 if place == Place("cuda", "eager") else 0.0
    torch.testing.assert_close(torch.cat(parts), whole, rtol=close, atol=close)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 12])
def test_a_token_goes_to_each_rank_once(num_ranks: int, place: Place) -> None:
    """What expert parallelism without duplicates sends, and what it gets back."""
    index = torch.randint(0, 12, (30, 5), generator=torch.Generator().manual_seed(1))
    index[3], index[4, 2:] = 7, -1
    ranks = fusedce.moe_rank_index(index.to(place.device), 12, num_ranks)
    for row, needed in zip(ranks.tolist(), index.tolist(), strict=True):
        owners = [expert // (12 // num_ranks) for expert in needed if expert >= 0]
        assert [rank for rank in row if rank >= 0] == list(dict.fromkeys(owners))
    chunks = fusedce.moe_plan_chunks(ranks, num_ranks, 2, backend=place.backend)
    expected = torch.stack(
        [(ranks[part] == rank).sum() for part in (slice(15), slice(15, 30)) for rank in range(num_ranks)]
    )
    assert torch.equal(chunks.counts.flatten(), expected)
    # a rank that gives back what it got, once a token: the sum counts the ranks
    hidden = torch.randn(30, 8, device=place.device)
    plan = fusedce.moe_plan(ranks, num_ranks, backend=place.backend)
    back = fusedce.moe_combine(fusedce.moe_dispatch(hidden, plan, backend=place.backend), plan, backend=place.backend)
    assert torch.allclose(back, hidden * (ranks >= 0).sum(1, keepdim=True), atol=1e-5)


def test_ranks_of_bad_ids_stay_bad() -> None:
    index = torch.tensor([[0, 5], [6, -1], [-2, 2**40]])
    ranks = fusedce.moe_rank_index(index, 6, 2)
    assert ranks.tolist() == [[0, 1], [2, -1], [-2, 2]]
    with pytest.raises(ValueError, match="fusedce.moe_plan: argument 'top_k_index' has the value 2 at row 2"):
        fusedce.moe_plan(ranks, 2)
    with pytest.raises(ValueError, match="'num_ranks' is 4; expected a divisor of E = 6"):
        fusedce.moe_rank_index(index, 6, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_bad_id_on_a_gpu_is_reported_without_a_sync(backend: str) -> None:
    index = Case(9, 1, 1, 6, 2).index("cuda")
    index[4, 1] = 6
    plan = fusedce.moe_plan(index, 6, backend=backend)
    assert plan.slot_row[4, 1] == -2
    with pytest.raises(ValueError, match="value 6 at row 9"):
        fusedce.check_flags()
    with pytest.raises(ValueError, match="value 6 at row 9"):
        fusedce.moe_plan(index, 6, check="sync", backend=backend)
    assert fusedce.moe_plan(Case(9, 1, 1, 6, 2).index("cuda"), 6, check="sync", backend=backend).top_k == 2


@pytest.mark.gpu
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_cuda_graph_replays_route_and_plan(num_chunks: int) -> None:
    """vllm-xpu-kernels#567 (PK-A12): a sync broke the capture. Ours: one call outside fills the caches; then new
    logits in the same memory give new plans, without the host."""
    logits = torch.randn(50, 12, device="cuda")

    def plan() -> tuple[torch.Tensor, ...]:
        weights, index = fusedce.moe_route(logits, 3, score="sigmoid", num_groups=4, top_groups=2, backend="triton")
        chunks = fusedce.moe_plan_chunks(index, 12, num_chunks, backend="triton")
        whole = fusedce.moe_plan(index, 12, backend="triton")
        return weights, index, chunks.offsets, chunks.row_slot, chunks.slot_row, whole.offsets, whole.row_slot

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plan()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = plan()
    for seed in (1, 2):
        logits.copy_(torch.randn(50, 12, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        expected = plan()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
