"""Every member of the family against its formula, written out token by token in fp64: values, metrics, gradients."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusedce.train import losses
from fusedce.train.losses import (
    PolicyOptions,
    group_advantages,
    head_policy_loss,
    policy_loss,
    token_weights,
    weight_total,
)

ROWS, TOKENS, FIXED = 7, 5, 9
FAMILY = {
    "clip": PolicyOptions(),
    "dual": PolicyOptions(dual_clip=1.5),
    "symmetric": PolicyOptions(clip_high=0.2),
    "cispo": PolicyOptions(variant="cispo"),
    "gspo": PolicyOptions(variant="gspo", clip_low=0.05, clip_high=0.08),
    "gspo-dual": PolicyOptions(variant="gspo", dual_clip=1.2),
}
EXTRAS = {
    "plain": {},
    "k1": {"kl": "k1", "kl_coef": 0.3},
    "k2": {"kl": "k2", "kl_coef": 0.3},
    "k3": {"kl": "k3", "kl_coef": 0.3},
    "k2-own": {"kl": "k2", "kl_coef": 0.3, "kl_corrected": False},
    "k3-own": {"kl": "k3", "kl_coef": 0.3, "kl_corrected": False},
    "entropy": {"entropy_coef": 0.1},
    "rollout": {"rollout_cap": 1.1},
    "all": {"kl_coef": 0.2, "entropy_coef": 0.05, "rollout_cap": 1.3},
}
# What is known of tokens that take no part: it must not matter.
GARBAGE = (math.nan, math.inf, -math.inf, 1e30)


def share(mask: Tensor, b: int, normalize: str) -> float:
    """The weight of a valid token of row b."""
    lengths = [int(row.sum()) for row in mask]
    if normalize == "token":
        return 1 / sum(lengths)
    if normalize == "sequence":
        return 1 / lengths[b] / sum(n > 0 for n in lengths)
    return 1 / (len(lengths) * FIXED)


def one_token(o: PolicyOptions, lp: Tensor, ratio: Tensor, n: dict[str, float], entropy: Tensor) -> dict[str, Tensor]:
    """The terms of one token. ratio: its own, or its row's."""
    a, own, r = n["advantage"], torch.exp(lp - n["old"]), ratio.item()
    if o.variant == "cispo":
        gain = min(r, 1 + o.clip_high) * a * lp
        clipped = r > 1 + o.clip_high
    else:
        low, high = 1 - o.clip_low, 1 + o.clip_high
        inside = low <= r <= high
        fixed = min(max(r, low), high) * a  # a number: no gradient
        clipped = not inside and fixed < r * a
        gain = torch.tensor(fixed, dtype=torch.float64) if clipped else ratio * a
        if o.dual_clip and a < 0 and gain.item() < o.dual_clip * a:
            gain, clipped = torch.tensor(o.dual_clip * a, dtype=torch.float64), True
    trust = min(math.exp(n["old"] - n["rollout"]), o.rollout_cap) if o.rollout_cap else 1.0
    gap = lp - n["ref"]
    kl = {"k1": gap, "k2": gap**2 / 2, "k3": torch.exp(-gap) + gap - 1}[o.kl]
    if o.kl_corrected:
        kl = kl * (own.item() if o.kl == "k2" else own)
    loss = -gain * trust
    if o.kl_coef:
        loss = loss + o.kl_coef * kl
    if o.entropy_coef:
        loss = loss - o.entropy_coef * entropy
    drift = n["old"] - n["rollout"]
    mismatch = math.exp(drift) - drift - 1
    metrics = {"clipped": float(clipped), "kl": kl.item(), "entropy": entropy.item(), "mismatch_kl": mismatch}
    return {"loss": loss, **metrics}


def number(value: Tensor | float) -> float:
    return value.item() if isinstance(value, Tensor) else value


def by_hand(o: PolicyOptions, lp: Tensor, entropy: Tensor, numbers: dict[str, Tensor], mask: Tensor, normalize: str):  # type: ignore[no-untyped-def]
    """The whole loss and the metrics, with Python loops."""
    sums: dict[str, Tensor | float] = dict.fromkeys(("loss", "clipped", "kl", "entropy", "mismatch_kl"), 0.0)
    for b in range(ROWS):
        valid = [t for t in range(TOKENS) if mask[b, t]]
        logs = [lp[b, t] - numbers["old"][b, t] for t in valid]
        for t, log in zip(valid, logs, strict=True):
            ratio = torch.exp(sum(logs) / len(logs) if o.variant == "gspo" else log)
            known = {name: float(v[b] if v.dim() == 1 else v[b, t]) for name, v in numbers.items()}
            for name, value in one_token(o, lp[b, t], ratio, known, entropy[b, t]).items():
                sums[name] = sums[name] + share(mask, b, normalize) * value
    return sums


def problem(garbage: float) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
    """Log-probs, entropies, what is known of the tokens, the mask; one row empty, one of a single token."""
    lp, entropy = (torch.randn(ROWS, TOKENS, dtype=torch.float64) * 0.3 - 1 for _ in range(2))
    mask = torch.rand(ROWS, TOKENS) < 0.7
    mask[2], mask[4] = False, torch.arange(TOKENS) == 3
    numbers = {name: lp + 0.3 * torch.randn(ROWS, TOKENS, dtype=torch.float64) for name in ("old", "ref", "rollout")}
    numbers = {name: t.masked_fill(~mask, garbage) for name, t in numbers.items()}
    numbers["advantage"] = torch.randn(ROWS, dtype=torch.float64)
    numbers["advantage"][2] = garbage
    return lp.masked_fill(~mask, garbage), entropy.masked_fill(~mask, garbage), numbers, mask


@pytest.mark.parametrize("normalize", ["token", "sequence", "fixed"])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("member", FAMILY)
def test_loss_metrics_and_gradients_equal_the_formulas(member: str, extra: str, normalize: str) -> None:
    options = replace(FAMILY[member], **EXTRAS[extra])
    seen = 0.0
    for round_, garbage in enumerate(GARBAGE):
        torch.manual_seed(round_)
        lp, entropy, numbers, mask = problem(garbage)
        leaves = [lp.requires_grad_(), entropy.requires_grad_()]
        expected = by_hand(options, *leaves, numbers, mask, normalize)
        wanted = torch.autograd.grad(expected["loss"], leaves, allow_unused=True)
        weights = token_weights(
            mask, normalize, fixed_length=FIXED, total=weight_total(mask, normalize, FIXED).double()
        )
        result = policy_loss(
            lp, numbers["old"], numbers["advantage"], weights, options, entropy=entropy,
            ref_logprob=numbers["ref"], rollout_logprob=numbers["rollout"],
        )  # fmt: skip
        for name, value in expected.items():
            assert getattr(result, name).item() == pytest.approx(number(value), rel=1e-10, abs=1e-12)
        got = torch.autograd.grad(result.loss, leaves, allow_unused=True)
        torch.testing.assert_close(got[0], wanted[0].where(mask, 0.0), rtol=1e-10, atol=1e-12)
        assert (got[1] is None) == (options.entropy_coef == 0), "the entropy's graph is touched only where it counts"
        if options.entropy_coef:
            torch.testing.assert_close(got[1], wanted[1].where(mask, 0.0), rtol=1e-10, atol=1e-12)
        seen += float(result.clipped)
    assert seen > 0, "problems in which nothing was clipped"


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("member", FAMILY)
def test_the_head_makes_the_same_loss_and_gradients(member: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk by chunk where a token's loss is its own, against all logits at once."""
    options = replace(FAMILY[member], **EXTRAS[extra])
    called = []
    for name in ("linear_logprob", "linear_policy_loss"):
        real = getattr(losses, name)
        monkeypatch.setattr(losses, name, lambda *a, _n=name, _f=real, **k: called.append(_n) or _f(*a, **k))
    words, depth = 13, 6
    hidden = torch.randn(ROWS, TOKENS, depth, dtype=torch.float64, requires_grad=True)
    head = torch.randn(words, depth, dtype=torch.float64, requires_grad=True)
    target = torch.randint(words, (ROWS, TOKENS))
    logits = (hidden @ head.T / 0.7).log_softmax(-1)
    entropy = -(logits.exp() * logits).sum(-1)
    lp = logits.gather(-1, target[..., None])[..., 0]
    _, _, numbers, mask = problem(0.0)
    for name in ("old", "ref", "rollout"):
        numbers[name] = lp.detach() + 0.3 * torch.randn(ROWS, TOKENS, dtype=torch.float64)
    expected = by_hand(options, lp, entropy, numbers, mask, "sequence")
    wanted = torch.autograd.grad(expected["loss"], (hidden, head))
    result = head_policy_loss(
        hidden, head, target.masked_fill(~mask, -100), numbers["old"], numbers["advantage"],
        token_weights(mask, "sequence", total=weight_total(mask, "sequence").double()), options,
        ref_logprob=numbers["ref"], rollout_logprob=numbers["rollout"], temperature=0.7,
    )  # fmt: skip
    assert called == ["linear_logprob" if options.variant == "gspo" else "linear_policy_loss"]
    expected["entropy"] = expected["entropy"] if options.entropy_coef else 0.0
    for name, value in expected.items():
        assert getattr(result, name).item() == pytest.approx(number(value), rel=1e-9, abs=1e-11)
    got = torch.autograd.grad(result.loss, (hidden, head))
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("member", FAMILY)
def test_on_policy_needs_no_old_log_probs(member: str) -> None:
    options = FAMILY[member]
    lp = torch.randn(ROWS, TOKENS, requires_grad=True)
    arguments = torch.randn(ROWS), token_weights(torch.rand(ROWS, TOKENS) < 0.8, "token"), options
    grads = []
    for old in (None, lp.detach()):
        result = policy_loss(lp, old, *arguments)
        assert not result.clipped
        grads.append(torch.autograd.grad(result.loss, lp)[0])
    assert torch.equal(*grads) and grads[0].any()
    expected = -(arguments[1] * arguments[0][:, None]).double()
    if options.variant == "gspo":  # the gradient of a row's ratio is spread evenly over its tokens
        counts = (arguments[1] > 0).sum(1, keepdim=True).clamp(min=1)
        expected = expected.sum(1, keepdim=True) / counts * (arguments[1] > 0)
    torch.testing.assert_close(grads[0].double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_the_corrected_kl_has_the_gradient_of_the_kl(kl: str) -> None:
    """Summed over all words with the sampler's probabilities: exact, no sampling. k3's own gradient is another one."""
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    ref, sampler = (torch.randn(6, dtype=torch.float64).log_softmax(0) for _ in range(2))
    true = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits, retain_graph=True)[0]
    weights = sampler.exp()[None]

    def gradient(**options: object) -> Tensor:
        chosen = PolicyOptions(kl_coef=1.0, kl=kl, **options)
        result = policy_loss(policy[None], sampler[None], torch.zeros(1), weights, chosen, ref_logprob=ref[None])
        return torch.autograd.grad(result.loss, logits, retain_graph=True)[0]

    torch.testing.assert_close(gradient(), true)
    if kl == "k3":
        assert not torch.allclose(gradient(kl_corrected=False), true, atol=1e-3)


def test_the_clip_stops_the_right_gradients() -> None:
    logprob = torch.tensor([1.5, 1.5, 0.5, 0.5, 3.0]).log()[:, None].requires_grad_()
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])
    weights = torch.full((5, 1), 0.2)
    for dual, open_gates in ((0.0, [False, True, True, False, True]), (2.0, [False, True, True, False, False])):
        result = policy_loss(logprob, torch.zeros(5, 1), advantage, weights, PolicyOptions(dual_clip=dual))
        (grad,) = torch.autograd.grad(result.loss, logprob)
        assert (grad.flatten() != 0).tolist() == open_gates
        assert float(result.clipped) == pytest.approx(0.2 * open_gates.count(False))


def test_the_correction_brings_the_samplers_average_to_the_trainers() -> None:
    """Words drawn by another policy, weighed: the average of any reward is the trainer's where no cap binds."""
    policy, rollout = (torch.randn(9, dtype=torch.float64).log_softmax(0) for _ in range(2))
    reward, weights = torch.randn(9, dtype=torch.float64), rollout.exp()[None]
    ours = PolicyOptions(rollout_cap=1e9)
    result = policy_loss(policy[None], None, reward[None], weights, ours, rollout_logprob=rollout[None])
    torch.testing.assert_close(-result.loss, (policy.exp() * reward).sum())
    torch.testing.assert_close(result.mismatch_kl, (rollout.exp() * (rollout - policy)).sum())


@pytest.mark.parametrize("normalize", ["token", "sequence", "fixed"])
def test_weights_of_the_step(normalize: str) -> None:
    """Over micro-batches and ranks: the parts made with the common total are the whole's rows."""
    mask = torch.rand(8, 7) < 0.4
    mask[3] = False
    whole = token_weights(mask, normalize, fixed_length=7)
    total = sum(weight_total(part, normalize, 7) for part in (mask[:3], mask[3:4], mask[4:]))
    parts = [token_weights(m, normalize, fixed_length=7, total=total) for m in (mask[:3], mask[3:4], mask[4:])]
    assert torch.equal(torch.cat(parts), whole)
    expected = 1.0 if normalize != "fixed" else mask.sum() / (8 * 7)
    assert float(whole.sum()) == pytest.approx(float(expected))
    assert not token_weights(torch.zeros(2, 3, dtype=torch.bool), normalize, fixed_length=7).any()


@pytest.mark.parametrize("member", FAMILY)
def test_nothing_valid_is_no_loss(member: str) -> None:
    logprob = torch.full((2, 3), math.nan, requires_grad=True)
    weights = token_weights(torch.zeros(2, 3, dtype=torch.bool), "token")
    result = policy_loss(logprob, logprob.detach(), torch.ones(2), weights, FAMILY[member], entropy=logprob)
    result.loss.backward()
    assert list(result) == [0.0] * 5 and logprob.grad.tolist() == [[0.0] * 3] * 2
    none = policy_loss(logprob[:0], None, torch.ones(0), weights[:0], FAMILY[member])
    assert list(none) == [0.0] * 5
    head, hidden = torch.randn(5, 4, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    target = torch.full((2, 3), -100)
    for rows in (2, 0):
        made = head_policy_loss(
            hidden[:rows], head, target[:rows], None, torch.ones(rows), weights[:rows], FAMILY[member]
        )
        assert list(made) == [0.0] * 5
        assert not any(g.any() for g in torch.autograd.grad(made.loss, (head, hidden)))


@pytest.mark.parametrize(
    ("message", "values"),
    [
        ("variant is 'ppo'", {"variant": "ppo"}),
        ("kl is 'k4'", {"kl": "k4"}),
        ("clip_low is 1.0; expected below 1", {"clip_low": 1.0}),
        ("clip_high is -0.1", {"clip_high": -0.1}),
        ("kl_coef is nan", {"kl_coef": math.nan}),
        ("dual_clip is 0.9; expected 0 or above 1", {"dual_clip": 0.9}),
        ("0 with cispo", {"dual_clip": 2.0, "variant": "cispo"}),
        ("True with k1", {"kl": "k1", "kl_coef": 0.1, "kl_corrected": False}),
    ],
)
def test_options_that_make_no_loss(message: str, values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyOptions(**values)


@pytest.mark.parametrize("key", ["kl_coef", "rollout_cap", "entropy_coef"])
def test_an_option_without_its_tensor(key: str) -> None:
    given = torch.zeros(2, 3), None, torch.ones(2), torch.ones(2, 3)
    with pytest.raises(ValueError, match=f"{key} is 0.5, and .* is None"):
        policy_loss(*given, PolicyOptions(**{key: 0.5}))
    with pytest.raises(ValueError, match="fixed_length is 0"):
        token_weights(torch.ones(2, 3, dtype=torch.bool), "fixed")


@pytest.mark.parametrize("std", [True, False])
def test_equal_rewards_give_no_advantage(std: bool) -> None:
    rewards = torch.tensor([0.1] * 7 + [0.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.25])
    advantages = group_advantages(rewards, 7, std)
    assert advantages[:7].tolist() == [0.0] * 7
    group = rewards[7:]
    expected = (group - group.mean()) / (group.std() + 1e-4 if std else 1.0)
    torch.testing.assert_close(advantages[7:], expected)
