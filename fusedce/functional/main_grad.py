"""The option main_grad of the functions of the head: its checks, and the sign that Megatron looks for."""

from typing import Any

import torch
from torch import Tensor

from fusedce import checks

FLAG = "grad_added_to_main_grad"


def weight_into(op: str, weight: Any, main_grad: Tensor | None) -> tuple[tuple[int, ...], Any]:
    """weight's sizes, before padding is cut off, and weight, with Megatron's sign in its backward if it has the flag.

    weight may be anything: `operands` has not looked at it.
    """
    sizes = tuple(weight.shape) if isinstance(weight, Tensor) else ()
    if main_grad is None or not hasattr(weight, FLAG) or not isinstance(weight, Tensor):
        return sizes, weight
    if torch.compiler.is_compiling():
        raise RuntimeError(f"fusedce.{op}: argument 'main_grad' with a weight that has {FLAG} cannot be compiled")
    return sizes, _Sign.apply(weight) if weight.requires_grad and torch.is_grad_enabled() else weight


def checked_main_grad(
    op: str, main_grad: Tensor | None, sizes: tuple[int, ...], hidden: Tensor, weight: Tensor
) -> Tensor | None:
    """main_grad without the rows of padded words. hidden, weight: as `operands` gave them; sizes: weight's before."""
    if main_grad is None:
        return None
    checks.tensor(op, "main_grad", main_grad, (torch.float64 if hidden.dtype == torch.float64 else torch.float32,))
    checks.shape(op, "main_grad", main_grad, sizes, "the weight's shape (V, D)")
    checks.same_device(op, weight=weight, main_grad=main_grad)
    if main_grad.requires_grad or not main_grad.is_contiguous():
        wrong = "requires grad" if main_grad.requires_grad else "is not contiguous"
        raise ValueError(f"fusedce.{op}: argument 'main_grad' {wrong}; expected a contiguous tensor that does not")
    return main_grad[: weight.shape[0]]


class _Sign(torch.autograd.Function):
    """A parameter as it is. Its backward says on it that main_grad has the gradient, and gives it zeros for one: hooks
    that wait for a gradient run, and who adds it all the same adds nothing."""

    @staticmethod
    def forward(ctx, weight):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, _):  # type: ignore[no-untyped-def]
        setattr(ctx.weight, FLAG, True)
        return torch.zeros_like(ctx.weight)
