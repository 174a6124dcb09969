"""torch.autocast for custom ops: torch casts only the operands of ops that it knows."""

from typing import Any

import torch
from torch import Tensor


def autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors in autocast's dtype where it is on for the first one's device, else as they are; as F.linear does it.

    None stays None. The cast is differentiable, so gradients come back in each tensor's own dtype.
    """
    first = tensors[0]
    # torch asks about any device type, but raises for those without autocast, such as meta
    if not isinstance(first, Tensor) or first.device.type not in ("cpu", "cuda"):
        return tensors
    if not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(t.to(dtype) if isinstance(t, Tensor) else t for t in tensors)
