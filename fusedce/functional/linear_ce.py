"""Linear cross-entropy and per-token log-prob: check, flatten, one op call, reduce."""

from typing import NamedTuple

import torch
from torch import Tensor

from fusedce import checks, flags
from fusedce.functional.autocast import autocast

__all__ = ["LogProb", "linear_cross_entropy", "linear_logprob"]


class LogProb(NamedTuple):
    """Per-token results of `linear_logprob`, each (N,) fp32."""

    logprob: Tensor
    entropy: Tensor
    lse: Tensor


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    check: str = "auto",
    backend: str = "auto",
) -> LogProb:
    """Log-prob of each token's target under the language-model head, with entropy and log-sum-exp, without the logits.

    z = cap(hidden · weightᵀ + bias) / temperature, cap(x) = softcap · tanh(x / softcap);
    lse = log Σ_j exp z_j; logprob = z_target − lse; entropy = lse − Σ_j softmax(z)_j · z_j (nats).

    Args:
        hidden: (..., D) fp32, bf16 or fp16 (fp64 on the eager backend). Any strides; rows are read, never kept as a
        copy
            unless their last dimension is strided.
        weight: (V, D), hidden's dtype. Under torch.autocast both are cast to its dtype first.
        target: (...) int64, in [0, V) or `ignore_index`.
        bias: (V,), hidden's dtype, or None.
        temperature: divides the logits, above 0.
        softcap: above 0, or None for none.
        ignore_index: the target of rows that take no part: their three results are 0, their gradients exactly 0, and a
            backend may leave their work out.
        check: what happens to a target out of range. On a CPU: ValueError at once. On a GPU "auto" makes the row NaN
        and
            raises at a later call or in `fusedce.check_flags()`, without a sync; "sync" waits for the GPU and raises
            here.
        backend: "auto", "eager", "triton" or "native"; `fusedce.explain()` says what "auto" takes and why.

    Returns:
        `LogProb(logprob, entropy, lse)`, each of target's shape, fp32 (fp64 for fp64), differentiable in hidden, weight
        and bias with any upstream gradient on any of the three. Double backward raises RuntimeError.

    Raises:
        TypeError, ValueError: a wrong kind, dtype, device, shape or value, naming the argument.
        RuntimeError: a named backend that cannot run here, with the reason.

    Memory: forward 20·N bytes and the partial sums; backward beside the gradients one chunk of d_logits, at most
    FUSEDCE_WORKSPACE_MB (default 768 MiB), and 4·V·D bytes for d_weight in fp32. Work: 2·N·D·V FLOP forward, three
    times that backward. Deterministic: the same inputs give the same bits, forward and backward.
    """
    op = "linear_logprob"
    hidden, weight, bias = autocast(hidden, weight, bias)
    _check(op, hidden, weight, target, bias, ("hidden", "weight", "bias"))
    _check_options(op, temperature, softcap, ignore_index, check)
    flat, flat_target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    logprob, entropy, lse, _ = torch.ops.fusedce.linear_logprob(
        flat,
        weight,
        flat_target,
        bias,
        ignore_index=ignore_index,
        temperature=float(temperature),
        softcap=float(softcap or 0.0),
        backend=backend,
    )
    if check == "sync":
        flags.check_flags()
    return LogProb(*(result.reshape(target.shape) for result in (logprob, entropy, lse)))


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    check: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """Cross-entropy of a linear layer's outputs without the outputs: `cross_entropy(linear(input, linear_weight),
    target)`.

    The arguments are those of `torch.nn.functional.linear_cross_entropy` (torch ≥ 2.13), then ours. Not a tensor of
    tokens × vocabulary exists at any time (the method: Liger Kernel's and Cut Cross-Entropy's chunked head,
    arXiv:2411.09009; the online log-sum-exp: arXiv:1805.02867).

    Args:
        input: (..., D), the hidden states; dtypes as in `linear_logprob`.
        linear_weight: (V, D).
        target: (...) int64 class indices. Class probabilities are not supported.
        linear_bias: (V,) or None.
        weight: (V,) a factor for each class, any float dtype, or None; no gradient flows into it.
        reduction: "none", "mean" (over the rows that count, by their class weights) or "sum".
        ignore_index: the target of rows without loss; None is −100.
        label_smoothing: only 0.0; another value raises ValueError.
        temperature, softcap, check, backend: see `linear_logprob`.

    Returns:
        The loss in fp32 (fp64 for fp64): target's shape for "none", else (). When no row counts, "mean" is 0 with zero
        gradients, where torch gives NaN.

    Raises, memory, determinism: see `linear_logprob`.
    """
    op = "linear_cross_entropy"
    input, linear_weight, linear_bias = autocast(input, linear_weight, linear_bias)
    _check(op, input, linear_weight, target, linear_bias, ("input", "linear_weight", "linear_bias"))
    ignore_index = -100 if ignore_index is None else ignore_index
    _check_options(op, temperature, softcap, ignore_index, check)
    checks.one_of(op, "reduction", reduction, ("none", "mean", "sum"))
    if label_smoothing != 0.0:
        raise ValueError(f"fusedce.{op}: argument 'label_smoothing' is {label_smoothing}; expected 0.0")
    if weight is not None:
        _check_class_weight(op, weight, linear_weight)
    loss = torch.ops.fusedce.linear_ce(
        input.reshape(-1, input.shape[-1]),
        linear_weight,
        target.reshape(-1),
        linear_bias,
        reduction=reduction if weight is None else "none",
        ignore_index=ignore_index,
        temperature=float(temperature),
        softcap=float(softcap or 0.0),
        backend=backend,
    )
    if check == "sync":
        flags.check_flags()
    if weight is not None:
        loss = _weigh(loss, weight.detach(), target.reshape(-1), ignore_index, reduction)
    return loss.reshape(target.shape) if reduction == "none" else loss


def _weigh(loss: Tensor, class_weight: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Per-row losses times their class weights, reduced as torch reduces them."""
    # clamp: a label out of range was reported, and its row is NaN already
    rows = class_weight.to(loss.dtype)[target.clamp(0, class_weight.shape[0] - 1)]
    rows = torch.where(target == ignore_index, 0.0, rows)
    weighed = loss * rows
    if reduction == "none":
        return weighed
    if reduction == "sum":
        return weighed.sum()
    total = rows.sum()
    return weighed.sum() / torch.where(total == 0, 1.0, total)


def _check(
    op: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, names: tuple[str, str, str]
) -> None:
    checks.tensor(op, names[0], hidden, checks.FLOATS)
    checks.tensor(op, names[1], weight, checks.FLOATS)
    checks.tensor(op, "target", target, (torch.int64,))
    if hidden.dim() == 0:
        raise ValueError(checks.wrong(op, names[0], hidden, "(..., D)"))
    checks.shape(op, names[1], weight, (None, hidden.shape[-1]), "(V, D)")
    checks.positive(op, V=weight.shape[0], D=weight.shape[1])
    checks.shape(op, "target", target, hidden.shape[:-1], f"{names[0]}'s shape without D")
    if bias is not None:
        checks.tensor(op, names[2], bias, checks.FLOATS)
        checks.shape(op, names[2], bias, (weight.shape[0],), "(V,)")
    named = {names[0]: hidden, names[1]: weight, names[2]: bias}
    checks.same_dtype(op, **named)
    checks.same_device(op, **named, target=target)


def _check_options(op: str, temperature: float, softcap: float | None, ignore_index: int, check: str) -> None:
    checks.positive_number(op, "temperature", temperature)
    if softcap is not None:
        checks.positive_number(op, "softcap", softcap)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"fusedce.{op}: argument 'ignore_index' has {checks.describe(ignore_index)}; expected an int")
    checks.one_of(op, "check", check, ("auto", "sync"))


def _check_class_weight(op: str, weight: Tensor, linear_weight: Tensor) -> None:
    checks.tensor(op, "weight", weight, checks.FLOATS)
    checks.shape(op, "weight", weight, (linear_weight.shape[0],), "(V,)")
    checks.same_device(op, linear_weight=linear_weight, weight=weight)
