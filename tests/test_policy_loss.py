"""linear_policy_loss: any loss of a token's log-prob at the price of the scalar loss, against plain torch in fp64."""

import pytest
import torch
from torch import Tensor

import fusedce
from tests.conftest import Place
from tests.linear_ce_cases import IGNORE, Case, in_fp64, plain, with_gradients
from tests.paired import assert_bites, assert_close, twin_of_sum

NATIVE = True

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def clipped(logprob: Tensor, old_logprob: Tensor, advantage: Tensor, weight: Tensor) -> Tensor:
    """PPO's clipped ratio."""
    ratio = torch.exp(logprob - old_logprob.to(logprob.dtype))
    return -weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)


def cispo(logprob: Tensor, old_logprob: Tensor, advantage: Tensor, weight: Tensor) -> Tensor:
    """A clipped weight that gets no gradient, times the log-prob."""
    ratio = torch.exp(logprob - old_logprob.to(logprob.dtype)).detach().clamp(max=1.5)
    return -weight * ratio * advantage * logprob


def with_bonus(logprob: Tensor, entropy: Tensor, old_logprob: Tensor, advantage: Tensor, weight: Tensor) -> Tensor:
    """PPO's loss with a bonus for entropy."""
    return clipped(logprob, old_logprob, advantage, weight) - 0.3 * weight * entropy


def numbers(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Old log-probs near the new ones, so that some ratios are clipped; advantages; weights, of which some are 0."""
    hidden, weight, target, bias = case.inputs("cpu")
    generator = torch.Generator().manual_seed(3)
    logprob = plain(case, *(t if t is None else t.float() for t in (hidden, weight)), target, bias and bias.float())[0]
    old = logprob + 0.3 * torch.randn(case.num_rows, generator=generator)
    advantage, counts = torch.randn(2, case.num_rows, generator=generator)
    counts[::3] = 0.0
    return old.to(device), advantage.to(device), counts.abs().to(device)


CASES = [
    Case(67, 301, 48, BF16),
    Case(67, 301, 48, FP16, softcap=5.0),
    Case(130, 70, 16, FP32),
    Case(50, 1000, 24, BF16, temperature=0.7),
]


@pytest.mark.parametrize("loss_fn", [clipped, cispo, with_bonus])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_value_and_gradients(loss_fn, case: Case, place: Place) -> None:  # type: ignore[no-untyped-def]
    hidden, weight, target, _ = case.inputs(place.device)
    per_token, has_entropy = numbers(case, place.device), loss_fn is with_bonus

    def fused(hidden: Tensor, weight: Tensor) -> list[Tensor]:
        options = {"temperature": case.temperature, "softcap": case.softcap, "with_entropy": has_entropy}
        loss = fusedce.linear_policy_loss(
            hidden, weight, target, loss_fn, *per_token, ignore_index=IGNORE, backend=place.backend, **options
        )
        return [loss]

    def reference_rows(hidden: Tensor, weight: Tensor) -> Tensor:
        logprob, entropy, _ = plain(case, hidden, weight, target.to(hidden.device), None)
        given = [t.to(hidden.device) for t in per_token]
        rows = loss_fn(logprob, *((entropy,) if has_entropy else ()), *given)
        return torch.where(target.to(hidden.device) != IGNORE, rows, 0.0)

    def reference(hidden: Tensor, weight: Tensor) -> list[Tensor]:
        return [reference_rows(hidden, weight).sum()]

    grad = [torch.tensor(-1.3, device=place.device)]
    out, twin = (with_gradients(run, (hidden, weight), grad) for run in (fused, reference))
    gold = with_gradients(reference, in_fp64((hidden, weight)), [g.cpu().double() for g in grad])
    errors = reference_rows(hidden, weight).double().cpu() - reference_rows(*in_fp64((hidden, weight)))
    assert_close(out[0], gold[0], twin_of_sum(gold[0], errors), "loss")
    for name, o, g, t in zip(("d_hidden", "d_weight"), out[1:], gold[1:], twin[1:], strict=True):
        assert_close(o, g, t, name)
        assert_bites(g, t, name)


def test_loss_fn_sees_every_token_once_and_in_order(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several chunks; per-token tensors of any dtype come along."""
    monkeypatch.setenv("FUSEDCE_WORKSPACE_MB", "1")
    hidden, weight, target, _ = Case(300, 1500, 8).inputs(place.device)
    order, seen = torch.arange(300, device=place.device), []

    def watch(logprob: Tensor, number: Tensor) -> Tensor:
        assert logprob.shape == number.shape and logprob.requires_grad
        seen.append(number)
        return logprob

    loss = fusedce.linear_policy_loss(hidden, weight.requires_grad_(), target, watch, order, backend=place.backend)
    assert torch.equal(torch.cat(seen), order)
    expected = fusedce.linear_cross_entropy(hidden, weight, target, reduction="sum", backend=place.backend)
    torch.testing.assert_close(loss, -expected)


def test_no_grad_no_rows_and_a_loss_without_gradient(place: Place) -> None:
    hidden, weight, target, _ = Case(20, 40, 8).inputs(place.device)
    with torch.no_grad():
        value = fusedce.linear_policy_loss(hidden, weight, target, lambda lp: -lp, backend=place.backend)
    expected = fusedce.linear_cross_entropy(hidden, weight, target, reduction="sum", backend=place.backend)
    torch.testing.assert_close(value, expected)
    hidden.requires_grad_()
    none = fusedce.linear_policy_loss(hidden[:0], weight, target[:0], lambda lp: -lp, backend=place.backend)
    none.backward()
    assert none.item() == 0.0 and not hidden.grad.any()
    constant = fusedce.linear_policy_loss(hidden, weight, target, torch.ones_like, backend=place.backend)
    constant.backward()
    assert constant.item() == (target != IGNORE).sum() and not hidden.grad.any()


def test_a_second_backward_and_a_double_one(place: Place) -> None:
    hidden, weight, target, _ = Case(20, 40, 8).inputs(place.device)
    loss = fusedce.linear_policy_loss(hidden.requires_grad_(), weight, target, torch.exp, backend=place.backend)
    first, second = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and first.any()
    (grad,) = torch.autograd.grad(loss, hidden, torch.ones((), device=place.device).requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_wrong_arguments_are_told() -> None:
    hidden, weight, target, _ = Case(6, 9, 4).inputs("cpu")
    with pytest.raises(ValueError, match=r"'loss_fn's result' has shape \(\).*\(C,\)"):
        fusedce.linear_policy_loss(hidden.requires_grad_(), weight, target, torch.sum)
    with pytest.raises(ValueError, match=r"'per_token\[1\]' has shape \(5,\).*target's shape \(6,\)"):
        fusedce.linear_policy_loss(hidden, weight, target, torch.mul, torch.ones(6), torch.ones(5))
    with pytest.raises(ValueError, match="the value 9"):
        fusedce.linear_policy_loss(hidden, weight, target.abs() * 0 + 9, torch.exp)
