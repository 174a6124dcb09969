"""The weight's gradient into a tensor of the caller's: linear_logprob_into as a torch op, and what a loss needs of it.

Autograd gets no gradient of the weight; the backward adds it to main_grad. That is no saved tensor of autograd, because
another backward may add to it in between, and the caller may set it to zero.
"""

from typing import Any

import torch
from torch import Tensor

from fusedce.ops import registry
from fusedce.ops.gradients import given_away
from fusedce.ops.linear_logprob import gradients_fake, logit_options
from fusedce.ops.schema import LIB, NAMESPACE
from fusedce.options import Upstream, Wanted


def add_scaled(main_grad: Tensor, d_weight: Tensor, d_loss: Tensor) -> None:
    """main_grad += d_weight · d_loss (); a gradient without elements was not wanted."""
    if d_weight.numel():
        main_grad.addcmul_(d_weight, d_loss)


class CeSumInto(torch.autograd.Function):
    """linear_ce_sum as (loss, logprob, lse): its fp32 d_weight is kept, 4·V·D bytes, and added by the backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, main_grad, rows, options):  # type: ignore[no-untyped-def]
        """rows: target, row_temperature and the three weights."""
        check_main_grad(hidden, weight, main_grad)
        target, row_temperature, *weights = rows
        needs = ctx.needs_input_grad
        loss, d_hidden, d_weight, d_bias, logprob, lse = torch.ops.fusedce.linear_ce_sum(
            hidden, weight, target, bias, row_temperature, *weights, mask=[needs[0], needs[1], needs[2]],
            fp32_weight_grad=True, **options,
        )  # fmt: skip
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.mark_non_differentiable(logprob, lse)
        ctx.main_grad, ctx.backend = main_grad, options["backend"]
        return loss, logprob, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss, *_):  # type: ignore[no-untyped-def]
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        needs = ctx.needs_input_grad
        add_scaled(ctx.main_grad, d_weight, d_loss)
        nothing = d_hidden.new_empty(0)
        grads = torch.ops.fusedce.linear_ce_sum_backward(d_loss, d_hidden, nothing, d_bias, ctx.backend)
        hidden_grad, no_grad, bias_grad = given_away(grads, [needs[0], False, needs[2]])
        return hidden_grad, no_grad, bias_grad, None, None, None


class Deposit(torch.autograd.Function):
    """The weight as it is; its gradient goes to main_grad."""

    @staticmethod
    def forward(ctx, weight, main_grad):  # type: ignore[no-untyped-def]
        ctx.main_grad = main_grad
        return weight.view_as(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_weight):  # type: ignore[no-untyped-def]
        ctx.main_grad.add_(d_weight)
        return None, None


class _LogprobInto(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, bias, row_temperature, main_grad, options):  # type: ignore[no-untyped-def]
        results = torch.ops.fusedce.linear_logprob(hidden, weight, target, bias, row_temperature, **options)
        logprob, entropy, _, normalizer = results
        ctx.mark_non_differentiable(normalizer)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, target, bias, row_temperature, logprob, entropy, normalizer)
        ctx.main_grad, ctx.options = main_grad, options
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_logprob, d_entropy, d_lse, _):  # type: ignore[no-untyped-def]
        needs, options = ctx.needs_input_grad, ctx.options
        d_entropy = d_entropy if options["with_entropy"] else None
        d_hidden, d_bias = torch.ops.fusedce.linear_logprob_into_backward(
            ctx.main_grad, d_logprob, d_entropy, d_lse, *ctx.saved_tensors, options["ignore_index"],
            options["temperature"], options["softcap"], [needs[0], needs[1], needs[3]], options["backend"],
        )  # fmt: skip
        hidden_grad, bias_grad = given_away((d_hidden, d_bias), [needs[0], needs[3]])
        return hidden_grad, None, None, bias_grad, None, None, None


def _logprob_into(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    main_grad: Tensor,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float = 0.0,
    with_entropy: bool = True,
    backend: str = "auto",
) -> Any:
    check_main_grad(hidden, weight, main_grad)
    options = {
        "ignore_index": ignore_index,
        "temperature": temperature,
        "softcap": softcap,
        "with_entropy": with_entropy,
        "backend": backend,
    }
    return _LogprobInto.apply(hidden, weight, target, bias, row_temperature, main_grad, options)


def _logprob_into_backward(
    main_grad: Tensor,
    d_logprob: Tensor | None,
    d_entropy: Tensor | None,
    d_lse: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    logprob: Tensor,
    entropy: Tensor,
    normalizer: Tensor,
    ignore_index: int,
    temperature: float,
    softcap: float,
    mask: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor]:
    check_main_grad(hidden, weight, main_grad)
    choice = registry.choose("linear_logprob", backend, hidden.device, hidden.dtype)
    options = logit_options(ignore_index, temperature, softcap, row_temperature)
    wanted = Wanted(mask[0], mask[1], mask[2], True, main_grad if mask[1] else None)
    run = registry.function(choice, "linear_logprob_backward")
    d_hidden, d_weight, d_bias = run(
        Upstream(d_logprob, d_entropy, d_lse), hidden, weight, target, bias, logprob, entropy, normalizer, options,
        wanted,
    )  # fmt: skip
    if d_weight.numel():
        main_grad.add_(d_weight)
    return d_hidden, d_bias


def check_main_grad(hidden: Tensor, weight: Tensor, main_grad: Tensor) -> None:
    """What keeps a direct caller of `torch.ops` from a wrong sum; the whole set is in `functional`."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    torch._check_value(
        main_grad.shape == weight.shape and main_grad.dtype == dtype and main_grad.device == weight.device,
        lambda: f"fusedce: main_grad is not {dtype} of weight's shape {tuple(weight.shape)} beside it",
    )


for _key in ("CPU", "CUDA"):
    LIB.impl("linear_logprob_into_backward", _logprob_into_backward, _key)
LIB.impl("linear_logprob_into", _logprob_into, "CompositeImplicitAutograd")


@torch.library.register_fake(f"{NAMESPACE}::linear_logprob_into_backward", lib=LIB)
def _logprob_into_backward_fake(
    main_grad: Tensor,
    d_logprob: Tensor | None,
    d_entropy: Tensor | None,
    d_lse: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    logprob: Tensor,
    entropy: Tensor,
    normalizer: Tensor,
    ignore_index: int,
    temperature: float,
    softcap: float,
    mask: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor]:
    d_hidden, _, d_bias = gradients_fake(hidden, weight, mask)
    return d_hidden, d_bias
