"""linear_ce_sum as a torch op: implementation by the chosen backend, fake, autograd."""

import torch
from torch import Tensor

from fusedce import flags
from fusedce.ops import registry
from fusedce.ops.autograd import register_autograd
from fusedce.ops.gradients import given_away, no_double_backward
from fusedce.ops.linear_logprob import (
    check_sizes,
    gradients_fake,
    logit_options,
    result_dtype,
)
from fusedce.ops.outside import report_outside
from fusedce.ops.schema import LIB, NAMESPACE
from fusedce.options import Upstream, Wanted


def _ce_sum(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    nll_weight: Tensor,
    lse_weight: Tensor | None,
    square_weight: Tensor | None,
    *,
    ignore_index: int,
    temperature: float,
    softcap: float,
    mask: list[bool],
    fp32_weight_grad: bool = False,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    flags.raise_pending()
    check_sizes(hidden, weight, target, bias, row_temperature)
    options = logit_options(ignore_index, temperature, softcap, row_temperature)
    choice = registry.choose("linear_ce_sum", backend, hidden.device, hidden.dtype)
    report_outside(choice, "target", target, weight.shape[0], ignore_index)
    d_logprob = -nll_weight

    def upstream_of(start: int, stop: int, logprob: Tensor, entropy: Tensor, lse: Tensor) -> Upstream:
        rows = slice(start, stop)
        d_lse = None if lse_weight is None else lse_weight[rows]
        if square_weight is not None:
            slope = 2.0 * square_weight[rows] * lse
            d_lse = slope if d_lse is None else d_lse + slope
        return Upstream(d_logprob[rows], None, d_lse)

    run = registry.function(choice, "linear_fused")
    wanted = Wanted(mask[0], mask[1], mask[2], fp32_weight_grad)
    logprob, _, lse, *grads = run(hidden, weight, target, bias, options, wanted, upstream_of, False)
    if fp32_weight_grad:
        grads[1] = grads[1].to(logprob.dtype)
    # In fp64: a sum over the batch would otherwise be the least exact thing here.
    loss = d_logprob.double() @ logprob.double()
    if lse_weight is not None:
        loss = loss + lse_weight.double() @ lse.double()
    if square_weight is not None:
        loss = loss + square_weight.double() @ lse.double().square()
    return loss.to(logprob.dtype), *grads, logprob, lse


def _ce_sum_backward(
    d_loss: Tensor, d_hidden: Tensor, d_weight: Tensor, d_bias: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    choice = registry.choose("linear_ce_sum", backend, d_hidden.device, d_hidden.dtype)
    return registry.function(choice, "linear_ce_sum_backward")(d_loss, d_hidden, d_weight, d_bias)


for _key in ("CPU", "CUDA"):
    LIB.impl("linear_ce_sum", _ce_sum, _key)
    LIB.impl("linear_ce_sum_backward", _ce_sum_backward, _key)


@torch.library.register_fake(f"{NAMESPACE}::linear_ce_sum", lib=LIB)
def _ce_sum_fake(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    nll_weight: Tensor,
    lse_weight: Tensor | None,
    square_weight: Tensor | None,
    *,
    mask: list[bool],
    fp32_weight_grad: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_sizes(hidden, weight, target, bias, row_temperature)
    loss, dtype = hidden.new_empty((), dtype=result_dtype(hidden)), result_dtype(hidden)
    d_hidden, d_weight, d_bias = gradients_fake(hidden, weight, mask)
    d_weight = torch.empty_like(d_weight, dtype=dtype) if fp32_weight_grad else d_weight
    logprob, lse = (hidden.new_empty(hidden.shape[0], dtype=dtype) for _ in range(2))
    return loss, d_hidden, d_weight, d_bias, logprob, lse


@torch.library.register_fake(f"{NAMESPACE}::linear_ce_sum_backward", lib=LIB)
def _ce_sum_backward_fake(
    d_loss: Tensor, d_hidden: Tensor, d_weight: Tensor, d_bias: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(d_hidden), torch.empty_like(d_weight), torch.empty_like(d_bias)


def _ce_sum_setup(ctx, inputs, keyword_only_inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, *grads, logprob, lse = output
    ctx.mark_non_differentiable(*grads, logprob, lse)
    # Else autograd makes zeros of the gradients' size, as the upstream gradients of what nobody differentiates.
    ctx.set_materialize_grads(False)
    ctx.mask, ctx.backend = keyword_only_inputs["mask"], keyword_only_inputs["backend"]
    ctx.save_for_backward(*grads)


def _ce_sum_autograd(ctx, d_loss, *_):  # type: ignore[no-untyped-def]
    if torch.is_grad_enabled():
        # create_graph=True: the saved gradients are constants to autograd, which would take their slope for 0.
        no_double_backward("linear_ce_sum")(ctx)
    if d_loss is None:
        return (None,) * 8
    grads = torch.ops.fusedce.linear_ce_sum_backward(d_loss, *ctx.saved_tensors, ctx.backend)
    d_hidden, d_weight, d_bias = given_away(grads, ctx.mask)
    return d_hidden, d_weight, None, d_bias, None, None, None, None


register_autograd("linear_ce_sum", _ce_sum_autograd, _ce_sum_setup)
register_autograd("linear_ce_sum_backward", no_double_backward("linear_ce_sum"))
