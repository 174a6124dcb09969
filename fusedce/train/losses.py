"""The policy loss of the GRPO family: PPO's clipped ratio with a group's mean reward as the baseline."""

from typing import NamedTuple

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, group_size: int, std: bool) -> Tensor:
    """How much better an answer is than its group: (r − mean) / (standard deviation + 1e-4), or without the division.

    Args:
        rewards: (B,) fp32; each run of `group_size` rows answers one prompt.
        std: divide (GRPO, arXiv:2402.03300) or not (Dr. GRPO, arXiv:2503.20783).

    Returns:
        (B,) fp32. A group of equal rewards gets exactly 0.
    """
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    # The mean of equal numbers can round to a neighbour; without this the division would blow that up.
    centred = torch.where((groups == groups[:, :1]).all(1, keepdim=True), 0.0, centred)
    if std:
        centred = centred / (groups.std(1, keepdim=True) + 1e-4)
    return centred.flatten()


def token_weights(mask: Tensor, normalize: str) -> Tensor:
    """What each token counts in the loss; the weights of a whole step sum to 1.

    They are made once for all micro-batches of an update, so that splitting it changes nothing but rounding.

    Args:
        mask: (B,T) bool, the tokens that the policy chose.
        normalize: "token": 1 / all valid tokens. "sequence": 1 / (valid tokens of the row · rows that have any).

    Returns:
        (B,T) fp32, 0 where the mask is False; all 0 if the mask is empty.
    """
    valid = mask.float()
    lengths = valid.sum(1, keepdim=True)
    if normalize == "token":
        return valid / lengths.sum().clamp(min=1)
    return valid / lengths.clamp(min=1) / (lengths > 0).sum().clamp(min=1)


class PolicyLoss(NamedTuple):
    """The loss () with its graph, and three detached sums that add up over micro-batches to the update's means."""

    loss: Tensor
    clipped: Tensor
    kl: Tensor
    entropy: Tensor


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    weights: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    entropy: Tensor,
    entropy_coef: float = 0.0,
    ref_logprob: Tensor | None = None,
    kl_coef: float = 0.0,
) -> PolicyLoss:
    """Σ_t w_t · (−min(ρ_t A, clip(ρ_t, 1 − low, 1 + high) A) + kl_coef · k3_t − entropy_coef · H_t).

    ρ = exp(logprob − old_logprob); k3 = exp(δ) − δ − 1 with δ = ref_logprob − logprob, an estimate of KL(policy ‖
    reference) that is never negative (Schulman, "Approximating KL divergence").

    Args:
        logprob, entropy: (B,T) fp32 of the policy, with graph. The entropy's graph is left alone at coefficient 0.
        old_logprob: (B,T) fp32 of the policy that sampled, no graph.
        advantage: (B,) from `group_advantages`, the same for every token of a row.
        weights: (B,T) from `token_weights`.
        clip_low, clip_high: how far the ratio may fall and rise before its gradient stops; they differ in DAPO
            (clip-higher, arXiv:2503.14476).
        ref_logprob: (B,T) of the reference, no graph; None leaves KL out.

    Returns:
        `PolicyLoss`; `clipped` is the weighed share of tokens whose gradient was stopped.
    """
    # Select before exp, not after: a token without weight may hold anything, and 0 · inf is NaN, in the gradient too.
    valid = weights > 0
    advantage = advantage[:, None]
    ratio = torch.where(valid, logprob - old_logprob, 0.0).exp()
    free, bound = ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    per_token = -torch.minimum(free, bound)
    kl = torch.zeros_like(logprob)
    if ref_logprob is not None:
        delta = torch.where(valid, ref_logprob - logprob, 0.0)
        kl = delta.exp() - delta - 1
        per_token = per_token + kl_coef * kl
    if entropy_coef:
        per_token = per_token - entropy_coef * entropy
    loss = (weights * per_token).sum()
    with torch.no_grad():
        means = [(weights * t).sum() for t in ((bound < free).float(), kl, entropy)]
    return PolicyLoss(loss, *means)
