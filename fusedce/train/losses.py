"""The policy losses of the GRPO family in one function: clipped ratios, CISPO, GSPO, KL, rollout correction, entropy.

`policy_loss` takes log-probs; `head_policy_loss` hidden states and the head, with three GEMMs where a token's loss is
of that token alone. Weights say what a token counts, and are made once for all micro-batches and ranks.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fusedce.functional import linear_logprob, linear_policy_loss

Normalize = Literal["token", "sequence", "fixed"]
Variant = Literal["clip", "cispo", "gspo"]


@dataclass(frozen=True)
class PolicyOptions:
    """The member of the family. ValueError for what makes no loss; the formulas are at `policy_loss`."""

    variant: Variant = "clip"
    """clip: PPO's clipped ratio; cispo: a capped ratio as the log-prob's weight; gspo: one clipped ratio a sequence"""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """the ratio is clipped to [1 - clip_low, 1 + clip_high]; cispo takes the upper bound alone"""
    dual_clip: float = 0.0
    """above 1: a negative advantage counts at most so many times; 0 for no such bound"""
    kl: Literal["k1", "k2", "k3"] = "k3"
    kl_coef: float = 0.0
    kl_corrected: bool = True
    """multiply the estimate by the ratio, which makes its gradient that of KL(policy ‖ reference)"""
    entropy_coef: float = 0.0
    rollout_cap: float = 0.0
    """the largest weight of a token for what the trainer and the sampler disagree on it; 0 weighs nothing"""

    def __post_init__(self) -> None:
        for key, names in (("variant", ("clip", "cispo", "gspo")), ("kl", ("k1", "k2", "k3"))):
            _require(getattr(self, key) in names, self, key, f"one of {', '.join(names)}")
        for key in ("clip_low", "clip_high", "dual_clip", "kl_coef", "entropy_coef", "rollout_cap"):
            value = getattr(self, key)
            _require(math.isfinite(value) and value >= 0, self, key, "a finite number, at least 0")
        _require(self.clip_low < 1, self, "clip_low", "below 1")
        _require(self.dual_clip == 0 or self.dual_clip > 1, self, "dual_clip", "0 or above 1")
        _require(not self.dual_clip or self.variant != "cispo", self, "dual_clip", "0 with cispo, which clips no ratio")
        pulls = self.kl_corrected or self.kl != "k1" or not self.kl_coef
        _require(pulls, self, "kl_corrected", "True with k1, whose own gradient is 0 on average")

    @classmethod
    def of(cls, config: Any) -> "PolicyOptions":
        """Those fields that `config` has too, its values; the others by default."""
        return cls(**{f.name: getattr(config, f.name) for f in dataclasses.fields(cls) if hasattr(config, f.name)})


def _require(good: bool, options: PolicyOptions, key: str, expected: str) -> None:
    if not good:
        raise ValueError(f"{key} is {getattr(options, key)!r}; expected {expected}")


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


def weight_total(mask: Tensor, normalize: Normalize, fixed_length: int = 0) -> Tensor:
    """() fp32: what `token_weights` divides by. These add up over ranks: sum them before dividing, once a step."""
    if normalize == "token":
        return mask.sum().float()
    if normalize == "sequence":
        return mask.any(1).sum().float()
    if fixed_length < 1:
        raise ValueError(f"fixed_length is {fixed_length}; expected at least 1, the longest answer's tokens")
    return torch.tensor(float(len(mask) * fixed_length), device=mask.device)


def token_weights(mask: Tensor, normalize: Normalize, *, fixed_length: int = 0, total: Tensor | None = None) -> Tensor:
    """What each token counts in the loss.

    They are made once for all micro-batches of an update, so that splitting it changes nothing but rounding.

    Args:
        mask: (B,T) bool, the tokens that the policy chose. Overlong masking (DAPO) is a row of False for an answer that
            was cut off: `mask & ~truncated[:, None]`.
        normalize: "token": 1 / all valid tokens (DAPO). "sequence": 1 / (valid tokens of the row · rows that have any)
            (GRPO, GSPO). "fixed": 1 / (B · fixed_length), rows without a valid token counted (Dr. GRPO).
        fixed_length: tokens of the longest answer allowed, for "fixed".
        total: () `weight_total` summed over ranks; None for this mask's own.

    Returns:
        (B,T) fp32, 0 where the mask is False; all 0 if no rank has a valid token. Their sum over all ranks is 1, with
        "fixed" the mean length over fixed_length.
    """
    total = weight_total(mask, normalize, fixed_length) if total is None else total
    weights = mask / total.clamp(min=1)
    if normalize == "sequence":
        weights = weights / mask.sum(1, keepdim=True).clamp(min=1)
    return weights


class PolicyLoss(NamedTuple):
    """The loss () with its graph, and detached sums that add up over micro-batches and ranks to the update's means."""

    loss: Tensor
    clipped: Tensor
    kl: Tensor
    entropy: Tensor
    mismatch_kl: Tensor


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor | None,
    advantage: Tensor,
    weights: Tensor,
    options: PolicyOptions,
    *,
    entropy: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    rollout_logprob: Tensor | None = None,
) -> PolicyLoss:
    """Σ_t w_t · (c_t · L_t + kl_coef · KL_t − entropy_coef · H_t), with ρ = exp(logprob − old_logprob) and

    clip:   L = −min(ρ A, clip(ρ, 1 − low, 1 + high) A); of A < 0 with dual_clip at most −dual_clip · A
    gspo:   the same with ρ = exp(mean over the row's tokens of logprob − old_logprob) (arXiv:2507.18071)
    cispo:  L = −sg(min(ρ, 1 + high)) · A · logprob, sg stops the gradient (arXiv:2506.13585)
    c = min(exp(old_logprob − rollout_logprob), rollout_cap), without gradient, where rollout_cap > 0: truncated
        importance sampling, for a sampler whose log-probs are not quite the trainer's.
    KL, of δ = ref_logprob − logprob: k1 = −δ; k2 = δ²/2; k3 = exp(δ) − δ − 1, never negative. kl_corrected: ρ · k1,
        sg(ρ) · k2, ρ · k3, with the token's own ρ. Their gradients are ρ (1 − δ), ρ (−δ), ρ (−δ) times that of logprob:
        on average that of KL(policy ‖ reference), off-policy too. Without the correction k3 is GRPO's as published; on
        average its gradient is that of KL(reference ‖ policy).

    Args:
        logprob: (B,T) fp32 of the policy, with graph.
        old_logprob: (B,T) of the policy that sampled, as the trainer sees it, no graph. None: logprob itself, ρ = 1.
        advantage: (B,), the same for every token of a row, or (B,T).
        weights: (B,T) from `token_weights`. Where they are 0 the other tensors may hold anything.
        entropy: (B,T) with graph, which is left alone at coefficient 0; None leaves it out of the metrics too.
        ref_logprob: (B,T) of the reference, no graph; None leaves KL out.
        rollout_logprob: (B,T) as the sampler saw them, no graph.

    Returns:
        `PolicyLoss`. clipped: the weighed share of tokens whose gradient was stopped (cispo: whose ratio was capped).
        mismatch_kl: k3 of old against rollout log-probs, an estimate of KL(sampler ‖ trainer); 0 without them.

    Raises: ValueError where an option needs a tensor that is None.
    """
    numbers = _numbers(options, old_logprob, advantage, weights, ref_logprob, rollout_logprob)
    rows, stats = _token_losses(options, logprob, entropy, numbers)
    return PolicyLoss(rows.sum(), *stats.flatten(1).sum(1))


def head_policy_loss(
    hidden: Tensor,
    head: Tensor,
    target: Tensor,
    old_logprob: Tensor | None,
    advantage: Tensor,
    weights: Tensor,
    options: PolicyOptions,
    *,
    ref_logprob: Tensor | None = None,
    rollout_logprob: Tensor | None = None,
    temperature: float = 1.0,
    backend: str = "auto",
) -> PolicyLoss:
    """`policy_loss` of the log-probs of target (B,T) under hidden (B,T,D) and the head's weight (V,D).

    clip and cispo: a token's loss is of its own log-prob, so `fusedce.linear_policy_loss` makes the gradients chunk by
    chunk while logits are at hand, three GEMMs. gspo needs a row's every token first: `fusedce.linear_logprob`, four.
    The entropy is made only at a coefficient above 0, and is 0 in the metrics otherwise.

    target: int64, -100 for tokens without weight. temperature, backend: see `fusedce.linear_logprob`. The others, what
    is returned and raised: `policy_loss`.
    """
    with_entropy = options.entropy_coef > 0
    if options.variant == "gspo":
        made = linear_logprob(hidden, head, target, temperature=temperature, with_entropy=with_entropy, backend=backend)
        return policy_loss(
            made.logprob, old_logprob, advantage, weights, options, entropy=made.entropy if with_entropy else None,
            ref_logprob=ref_logprob, rollout_logprob=rollout_logprob,
        )  # fmt: skip
    numbers = _numbers(options, old_logprob, advantage, weights, ref_logprob, rollout_logprob)
    given = {name: t.expand(target.shape) for name, t in numbers.items()}
    sums = []

    def loss_fn(logprob: Tensor, *rest: Tensor) -> Tensor:
        entropy, chunk = (rest[0], rest[1:]) if with_entropy else (None, rest)
        rows, stats = _token_losses(options, logprob, entropy, dict(zip(given, chunk, strict=True)))
        sums.append(stats.sum(1))
        return rows

    loss = linear_policy_loss(
        hidden, head, target, loss_fn, *given.values(), temperature=temperature, with_entropy=with_entropy,
        backend=backend,
    )  # fmt: skip
    return PolicyLoss(loss, *(torch.stack(sums).sum(0) if sums else loss.new_zeros(4)))


def _numbers(
    options: PolicyOptions,
    old: Tensor | None,
    advantage: Tensor,
    weights: Tensor,
    ref: Tensor | None,
    rollout: Tensor | None,
) -> dict[str, Tensor]:
    """The tensors that are there, by name; the advantage with a dimension for tokens."""
    if options.kl_coef and ref is None:
        raise ValueError(f"kl_coef is {options.kl_coef}, and ref_logprob is None")
    if options.rollout_cap and rollout is None:
        raise ValueError(f"rollout_cap is {options.rollout_cap}, and rollout_logprob is None")
    wide = advantage[:, None] if advantage.dim() < weights.dim() else advantage
    given = {"weights": weights, "advantage": wide, "old": old, "ref": ref, "rollout": rollout}
    return {name: tensor for name, tensor in given.items() if tensor is not None}


def _token_losses(
    options: PolicyOptions, logprob: Tensor, entropy: Tensor | None, numbers: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Each token's weighed loss, with graph, and (4, …) its weighed clipped, KL, entropy and mismatch, without.

    Of any shape, but for gspo: (B,T).
    """
    weights = numbers["weights"]
    valid = weights > 0

    def kept(tensor: Tensor) -> Tensor:
        # Selected before exp, not after: 0 · inf is NaN, in the gradient too.
        return torch.where(valid, tensor, 0.0)

    logprob = kept(logprob)
    old = kept(numbers["old"]) if "old" in numbers else logprob.detach()
    loss, clipped = _surrogate(options, logprob, old, kept(numbers["advantage"]), valid)
    mismatch = kl = torch.zeros_like(logprob)
    if "rollout" in numbers:
        drift = old - kept(numbers["rollout"])
        mismatch = drift.exp() - drift - 1
        if options.rollout_cap:
            loss = loss * drift.exp().clamp(max=options.rollout_cap)
    if "ref" in numbers:
        delta = kept(numbers["ref"]) - logprob
        kl = {"k1": -delta, "k2": delta.square() / 2, "k3": delta.exp() - delta - 1}[options.kl]
        if options.kl_corrected:
            ratio = (logprob - old).exp()
            kl = kl * (ratio.detach() if options.kl == "k2" else ratio)
        if options.kl_coef:
            loss = loss + options.kl_coef * kl
    if entropy is not None:
        entropy = kept(entropy)
    if options.entropy_coef:
        if entropy is None:
            raise ValueError(f"entropy_coef is {options.entropy_coef}, and entropy is None")
        loss = loss - options.entropy_coef * entropy
    stats = (clipped, kl, torch.zeros_like(logprob) if entropy is None else entropy, mismatch)
    return weights * loss, torch.stack([weights * s.detach() for s in stats])


def _surrogate(
    options: PolicyOptions, logprob: Tensor, old: Tensor, advantage: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor]:
    """L of each token, and 1 where its gradient was stopped or its ratio capped."""
    log_ratio = logprob - old
    if options.variant == "gspo":
        log_ratio = (log_ratio.sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp(min=1)).expand_as(logprob)
    ratio = log_ratio.exp()
    if options.variant == "cispo":
        cap = 1 + options.clip_high
        return -ratio.detach().clamp(max=cap) * advantage * logprob, (ratio > cap).float()
    free, bound = ratio * advantage, ratio.clamp(1 - options.clip_low, 1 + options.clip_high) * advantage
    gain, stopped = torch.minimum(free, bound), bound < free
    if options.dual_clip:
        least = options.dual_clip * advantage
        low = (advantage < 0) & (gain < least)
        gain, stopped = torch.where(low, least, gain), stopped | low
    return -gain, stopped.float()
