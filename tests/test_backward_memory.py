"""What autograd does between an op's backward and `.grad`: nothing that takes the memory of a gradient.

Zeros for the upstream gradients of results that nobody differentiates, and copies of gradients that somebody still
holds, are as large as the gradients, and no value shows them.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fusedce
from tests.conftest import Place

ROWS, DEPTH, VOCAB, EXPERTS = 24, 16, 40, 3


class Fresh(TorchDispatchMode):
    """Names of the torch functions that made memory of more than one element, outside our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and isinstance(out, Tensor) and out.numel() > 1 and not out._is_view():
            given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
            if out.untyped_storage().data_ptr() not in given:
                self.names.append(f"{func}{tuple(out.shape)}")
        return out


def head_leaves(device: str) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(ROWS, DEPTH, device=device, requires_grad=True)
    weight = torch.randn(VOCAB, DEPTH, device=device, requires_grad=True)
    return hidden, weight, torch.randint(0, VOCAB, (ROWS,), device=device)


def scalar_loss(place: Place) -> tuple[Tensor, Tensor, list[Tensor]]:
    hidden, weight, target = head_leaves(place.device)
    loss = fusedce.linear_cross_entropy(hidden, weight, target, backend=place.backend)
    return loss, torch.ones_like(loss), [hidden, weight]


def log_prob(place: Place) -> tuple[Tensor, Tensor, list[Tensor]]:
    hidden, weight, target = head_leaves(place.device)
    logprob = fusedce.linear_logprob(hidden, weight, target, backend=place.backend)[0]
    return logprob, torch.randn_like(logprob), [hidden, weight]


def policy_loss(place: Place) -> tuple[Tensor, Tensor, list[Tensor]]:
    hidden, weight, target = head_leaves(place.device)
    loss = fusedce.linear_policy_loss(hidden, weight, target, lambda logprob: -logprob, backend=place.backend)
    return loss, torch.ones_like(loss), [hidden, weight]


def experts(place: Place) -> tuple[Tensor, Tensor, list[Tensor]]:
    hidden = torch.randn(ROWS, DEPTH, device=place.device, requires_grad=True)
    gate_up_proj = torch.randn(EXPERTS, 2 * 8, DEPTH, device=place.device, requires_grad=True)
    down_proj = torch.randn(EXPERTS, DEPTH, 8, device=place.device, requires_grad=True)
    weights = torch.rand(ROWS, 2, device=place.device, requires_grad=True)
    index = torch.randint(0, EXPERTS, (ROWS, 2), device=place.device)
    plan = fusedce.moe_plan(index, EXPERTS, backend=place.backend)
    rows = torch.ops.fusedce.moe_experts(
        hidden, gate_up_proj, down_proj, weights, plan.offsets, plan.row_slot, plan.slot_row, backend=place.backend
    )[0]
    return rows, torch.randn_like(rows), [hidden, gate_up_proj, down_proj, weights]


@pytest.mark.parametrize("run", [scalar_loss, log_prob, policy_loss, experts])
def test_the_backward_makes_no_memory_but_the_op_s(run: Callable, place: Place) -> None:
    result, upstream, leaves = run(place)
    with Fresh() as fresh:
        result.backward(upstream)
    assert all(leaf.grad is not None for leaf in leaves)
    if run is policy_loss:  # no op of its own: what its backward makes is seen, once a gradient
        assert len(fresh.names) == sum(leaf.grad is not None for leaf in leaves), fresh.names
    else:
        assert not fresh.names
