"""How an op's backward hands its gradients to autograd."""

from collections.abc import Sequence

import torch
from torch import Tensor


def given_away(grads: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor | None]:
    """The wanted gradients, None for the others, as new tensors of the same memory.

    Autograd keeps a gradient that nobody else holds and copies any other; what a Python op returned, torch 2.11 still
    holds: the copy would be the peak of memory. With create_graph=True they keep their graph, which says what is wrong.
    """
    new = (lambda grad: grad) if torch.is_grad_enabled() else Tensor.detach
    return [new(grad) if wanted else None for grad, wanted in zip(grads, mask, strict=True)]
