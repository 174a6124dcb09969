"""The arithmetic of what a backward may leave out: bounds, thresholds, refusals."""

import math

import pytest
import torch
from torch import Tensor

from fusedce import budget

F64 = torch.float64


def probabilities(rows: int, tiles: int, spread: float) -> Tensor:
    """(rows, tiles, WORD_TILE) in fp64, from flat to one word."""
    logits = spread * torch.randn(rows, tiles * budget.WORD_TILE, dtype=F64)
    return logits.softmax(1).unflatten(1, (tiles, budget.WORD_TILE))


def test_a_stored_mass_is_never_below_and_close() -> None:
    mass = torch.cat((torch.rand(4000).exp2().log2() ** 8, torch.tensor([0.0, 1.0, 2.0**-126])))
    stored = budget.stored_mass(mass).double()
    assert (stored >= mass.double()).all()
    assert (stored <= mass.double() * 1.01).all()
    assert budget.stored_mass(torch.tensor([math.nan])).isnan().all()


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 30.0])
def test_a_pair_s_bound_holds_and_is_tight(spread: float) -> None:
    probs = probabilities(30, 3, spread)
    log_probs = torch.where(probs == 0, 0.0, probs.log())
    entropy = -(probs * log_probs).sum((1, 2))
    on_probs, on_surprise = torch.randn(2, 30, dtype=F64)
    stored = budget.stored_mass(probs.sum(2).t())
    true = (probs * on_probs[:, None, None]).abs().sum(2).t()
    bound = budget.pair_bound(stored, on_probs, None, entropy)
    assert (bound >= true).all() and (bound <= 1.02 * true + 1e-30).all()
    d_raw = probs * (on_probs[:, None, None] - on_surprise[:, None, None] * (log_probs + entropy[:, None, None]))
    assert (budget.pair_bound(stored, on_probs, on_surprise, entropy) >= d_raw.abs().sum(2).t()).all()


def test_the_reference_is_twice_what_the_target_has_not() -> None:
    logprob, grad = -torch.rand(50) * 5, torch.randn(50)
    on_target = -grad * torch.expm1(logprob)
    total = budget.reference(-grad, on_target, logprob)
    expected = (grad.double().abs() * 2 * -torch.expm1(logprob.double())).sum()
    torch.testing.assert_close(total[0], expected, rtol=1e-6, atol=0)


def decided(lost: list[float], counts: list[int], most: int) -> budget.Decision:
    levels = torch.arange(1.0, len(lost) + 1)
    half = torch.tensor([1.0], dtype=F64)
    return budget.decide(levels, torch.tensor(lost), torch.tensor(counts), half, torch.tensor([most]))


def test_the_largest_threshold_within_the_budget_is_taken() -> None:
    taken = decided([0.1, 0.5, 0.9, 1.5], [90, 50, 20, 5], 30)
    assert taken.threshold == 3 and taken.accepted and taken.num_pairs == 20
    assert 0.9 <= taken.lost.item() <= 0.91


@pytest.mark.parametrize(
    ("lost", "counts"),
    [([0.1, 0.5, 0.9, 1.5], [90, 50, 40, 5]), ([1.1, 1.5, 1.9, 2.5], [9, 5, 4, 3]), ([math.nan] * 4, [0] * 4)],
    ids=["too many pairs", "over budget", "NaN"],
)
def test_it_is_refused(lost: list[float], counts: list[int]) -> None:
    assert not decided(lost, counts, 30).accepted


def test_the_lowest_threshold_is_always_within_the_budget() -> None:
    """Were every pair just below it, all of them together would be."""
    half = torch.tensor([3.7], dtype=F64)
    levels = budget.thresholds(half, 1000, 485)
    assert levels[0].double() * 1000 * 485 * budget.MARGIN <= half * (1 + 1e-6)
    assert torch.equal(levels[1:], 2 * levels[:-1]) and levels.shape == (budget.LEVELS,)
    word = budget.word_threshold(half, torch.tensor([300]))
    assert word.double() * 300 * budget.WORD_TILE * budget.MARGIN <= half * (1 + 1e-6)


def test_a_certificate_scales_back_and_forgets_what_was_refused() -> None:
    total, lost, scale = torch.tensor([8.0]), torch.tensor([2.0]), torch.tensor(0.25)
    assert budget.certificate(total, lost, torch.tensor([True]), scale).tolist() == [0.5, 2.0, 1.0, 1.0]
    assert budget.certificate(total, lost, torch.tensor([False]), None).tolist() == [0.0, 8.0, 0.0, 1.0]
