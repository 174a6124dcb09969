"""The policy loss against the formulas, written out token by token."""

import math

import pytest
import torch

from fusedce.train.losses import group_advantages, policy_loss, token_weights


def by_hand(logprob, old, advantage, mask, normalize, low, high, entropy, entropy_coef, ref, kl_coef):
    """The same loss with Python loops."""
    total = 0.0
    num_tokens, num_rows = mask.sum(), mask.any(1).sum()
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if not mask[b, t]:
                continue
            ratio = torch.exp(logprob[b, t] - old[b, t])
            clipped = torch.clamp(ratio, 1 - low, 1 + high)
            term = -torch.min(ratio * advantage[b], clipped * advantage[b]) - entropy_coef * entropy[b, t]
            if ref is not None:
                delta = ref[b, t] - logprob[b, t]
                term = term + kl_coef * (torch.exp(delta) - delta - 1)
            total = total + term / (num_tokens if normalize == "token" else mask[b].sum() * num_rows)
    return total


@pytest.mark.parametrize("normalize", ["token", "sequence"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_loss_and_gradients_equal_the_formulas(normalize: str, entropy_coef: float, kl_coef: float) -> None:
    rows, tokens = 6, 5
    leaves = [torch.randn(rows, tokens, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    old, ref = (torch.randn(rows, tokens, dtype=torch.float64) for _ in range(2))
    advantage = torch.randn(rows, dtype=torch.float64)
    mask = torch.rand(rows, tokens) < 0.6
    mask[2] = False
    ref = ref if kl_coef else None
    expected = by_hand(leaves[0], old, advantage, mask, normalize, 0.2, 0.28, leaves[1], entropy_coef, ref, kl_coef)
    wanted = torch.autograd.grad(expected, leaves, allow_unused=True)
    weights = token_weights(mask, normalize).double()
    result = policy_loss(
        leaves[0],
        old,
        advantage,
        weights,
        entropy=leaves[1],
        entropy_coef=entropy_coef,
        ref_logprob=ref,
        kl_coef=kl_coef,
    )
    torch.testing.assert_close(result.loss, expected, rtol=1e-6, atol=1e-8)
    got = torch.autograd.grad(result.loss, leaves, allow_unused=True)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-6, atol=1e-8)
    assert (got[1] is None) == (entropy_coef == 0), "the entropy's graph is touched only where it counts"
    if entropy_coef:
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-6, atol=1e-8)


def test_the_clip_stops_the_right_gradients() -> None:
    logprob = torch.tensor([[math.log(1.5)], [math.log(1.5)], [math.log(0.5)], [math.log(0.5)]], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    weights = torch.full((4, 1), 0.25)
    result = policy_loss(logprob, torch.zeros(4, 1), advantage, weights, entropy=torch.zeros(4, 1))
    result.loss.backward()
    assert (logprob.grad.flatten() != 0).tolist() == [False, True, True, False]
    assert float(result.clipped) == pytest.approx(0.5)


def test_tokens_without_weight_do_not_poison_the_loss() -> None:
    logprob = torch.tensor([[0.0, 1e9]], requires_grad=True)
    weights = token_weights(torch.tensor([[True, False]]), "token")
    result = policy_loss(logprob, torch.zeros(1, 2), torch.ones(1), weights, entropy=torch.zeros(1, 2))
    result.loss.backward()
    assert torch.isfinite(torch.stack(list(result))).all()
    assert logprob.grad.tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("normalize", ["token", "sequence"])
def test_weights_sum_to_one_over_the_step(normalize: str) -> None:
    mask = torch.rand(8, 7) < 0.4
    mask[3] = False
    assert float(token_weights(mask, normalize).sum()) == pytest.approx(1.0)
    assert not token_weights(torch.zeros(2, 3, dtype=torch.bool), normalize).any()


@pytest.mark.parametrize("std", [True, False])
def test_equal_rewards_give_no_advantage(std: bool) -> None:
    rewards = torch.tensor([0.1] * 7 + [0.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.25])
    advantages = group_advantages(rewards, 7, std)
    assert advantages[:7].tolist() == [0.0] * 7
    group = rewards[7:]
    expected = (group - group.mean()) / (group.std() + 1e-4 if std else 1.0)
    torch.testing.assert_close(advantages[7:], expected)
