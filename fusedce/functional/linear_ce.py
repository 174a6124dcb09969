"""Linear cross-entropy and per-token log-prob: check, flatten, one op call, reduce."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce import checks, flags
from fusedce.functional.main_grad import checked_main_grad, weight_into
from fusedce.functional.operands import check_options, check_weight, head_operands, kept_temperature, row_temperature

__all__ = ["LogProb", "linear_cross_entropy", "linear_logprob"]


class LogProb(NamedTuple):
    """Per-token results of `linear_logprob`, each of target's shape, fp32; entropy is None where it was not wanted."""

    logprob: Tensor
    entropy: Tensor | None
    lse: Tensor


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    with_entropy: bool = True,
    gradient_budget: float | None = None,
    certificate: Tensor | None = None,
    main_grad: Tensor | None = None,
    check: str = "auto",
    backend: str = "auto",
) -> LogProb:
    """Log-prob of each token's target under the language-model head, with entropy and log-sum-exp, without the logits.

    z = cap(hidden · weightᵀ + bias) / temperature, cap(x) = softcap · tanh(x / softcap);
    lse = log Σ_j exp z_j; logprob = z_target − lse; entropy = lse − Σ_j softmax(z)_j · z_j (nats).

    Args:
        hidden: (..., D) fp32, bf16 or fp16 (fp64 on the eager backend). Any strides; rows are read, never kept as a
            copy unless their last dimension is strided.
        weight: (V, D). One of another dtype is cast to hidden's. Under torch.autocast both are cast to its dtype.
        target: (...) int64, in [0, V) or `ignore_index`.
        bias: (V,) or None.
        temperature: divides the logits, above 0: a number, or a tensor of target's shape with one for each token (its
            values are not checked, and it gets no gradient).
        softcap: above 0, or None for none.
        ignore_index: the target of rows that take no part: their three results are 0, their gradients exactly 0, and a
            backend may leave their work out.
        vocab_size: how many rows of weight are words; those after them are padding and take no part. None: all V.
        main_grad: (V, D) fp32 (fp64 for fp64), contiguous, or None: the backward adds weight's gradient to it in fp32,
            and `weight.grad` gets nothing. See `linear_cross_entropy`. Not together with gradient_budget.
        with_entropy: False leaves the entropy out, and with it its share of the forward.
        gradient_budget: None, or what the backward may leave out. 0: the rows whose upstream gradient is exactly 0,
            which changes no gradient; n rows that have one cost 3·2·n·D·V FLOP. δ above 0 (2⁻¹⁰ is a good one): also
            words that hold little probability, together at most δ·Σ|g|·2·(1 − p_target) of the gradient in the logits,
            g being the gradient of the log-prob; where that would save nothing, nothing is left out
            (docs/linear_ce.md has the bound on each gradient, and its proof). Not with the native backend.
        certificate: a (4,) fp32 tensor that requires grad, on hidden's device, or None; its value is not read. Each
            backward adds to its .grad, without a sync: the gradient left out, at most; Σ|g|·2·(1 − p_target), which it
            is a share of; 1 if any was left out, 0 if that was refused; and 1.
        check: what happens to a target out of range. On a CPU: ValueError at once. On a GPU "auto" makes the row NaN
            and raises at a later call or in `fusedce.check_flags()`, without a sync; "sync" waits for the GPU and
            raises here.
        backend: "auto", "eager", "triton" or "native"; `fusedce.explain()` says what "auto" takes and why.

    Returns:
        `LogProb(logprob, entropy, lse)`, each of target's shape, fp32 (fp64 for fp64), differentiable in hidden, weight
        and bias with any upstream gradient on any of the three. Double backward raises RuntimeError.

    Raises:
        TypeError, ValueError: a wrong kind, dtype, device, shape or value, naming the argument.
        RuntimeError: a named backend that cannot run here, with the reason.

    Memory: forward 24·N bytes and at most 64 MiB of partial sums; backward beside the gradients one chunk of d_logits,
    at most FUSEDCE_WORKSPACE_MB (default 768 MiB, or weight's bytes where that is more), and 4·V·D bytes for d_weight
    in fp32, which main_grad saves (but for fp16). Work: 2·N·D·V FLOP forward, three times that backward. With a
    gradient_budget above 0, N·V/128 bytes more from forward to backward; with any, on Triton, in the backward a chunk
    of d_logits with a copy of hidden within FUSEDCE_WORKSPACE_MB (or half of that and the copy), and 4·N·D bytes for
    d_hidden in fp32. Deterministic: the same inputs give the same bits, forward and backward.
    """
    op = "linear_logprob"
    sizes, weight = weight_into(op, weight, main_grad)
    hidden, weight, bias = head_operands(op, ("hidden", "weight", "bias"), hidden, weight, target, bias, vocab_size)
    main_grad = checked_main_grad(op, main_grad, sizes, hidden, weight)
    check_options(op, softcap, ignore_index, check)
    scalar, rows = row_temperature(op, temperature, target)
    _check_budget(op, gradient_budget, certificate, hidden.device)
    if main_grad is not None and gradient_budget is not None:
        raise ValueError(f"fusedce.{op}: arguments 'main_grad' and 'gradient_budget' do not go together")
    if backend == "native" and gradient_budget is not None:
        raise ValueError(
            f"fusedce.{op}: arguments 'gradient_budget' and 'backend' = 'native' do not go together: a vendor's "
            "GEMM ends where the host says, and which rows count is known on the GPU alone"
        )
    operands = (hidden.reshape(-1, hidden.shape[-1]), weight, target.reshape(-1), bias)
    rows = kept_temperature(rows, target, ignore_index)
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "temperature": scalar,
        "softcap": float(softcap or 0.0),
        "with_entropy": with_entropy,
        "backend": backend,
    }
    if main_grad is not None:
        logprob, entropy, lse, _ = torch.ops.fusedce.linear_logprob_into(*operands, rows, main_grad, **options)
    elif gradient_budget is None:
        logprob, entropy, lse, _ = torch.ops.fusedce.linear_logprob(*operands, rows, **options)
    else:
        logprob, entropy, lse, _, _ = torch.ops.fusedce.linear_logprob_sparse(
            *operands, rows, certificate, gradient_budget=float(gradient_budget), **options
        )
    if check == "sync":
        flags.check_flags()
    shape = target.shape
    return LogProb(logprob.reshape(shape), entropy.reshape(shape) if with_entropy else None, lse.reshape(shape))


def _check_budget(op: str, budget: float | None, certificate: Tensor | None, device: torch.device) -> None:
    if budget is not None:
        if isinstance(budget, bool) or not isinstance(budget, (int, float)):
            kind = checks.describe(budget)
            raise TypeError(f"fusedce.{op}: argument 'gradient_budget' has {kind}; expected a number or None")
        if not 0.0 <= budget < 1.0:
            raise ValueError(f"fusedce.{op}: argument 'gradient_budget' is {budget}; expected from 0 to below 1")
    if certificate is None:
        return
    if budget is None:
        raise ValueError(f"fusedce.{op}: argument 'certificate' needs a gradient_budget")
    checks.tensor(op, "certificate", certificate, (torch.float32,))
    checks.shape(op, "certificate", certificate, (4,), "(4,)")
    if certificate.device != device:
        raise ValueError(f"fusedce.{op}: argument 'certificate' is on {certificate.device}; expected {device}")


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
    token_weight: Tensor | None = None,
    z_loss: float = 0.0,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    shift: bool = False,
    main_grad: Tensor | None = None,
    check: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """Cross-entropy of a linear layer's outputs without the outputs: `cross_entropy(linear(input, linear_weight),
    target)`.

    The arguments are those of `torch.nn.functional.linear_cross_entropy` (torch ≥ 2.13), then ours. Not a tensor of
    tokens × vocabulary exists at any time (the method: Liger Kernel's and Cut Cross-Entropy's chunked head,
    arXiv:2411.09009; the online log-sum-exp: arXiv:1805.02867). Where "mean" or "sum" is differentiated, the gradients
    are made in the forward, and the backward multiplies them by its one number.

    Args:
        input: (..., D), the hidden states; dtypes as in `linear_logprob`.
        linear_weight: (V, D). One of another dtype is cast to input's.
        target: (...) int64 class indices. Class probabilities are not supported.
        linear_bias: (V,) or None.
        weight: (V,) a factor for each class, any float dtype, or None; no gradient flows into it.
        reduction: "none", "mean" (over the rows that count, by their class and token weights) or "sum".
        ignore_index: the target of rows without loss; None is −100.
        label_smoothing: ε in [0, 1]: the loss is (1 − ε) times that of the target and ε times the mean over all words
            (by their class weights, as in torch). Not together with softcap.
        token_weight: a factor for each token's loss, target's shape, any float dtype, or None; no gradient flows
            into it.
        z_loss: ζ ≥ 0: adds ζ · lse² to each token's loss (PaLM, arXiv:2204.02311).
        shift: input (B, S, D) and target (B, S) are of the same positions: position s is to predict target s + 1, with
            target's token_weight. The last one of each sequence predicts nothing.
        main_grad: (V, D) fp32 (fp64 for fp64), contiguous, or None: the backward adds linear_weight's gradient to it in
            fp32, once for every backward, and `linear_weight.grad` gets nothing: gradients of many micro-batches are
            summed without being rounded. Where linear_weight has Megatron's attribute `grad_added_to_main_grad`, the
            backward sets it to True, and `linear_weight.grad` is zeros, so that the hooks that wait for it run; that
            cannot be compiled. What else is compiled has to have its backward before its next forward: between the two,
            torch lets nothing else change main_grad.
        temperature, softcap, vocab_size, check, backend: see `linear_logprob`.

    Returns:
        The loss in fp32 (fp64 for fp64): target's shape for "none", else (). When no row counts, "mean" is 0 with zero
        gradients, where torch gives NaN.

    Raises: see `linear_logprob`.

    Memory: "none" as `linear_logprob`. "mean" and "sum": one chunk of exponentials, at most FUSEDCE_WORKSPACE_MB, and
    4·V·D bytes for d_weight in fp32; from forward to backward the gradients themselves. label_smoothing adds 4·N·D
    bytes, with class weights 4·V·D. With main_grad, from forward to backward linear_weight's gradient in fp32, 4·V·D
    bytes, and none of its size after that; "none": as `linear_logprob`. Work: three times 2·N·D·V FLOP with bf16
    operands, else up to four. Deterministic.
    """
    op = "linear_cross_entropy"
    names = ("input", "linear_weight", "linear_bias")
    sizes, linear_weight = weight_into(op, linear_weight, main_grad)
    input, linear_weight, linear_bias = head_operands(op, names, input, linear_weight, target, linear_bias, vocab_size)
    main_grad = checked_main_grad(op, main_grad, sizes, input, linear_weight)
    ignore_index = -100 if ignore_index is None else ignore_index
    check_options(op, softcap, ignore_index, check)
    checks.one_of(op, "reduction", reduction, ("none", "mean", "sum"))
    check_loss_options(op, label_smoothing, z_loss, softcap)
    if weight is not None:
        check_weight(op, "weight", weight, linear_weight.shape[:1], "(V,)", linear_weight.device)
    if token_weight is not None:
        check_weight(op, "token_weight", token_weight, target.shape, "target's shape", target.device)
    scalar, rows = row_temperature(op, temperature, target)
    shape = target.shape
    if shift:
        target, token_weight = shifted(op, target, token_weight, ignore_index)
    loss = torch.ops.fusedce.linear_ce(
        input.reshape(-1, input.shape[-1]),
        linear_weight,
        target.reshape(-1),
        linear_bias,
        reduction=reduction,
        ignore_index=ignore_index,
        temperature=scalar,
        softcap=float(softcap or 0.0),
        label_smoothing=float(label_smoothing),
        z_loss=float(z_loss),
        row_temperature=kept_temperature(rows, target, ignore_index),
        token_weight=None if token_weight is None else token_weight.reshape(-1),
        class_weight=weight,
        main_grad=main_grad,
        backend=backend,
    )
    if check == "sync":
        flags.check_flags()
    return loss.reshape(shape) if reduction == "none" else loss


def shifted(op: str, target: Tensor, token_weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """Each position's target is the next one's. The hidden states stay where they are, so that nothing is copied."""
    if target.dim() < 2:
        raise ValueError(checks.wrong(op, "target", target, "(B, S) with shift=True"))
    last = target.new_full((*target.shape[:-1], 1), ignore_index)
    if token_weight is not None:
        token_weight = torch.cat((token_weight[..., 1:], torch.zeros_like(token_weight[..., :1])), -1)
    return torch.cat((target[..., 1:], last[..., : target.shape[-1]]), -1), token_weight


def check_loss_options(op: str, label_smoothing: float, z_loss: float, softcap: float | None) -> None:
    """ValueError for an option of the loss, or a pair of them, that no function takes."""
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"fusedce.{op}: argument 'label_smoothing' is {label_smoothing}; expected 0 to 1")
    if not 0.0 <= z_loss < float("inf"):
        raise ValueError(f"fusedce.{op}: argument 'z_loss' is {z_loss}; expected a number from 0")
    if label_smoothing and softcap is not None:
        raise ValueError(
            f"fusedce.{op}: arguments 'label_smoothing' and 'softcap' do not go together: the mean of capped logits is "
            "no product with one vector"
        )
