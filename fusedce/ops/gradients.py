"""How an op's backward hands its gradients to autograd, and that it has no backward of its own."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def given_away(grads: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor | None]:
    """The wanted gradients, None for the others, as new tensors of the same memory.

    Autograd keeps a gradient that nobody else holds and copies any other; what a Python op returned, torch 2.11 still
    holds: the copy would be the peak of memory. With create_graph=True they keep their graph, which says what is wrong.
    """
    new = (lambda grad: grad) if torch.is_grad_enabled() else Tensor.detach
    return [new(grad) if wanted else None for grad, wanted in zip(grads, mask, strict=True)]


def no_double_backward(op: str) -> Callable[..., None]:
    """The autograd formula of op's backward: RuntimeError."""

    def formula(ctx, *_):  # type: ignore[no-untyped-def]
        raise RuntimeError(f"fusedce.{op}: double backward is not supported")

    return formula
