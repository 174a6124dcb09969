"""The policy loss at three GEMMs: the user's own loss of per-token log-probs, differentiated while a chunk's logits are
at hand."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce import checks, flags
from fusedce.functional.main_grad import checked_main_grad, weight_into
from fusedce.functional.operands import check_options, head_operands, kept_temperature, row_temperature
from fusedce.ops import registry
from fusedce.ops.main_grad import add_scaled
from fusedce.ops.outside import report_outside
from fusedce.options import LogitOptions, Upstream, Wanted

__all__ = ["linear_policy_loss"]

LossFn = Callable[..., Tensor]


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    loss_fn: LossFn,
    *per_token: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    main_grad: Tensor | None = None,
    check: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """Σ over tokens of any loss of a token's own log-prob, with its gradients made in the same pass.

    loss = Σ_i loss_fn(logprob, [entropy,] *per_token)_i. A PPO, GRPO, DAPO or CISPO token's gradient depends on its own
    log-prob alone, so once a chunk of tokens has its log-probs, loss_fn is run on them and differentiated, and the
    chunk's gradients follow from logits that are still there. `linear_logprob` under the same loss makes the logits
    again in its backward.

    Args:
        hidden, weight, target, bias, temperature, softcap, ignore_index, vocab_size, check, backend: see
            `linear_logprob`.
        loss_fn: called with chunks, vectors of C tokens in order: logprob (C,) fp32, with_entropy also entropy (C,)
            fp32, then the chunk of each of per_token. Returns (C,) fp32, each token's loss, of its own numbers only:
            chunks are the backend's choice. Means over the batch, or over sequences, go into a per_token weight.
            Ignored tokens come with log-prob 0; what it returns for them is not counted.
        per_token: tensors of target's shape, any dtype; they get no gradient.
        main_grad: see `linear_cross_entropy`.
        with_entropy: whether loss_fn takes, and may differentiate, the entropy; then a fourth GEMM is run on Triton.

    Returns:
        () fp32 (fp64 for fp64), differentiable in hidden, weight and bias. Double backward raises RuntimeError.

    Raises: as `linear_logprob`, and ValueError where loss_fn's result is not (C,).

    Memory: as `linear_cross_entropy` with reduction "sum". Work: three times 2·N·D·V FLOP with bf16 operands.
    Deterministic, if loss_fn is. loss_fn is a Python function, so torch.compile breaks the graph here.
    """
    op = "linear_policy_loss"
    sizes, weight = weight_into(op, weight, main_grad)
    hidden, weight, bias = head_operands(op, ("hidden", "weight", "bias"), hidden, weight, target, bias, vocab_size)
    main_grad = checked_main_grad(op, main_grad, sizes, hidden, weight)
    check_options(op, softcap, ignore_index, check)
    scalar, rows = row_temperature(op, temperature, target)
    for position, tensor in enumerate(per_token):
        if not isinstance(tensor, Tensor) or tensor.shape != target.shape:
            raise ValueError(
                checks.wrong(op, f"per_token[{position}]", tensor, f"target's shape {tuple(target.shape)}")
            )
    rows = kept_temperature(rows, target, ignore_index)
    options = LogitOptions(ignore_index, scalar, float(softcap or 0.0), rows)
    numbers = tuple(tensor.detach().reshape(-1) for tensor in per_token)
    flat, target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    run = _Run(options, loss_fn, numbers, with_entropy, main_grad, backend)
    loss = _PolicyLoss.apply(flat, weight, target, bias, run)
    if check == "sync":
        flags.check_flags()
    return loss


class _Run(NamedTuple):
    """What `_PolicyLoss` takes beside the operands of the logits."""

    options: LogitOptions
    loss_fn: LossFn
    numbers: tuple[Tensor, ...]
    with_entropy: bool
    main_grad: Tensor | None
    backend: str


class _PolicyLoss(torch.autograd.Function):
    """Runs the backend's `linear_fused` with the loss's derivative as the upstream gradient of each chunk."""

    @staticmethod
    def forward(ctx, hidden, weight, target, bias, run):  # type: ignore[no-untyped-def]
        flags.raise_pending()
        options, with_entropy = run.options, run.with_entropy
        choice = registry.choose("linear_ce_sum", run.backend, hidden.device, hidden.dtype)
        report_outside(choice, "target", target, weight.shape[0], options.ignore_index, op="linear_policy_loss")
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
        losses: list[Tensor] = []

        def upstream_of(start: int, stop: int, logprob: Tensor, entropy: Tensor, _: Tensor) -> Upstream:
            part = [number[start:stop] for number in run.numbers]
            kept = target[start:stop] != options.ignore_index
            loss, d_logprob, d_entropy = derivatives(run.loss_fn, logprob, entropy, part, kept, with_entropy)
            losses.append(loss)
            return Upstream(d_logprob, d_entropy, None)

        fused = registry.function(choice, "linear_fused")
        wanted = Wanted(mask[0], mask[1], mask[2], run.main_grad is not None)
        _, _, _, *grads = fused(hidden, weight, target, bias, options, wanted, upstream_of, with_entropy)
        ctx.save_for_backward(*grads)
        ctx.choice, ctx.mask, ctx.main_grad = choice, mask, run.main_grad
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        return torch.stack(losses).sum() if losses else hidden.new_zeros((), dtype=dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss):  # type: ignore[no-untyped-def]
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        mask = list(ctx.mask)
        if ctx.main_grad is not None:
            add_scaled(ctx.main_grad, d_weight, d_loss)
            d_weight, mask[1] = d_weight.new_empty(0), False
        grads = registry.function(ctx.choice, "linear_ce_sum_backward")(d_loss, d_hidden, d_weight, d_bias)
        d_hidden, d_weight, d_bias = (g if wanted else None for g, wanted in zip(grads, mask, strict=True))
        return d_hidden, d_weight, None, d_bias, None


def derivatives(
    loss_fn: LossFn, logprob: Tensor, entropy: Tensor, per_token: list[Tensor], kept: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sum of loss_fn over the kept tokens, and its derivatives in log-prob and entropy."""
    leaves = [t.detach().requires_grad_() for t in ((logprob, entropy) if with_entropy else (logprob,))]
    with torch.enable_grad():
        rows: Any = loss_fn(*leaves, *per_token)
        if not isinstance(rows, Tensor) or rows.shape != logprob.shape:
            raise ValueError(
                checks.wrong("linear_policy_loss", "loss_fn's result", rows, f"(C,) = ({logprob.shape[0]},)")
            )
        loss = torch.where(kept, rows, 0.0).sum()
    if not loss.requires_grad:
        return loss, None, None
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.detach(), grads[0], grads[1] if with_entropy else None
