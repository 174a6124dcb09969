"""The choice by corrected scores and groups, and the weights of experts chosen elsewhere."""

import itertools
import math

import pytest
import torch

import fusedce
from tests.conftest import Place
from tests.linear_ce_cases import in_fp64, with_gradients
from tests.paired import assert_bites, assert_close

# N, E, K, groups, top groups, best of a group; corrected; score
CHOICES = [
    (40, 16, 4, 1, 1, 2, True, "sigmoid"),
    (33, 24, 3, 4, 2, 2, True, "sigmoid"),
    (21, 20, 4, 5, 2, 1, False, "softmax"),
    (17, 12, 2, 6, 3, 3, True, "softmax"),
    (5, 160, 6, 8, 3, 2, False, "sigmoid"),
    (3, 512, 8, 8, 4, 2, True, "sigmoid"),
    (1, 8, 8, 2, 2, 2, True, "softmax"),
    (2, 7, 2, 7, 3, 2, True, "sigmoid"),
]


def choose(row: list[float], top_k: int, groups: int, top_groups: int, best: int) -> list[int]:
    """The K best of the best groups, by Python lists; sorting is stable, so the lowest id is first among equals."""
    size = len(row) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    totals = [sum(sorted((row[e] for e in group), reverse=True)[:best]) for group in members]
    taken = sorted(range(groups), key=lambda g: -totals[g])[:top_groups]
    return sorted((e for g in sorted(taken) for e in members[g]), key=lambda e: -row[e])[:top_k]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(map(str, choice)))
def test_choice_weights_and_gradient(choice: tuple, place: Place) -> None:
    num_tokens, num_experts, top_k, groups, top_groups, best, corrected, score = choice
    generator = torch.Generator().manual_seed(num_experts)
    logits = 2 * torch.randn(num_tokens, num_experts, generator=generator)
    correction = torch.rand(num_experts, generator=generator) - 0.5 if corrected else None
    scores = logits.double().softmax(1) if score == "softmax" else logits.double().sigmoid()
    values = scores if correction is None else scores + correction
    expected = [choose(row, top_k, groups, top_groups, best) for row in values.tolist()]
    keywords = dict(score=score, scale=2.5, num_groups=groups, top_groups=top_groups, group_best=best)
    keywords |= dict(correction=None if correction is None else correction.to(place.device), backend=place.backend)
    logits = logits.to(place.device)
    index = fusedce.moe_route(logits, top_k, **keywords).top_k_index
    assert index.tolist() == expected

    def plain(logits: torch.Tensor) -> list[torch.Tensor]:
        scores = logits.softmax(1) if score == "softmax" else logits.sigmoid()
        chosen = scores.gather(1, index.to(logits.device))
        return [2.5 * chosen / chosen.sum(1, keepdim=True)]

    grads = [torch.randn(num_tokens, top_k, generator=generator).to(place.device)]
    out = with_gradients(lambda x: [fusedce.moe_route(x, top_k, **keywords).top_k_weights], [logits], grads)
    gold, twin = with_gradients(plain, in_fp64([logits]), [grads[0].cpu()]), with_gradients(plain, [logits], grads)
    for name, o, g, t in zip(("weights", "d_logits"), out, gold, twin, strict=True):
        assert_close(o, g, t, name)
        if num_tokens >= 16:
            assert_bites(g, t, name)


def test_equal_scores_and_equal_groups_go_to_the_lowest_ids(place: Place) -> None:
    logits = torch.zeros(3, 12, device=place.device)
    logits[1, 9] = 1.0
    keywords = dict(score="sigmoid", num_groups=4, top_groups=2, backend=place.backend)
    index = fusedce.moe_route(logits, 5, **keywords).top_k_index
    assert index.tolist() == [[0, 1, 2, 3, 4], [9, 0, 1, 2, 10], [0, 1, 2, 3, 4]]
    saturated = torch.full((1, 6), 200.0, device=place.device)  # every sigmoid is 1
    correction = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.5, 0.0], device=place.device)
    index = fusedce.moe_route(saturated, 4, score="sigmoid", correction=correction, backend=place.backend).top_k_index
    assert index.tolist() == [[2, 4, 0, 1]]


def test_the_correction_chooses_and_does_not_weigh(place: Place) -> None:
    logits = torch.randn(20, 6, device=place.device, requires_grad=True)
    correction = torch.tensor([0.0, 10.0, -math.inf, 0.0, 0.0, 0.0], device=place.device, requires_grad=True)
    out = fusedce.moe_route(logits, 2, correction=correction, renormalize=False, score="sigmoid", backend=place.backend)
    assert (out.top_k_index[:, 0] == 1).all() and not (out.top_k_index == 2).any()
    assert torch.allclose(out.top_k_weights, logits.sigmoid().gather(1, out.top_k_index))
    out.top_k_weights.sum().backward()
    assert correction.grad is None and logits.grad[:, 1].all() and not logits.grad[:, 2].any()
    same = fusedce.moe_route(logits, 2, correction=torch.zeros(6, device=place.device), backend=place.backend)
    plain = fusedce.moe_route(logits, 2, backend=place.backend)
    assert all(torch.equal(a, b) for a, b in zip(same, plain, strict=True))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_nan_stays_in_its_row_with_groups_and_correction(score: str, place: Place) -> None:
    logits = torch.randn(9, 12, device=place.device)
    keywords = dict(score=score, num_groups=3, top_groups=2, backend=place.backend)
    keywords |= dict(correction=torch.rand(12, device=place.device))
    expected = fusedce.moe_route(logits, 4, **keywords)
    logits[2, 7], logits[5], logits[6, 3] = math.nan, math.nan, -math.inf
    out = fusedce.moe_route(logits, 4, **keywords)
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 12 for row in out.top_k_index.tolist())
    same = [row for row in range(9) if row not in (2, 5, 6)]
    assert all(torch.equal(a[same], b[same]) for a, b in zip(out, expected, strict=True))
    assert out.top_k_weights[5].isnan().all() and out.top_k_weights[2].isnan().any()


REPLAYED = list(itertools.product(("softmax", "sigmoid"), (True, False)))


@pytest.mark.parametrize("score, renormalize", REPLAYED)
def test_replay_of_our_own_choice_has_the_same_bits(score: str, renormalize: bool, place: Place) -> None:
    logits = torch.randn(30, 10, device=place.device, requires_grad=True)
    keywords = dict(score=score, renormalize=renormalize, scale=1.5, backend=place.backend)
    first = fusedce.moe_route(logits, 3, **keywords)
    again = fusedce.moe_replay(logits, first.top_k_index, **keywords)
    assert torch.equal(again.top_k_weights, first.top_k_weights) and again.top_k_index is first.top_k_index
    grad = torch.randn(30, 3, device=place.device)
    grads = [torch.autograd.grad(routing.top_k_weights, logits, grad)[0] for routing in (first, again)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("score, renormalize", REPLAYED)
def test_replay_of_ids_from_elsewhere(score: str, renormalize: bool, dtype: torch.dtype, place: Place) -> None:
    """An expert named twice counts twice, id −1 nowhere; a token may have no expert at all."""
    generator = torch.Generator().manual_seed(8)
    logits = (2 * torch.randn(40, 6, generator=generator)).to(place.device, dtype)
    index = torch.randint(-1, 6, (40, 4), generator=generator).to(place.device)
    index[3], index[4], index[5] = -1, 2, torch.tensor([1, 1, -1, 0])
    keywords = dict(score=score, renormalize=renormalize, scale=1.5, backend=place.backend)

    def plain(logits: torch.Tensor) -> list[torch.Tensor]:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        ids = index.to(logits.device)
        scores = logits.softmax(1) if score == "softmax" else logits.sigmoid()
        chosen = torch.where(ids >= 0, scores.gather(1, ids.clamp(min=0)), 0.0)
        total = chosen.sum(1, keepdim=True)
        return [1.5 * (chosen / torch.where(total == 0, 1.0, total) if renormalize else chosen)]

    # what comes from a slot that takes no part may be anything
    grads = [torch.randn(40, 4, generator=generator).to(place.device)]
    spoiled = [grads[0].masked_fill(index < 0, math.nan)]
    out = with_gradients(lambda x: [fusedce.moe_replay(x, index, **keywords).top_k_weights], [logits], spoiled)
    gold, twin = with_gradients(plain, in_fp64([logits]), [grads[0].cpu()]), with_gradients(plain, [logits], grads)
    assert not out[0][index < 0].any() and not out[1][3].any()
    for name, o, g, t in zip(("weights", "d_logits"), out, gold, twin, strict=True):
        assert_close(o, g, t, name)
        assert_bites(g, t, name)


def test_replay_into_the_plan_and_the_experts(place: Place) -> None:
    """A rollout's ids, some of them −1: values and the router's gradient as without those slots."""
    hidden, logits = torch.randn(12, 8, device=place.device), torch.randn(12, 5, device=place.device)
    index = fusedce.moe_route(logits, 3, backend=place.backend).top_k_index
    index[:, 2] = -1
    gate_up, down = torch.randn(5, 12, 8, device=place.device), torch.randn(5, 8, 6, device=place.device)
    results = []
    for ids in (index, index[:, :2]):
        leaf = logits.clone().requires_grad_()
        weights, ids = fusedce.moe_replay(leaf, ids, backend=place.backend)
        plan = fusedce.moe_plan(ids, 5, backend=place.backend)
        rows = fusedce.moe_experts(hidden, gate_up, down, weights, plan, backend=place.backend)
        out = fusedce.moe_combine(rows, plan, backend=place.backend)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaf)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("num_experts, top_k", [(1, 1), (3, 3), (512, 1)])
def test_few_tokens_few_and_many_experts(num_experts: int, top_k: int, num_tokens: int, place: Place) -> None:
    logits = torch.randn(num_tokens, num_experts, device=place.device, requires_grad=True)
    weights, index = fusedce.moe_route(logits, top_k, renormalize=False, backend=place.backend)
    assert torch.equal(index, logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k])
    assert torch.allclose(weights, logits.softmax(1).gather(1, index))
    weights.sum().backward()
    assert logits.grad.shape == logits.shape and logits.grad.isfinite().all()
    plan = fusedce.moe_plan(index, num_experts, backend=place.backend)
    assert plan.counts.sum() == index.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_bad_id_in_a_replay_on_a_gpu_is_nan_and_reported(backend: str) -> None:
    logits, index = torch.randn(4, 6, device="cuda"), torch.tensor([[0, 1], [2, 2**32], [3, -1], [4, 5]], device="cuda")
    weights, _ = fusedce.moe_replay(logits, index, score="sigmoid", backend=backend)
    assert weights.isnan().tolist() == [[False, False], [False, True], [False, False], [False, False]]
    with pytest.raises(ValueError, match=f"fusedce.moe_replay: .* the value {2**32} at row 3"):
        fusedce.check_flags()


def test_a_bad_id_in_a_replay_raises_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="fusedce.moe_replay: argument 'top_k_index' has the value 6 at row 3"):
        fusedce.moe_replay(torch.randn(4, 6), torch.tensor([[0, 1], [2, 6], [3, -1], [4, 5]]))
