"""The greedy word of each token: check, flatten, one op call."""

import torch
from torch import Tensor

from fusedce import checks
from fusedce.functional.operands import check_options, head_weights

__all__ = ["linear_argmax"]


def linear_argmax(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    target: Tensor | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Each token's word of the largest logit, argmax_j (hidden · weightᵀ + bias)_j, without the logits.

    Of equal logits, compared in fp32 as they are accumulated, the word with the lowest id. A softcap and a temperature
    leave the order of the logits as it is, so there is no argument for them.

    Args:
        hidden: (..., D) fp32, bf16 or fp16 (fp64 on the eager backend), any strides.
        weight: (V, D). One of another dtype is cast to hidden's. Under torch.autocast both are cast to its dtype.
        bias: (V,) or None.
        target: (...) int64 or None; only which tokens have the target `ignore_index` matters: their word is −1,
            whatever they hold, so that `(word == target).sum()` counts the right ones of the others, where
            `ignore_index` is not −1 itself.
        ignore_index: see `target`.
        vocab_size: how many rows of weight are words; those after them are padding and are never chosen. None: all V.
        backend: "auto", "eager", "triton" or "native"; `fusedce.explain()` says what "auto" takes and why.

    Returns:
        (...) int64. −1 for a token with NaN or +inf among its logits, of which softmax makes NaN; 0 where all are −inf,
        as in torch. No gradient.

    Raises:
        TypeError, ValueError: a wrong kind, dtype, device, shape or value, naming the argument.
        RuntimeError: a named backend that cannot run here, with the reason.

    Memory: 8·N bytes, and at most 64 MiB of partial results; native: a chunk of fp32 logits within
    FUSEDCE_WORKSPACE_MB. Work: 2·N·D·V FLOP. Deterministic, and with Triton a token's word does not depend on the other
    tokens.
    """
    op = "linear_argmax"
    hidden, weight, bias = head_weights(op, ("hidden", "weight", "bias"), hidden, weight, bias, vocab_size)
    check_options(op, None, ignore_index, "auto")
    shape = hidden.shape[:-1]
    if target is not None:
        checks.tensor(op, "target", target, (torch.int64,))
        checks.shape(op, "target", target, shape, "hidden's shape without D")
        checks.same_device(op, hidden=hidden, target=target)
    words = torch.ops.fusedce.linear_argmax(hidden.reshape(-1, hidden.shape[-1]), weight, bias, backend=backend)
    words = words.reshape(shape)
    return words if target is None else torch.where(target == ignore_index, -1, words)
