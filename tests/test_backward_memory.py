"""What autograd itself allocates around the ops: no zeros for the gradient of a result that has none.

Seen by the dispatcher under FakeTensorMode, so that sizes are real and nothing is computed.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusedce

N, D, V, E, F, K = 512, 64, 1024, 8, 32, 4


class Zeros(TorchDispatchMode):
    """Counts the elements of every tensor that is filled with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "zeros" in func.name():
            self.elements += out.numel()
        return out


def leaf(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)


def cross_entropy() -> Tensor:
    return fusedce.linear_cross_entropy(leaf(N, D), leaf(V, D), torch.zeros(N, dtype=torch.int64))


def logprob() -> Tensor:
    return fusedce.linear_logprob(leaf(N, D), leaf(V, D), torch.zeros(N, dtype=torch.int64)).logprob.sum()


def route() -> Tensor:
    return fusedce.moe_route(leaf(N, E), K).top_k_weights.sum()


def experts() -> Tensor:
    weights, index = fusedce.moe_route(leaf(N, E), K)
    plan = fusedce.moe_plan(index, E)
    rows = fusedce.moe_experts(leaf(N, D), leaf(E, 2 * F, D), leaf(E, D, F), weights, plan)
    return fusedce.moe_combine(rows, plan).sum()


CASES = [cross_entropy, logprob, route, experts]


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_the_backward_makes_no_zeros(make: Callable[[], Tensor]) -> None:
    with FakeTensorMode():
        loss = make()
        with Zeros() as zeros:
            loss.backward()
    assert zeros.elements == 0


def test_the_watch_sees_zeros() -> None:
    """The bite: a function that lets autograd fill in the gradient of its second result."""

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + 1, x + 2

        @staticmethod
        def backward(ctx, first, second):
            return first + second

    with FakeTensorMode():
        loss = Two.apply(leaf(N, D))[0].sum()
        with Zeros() as zeros:
            loss.backward()
    assert zeros.elements == N * D


class NoGradient(torch.autograd.Function):
    """Passes a tensor on and hands back no gradient for it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_no_gradient_above_is_none_below() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    loss = fusedce.linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2]))
    NoGradient.apply(loss).backward()
    assert hidden.grad is None and weight.grad is None
    logits = torch.randn(3, 4, requires_grad=True)
    NoGradient.apply(fusedce.moe_route(logits, 2).top_k_weights).sum().backward()
    assert logits.grad is None
    gate_up, down = torch.randn(4, 6, 4, requires_grad=True), torch.randn(4, 4, 3, requires_grad=True)
    weights, index = fusedce.moe_route(torch.randn(3, 4), 2)
    rows = fusedce.moe_experts(torch.randn(3, 4), gate_up, down, weights, fusedce.moe_plan(index, 4))
    NoGradient.apply(rows).sum().backward()
    assert gate_up.grad is None and down.grad is None
