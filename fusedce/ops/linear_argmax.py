"""linear_argmax as a torch op: implementation by the chosen backend, and fake. Integers have no gradient."""

import torch
from torch import Tensor

from fusedce import flags
from fusedce.ops import registry
from fusedce.ops.linear_logprob import check_head_sizes
from fusedce.ops.schema import LIB, NAMESPACE


def _argmax(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    flags.raise_pending()
    check_head_sizes("linear_argmax", hidden, weight, bias)
    choice = registry.choose("linear_argmax", backend, hidden.device, hidden.dtype)
    # No gradient: hidden states and weights that want one must not be followed through the logits.
    with torch.no_grad():
        return registry.function(choice, "linear_argmax")(hidden, weight, bias)


for _key in ("CPU", "CUDA"):
    LIB.impl("linear_argmax", _argmax, _key)


@torch.library.register_fake(f"{NAMESPACE}::linear_argmax", lib=LIB)
def _argmax_fake(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    check_head_sizes("linear_argmax", hidden, weight, bias)
    return hidden.new_empty(hidden.shape[0], dtype=torch.int64)
