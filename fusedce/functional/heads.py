"""Cross-entropy of several heads over one weight, as in multi-token prediction: check, flatten, one op call."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusedce import checks, flags
from fusedce.functional.linear_ce import check_loss_options
from fusedce.functional.main_grad import checked_main_grad, weight_into
from fusedce.functional.operands import check_options, check_weight, head_operands, kept_temperature, row_temperature

__all__ = ["HeadsLoss", "linear_cross_entropy_heads"]


class HeadsLoss(NamedTuple):
    """The loss () of all heads together, differentiable, and each head's own (H,), which is not; fp32."""

    loss: Tensor
    head_loss: Tensor


def linear_cross_entropy_heads(
    hidden: Tensor | Sequence[Tensor],
    weight: Tensor,
    target: Tensor,
    *,
    head_weight: Tensor | Sequence[float] | None = None,
    shift: bool = False,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    main_grad: Tensor | None = None,
    check: str = "auto",
    backend: str = "auto",
) -> HeadsLoss:
    """Σ_h head_weight_h · cross_entropy(linear(hidden_h, weight), target_h): H heads that share a weight, in one pass.

    A row's loss and gradient do not know of other rows, so the heads are more rows and nothing else: what one function
    call over each head would give, with weight's gradient made once and not H times, and read and written once.

    Args:
        hidden: (H, ..., D), or H tensors (..., D), which are copied into one; dtypes as in `linear_logprob`.
        weight: (V, D), of all heads.
        target: (H, ...) int64, in [0, V) or `ignore_index`; with shift (..., S).
        head_weight: (H,) float tensor or H numbers, a factor on each head's loss; None: 1. No gradient flows into it.
        shift: hidden (H, ..., S, D) and target (..., S) are of the same positions: head h at position s is to predict
            target s + 1 + h, with target's token_weight (multi-token prediction, arXiv:2404.19737). The last 1 + h
            positions of a sequence have nothing to predict in head h.
        bias, class_weight: (V,) or None; the second is `weight` of `linear_cross_entropy`.
        token_weight: a factor for each token's loss, target's shape, or None; no gradient flows into it.
        reduction: "mean" (of each head over its own rows that count) or "sum".
        temperature: a number, or a tensor (H, ...) with one for each row of hidden.
        ignore_index, label_smoothing, z_loss, softcap, vocab_size, main_grad, check, backend: see
            `linear_cross_entropy`.

    Returns:
        `HeadsLoss(loss, head_loss)`: () and (H,), fp32 (fp64 for fp64). head_loss has no head_weight in it, and no
        gradient. A head without rows that count has the loss 0.

    Raises: see `linear_logprob`.

    Memory and work: those of `linear_cross_entropy` over H·N tokens. Deterministic.
    """
    op = "linear_cross_entropy_heads"
    hidden = stacked_heads(op, hidden)
    checks.tensor(op, "target", target, (torch.int64,))
    if shift:
        if token_weight is not None:
            check_weight(op, "token_weight", token_weight, target.shape, "target's shape", target.device)
        target, token_weight = shifted_heads(op, hidden, target, token_weight, ignore_index)
    sizes, weight = weight_into(op, weight, main_grad)
    hidden, weight, bias = head_operands(op, ("hidden", "weight", "bias"), hidden, weight, target, bias, vocab_size)
    main_grad = checked_main_grad(op, main_grad, sizes, hidden, weight)
    check_options(op, softcap, ignore_index, check)
    checks.one_of(op, "reduction", reduction, ("mean", "sum"))
    check_loss_options(op, label_smoothing, z_loss, softcap)
    if class_weight is not None:
        check_weight(op, "class_weight", class_weight, weight.shape[:1], "(V,)", weight.device)
    if token_weight is not None:
        check_weight(op, "token_weight", token_weight, target.shape, "target's shape", target.device)
    scalar, rows = row_temperature(op, temperature, target, "hidden's shape without D")
    loss, head_loss = torch.ops.fusedce.linear_ce_heads(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        target.reshape(-1),
        bias,
        hidden.shape[0],
        reduction=reduction,
        ignore_index=ignore_index,
        temperature=scalar,
        softcap=float(softcap or 0.0),
        label_smoothing=float(label_smoothing),
        z_loss=float(z_loss),
        row_temperature=kept_temperature(rows, target, ignore_index),
        token_weight=None if token_weight is None else token_weight.reshape(-1),
        class_weight=class_weight,
        head_weight=checked_head_weight(op, head_weight, hidden),
        main_grad=main_grad,
        backend=backend,
    )
    if check == "sync":
        flags.check_flags()
    return HeadsLoss(loss, head_loss)


def stacked_heads(op: str, hidden: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(hidden, list | tuple):
        for index, head in enumerate(hidden):
            checks.tensor(op, f"hidden[{index}]", head, checks.FLOATS)
            checks.shape(op, f"hidden[{index}]", head, hidden[0].shape, "hidden[0]'s shape")
        checks.positive(op, H=len(hidden))
        checks.same_device(op, **{f"hidden[{index}]": head for index, head in enumerate(hidden)})
        hidden = torch.stack(tuple(hidden))
    checks.tensor(op, "hidden", hidden, checks.FLOATS)
    if not isinstance(hidden, Tensor) or hidden.dim() < 2:
        raise ValueError(checks.wrong(op, "hidden", hidden, "(H, ..., D)"))
    checks.positive(op, H=hidden.shape[0])
    return hidden


def shifted_heads(
    op: str, hidden: Tensor, target: Tensor, token_weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor | None]:
    """target and token_weight (H, ..., S): those of 1 + h positions later. The hidden states stay where they are."""
    if target.dim() < 1:
        raise ValueError(checks.wrong(op, "target", target, "(..., S) with shift=True"))
    heads, length = hidden.shape[0], target.shape[-1]

    def later(numbers: Tensor, nothing: int) -> Tensor:
        padded = torch.cat((numbers, numbers.new_full((*numbers.shape[:-1], heads), nothing)), -1)
        return torch.stack([padded[..., 1 + h : 1 + h + length] for h in range(heads)])

    return later(target, ignore_index), None if token_weight is None else later(token_weight, 0)


def checked_head_weight(op: str, head_weight: Tensor | Sequence[float] | None, hidden: Tensor) -> Tensor | None:
    if head_weight is None:
        return None
    if not isinstance(head_weight, Tensor):
        # By kernels, not by a copy from the host, which a CUDA graph could not replay.
        head_weight = torch.stack([hidden.new_full((), factor, dtype=torch.float32) for factor in head_weight])
    check_weight(op, "head_weight", head_weight, (hidden.shape[0],), "(H,)", hidden.device)
    return head_weight
