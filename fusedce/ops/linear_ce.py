"""linear_ce_sum and linear_ce as torch ops: implementation by the chosen backend, fake, autograd."""

import torch
from torch import Tensor

from fusedce import flags
from fusedce.ops import registry
from fusedce.ops.linear_logprob import (
    check_sizes,
    given_away,
    gradients_fake,
    logit_options,
    no_double_backward,
    result_dtype,
)
from fusedce.ops.schema import LIB, NAMESPACE
from fusedce.options import Upstream


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
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    flags.raise_pending()
    check_sizes(hidden, weight, target, bias, row_temperature)
    options = logit_options(ignore_index, temperature, softcap, row_temperature)
    choice = registry.choose("linear_ce_sum", backend, hidden.device, hidden.dtype)
    flags.report_outside("linear_ce_sum", "target", target, weight.shape[0], ignore_index)
    d_logprob = -nll_weight

    def upstream_of(start: int, stop: int, logprob: Tensor, entropy: Tensor, lse: Tensor) -> Upstream:
        rows = slice(start, stop)
        d_lse = None if lse_weight is None else lse_weight[rows]
        if square_weight is not None:
            slope = 2.0 * square_weight[rows] * lse
            d_lse = slope if d_lse is None else d_lse + slope
        return Upstream(d_logprob[rows], None, d_lse)

    run = registry.function(choice, "linear_fused")
    logprob, _, lse, *grads = run(hidden, weight, target, bias, options, mask, upstream_of, False)
    # In fp64: a sum over the batch would otherwise be the least exact thing here.
    loss = d_logprob.double() @ logprob.double()
    if lse_weight is not None:
        loss = loss + lse_weight.double() @ lse.double()
    if square_weight is not None:
        loss = loss + square_weight.double() @ lse.double().square()
    return loss.to(logprob.dtype), *grads


def _ce_sum_backward(
    d_loss: Tensor, d_hidden: Tensor, d_weight: Tensor, d_bias: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    choice = registry.choose("linear_ce_sum", backend, d_hidden.device, d_hidden.dtype)
    return registry.function(choice, "linear_ce_sum_backward")(d_loss, d_hidden, d_weight, d_bias)


def _ce(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    row_temperature: Tensor | None = None,
    token_weight: Tensor | None = None,
    class_weight: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Composite of linear_ce_sum, which has its gradients ready, where one scalar is differentiated; else of
    linear_logprob."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"fusedce.linear_ce: argument 'reduction' is {reduction!r}; expected one of none, mean, sum")
    if label_smoothing and softcap:
        raise ValueError("fusedce.linear_ce: arguments 'label_smoothing' and 'softcap' do not go together")
    kept = target != ignore_index
    row_weight = kept.to(result_dtype(hidden))
    if token_weight is not None:
        row_weight = torch.where(kept, token_weight.detach().to(row_weight.dtype), 0.0)
    of_target, smoothed = row_weight, row_weight * label_smoothing
    if class_weight is not None:
        class_weight = class_weight.detach().to(row_weight.dtype)
        # clamp: a label out of range is reported, and its row is NaN already
        of_target = row_weight * class_weight[target.clamp(0, weight.shape[0] - 1)]
    if reduction == "mean":
        # All rows ignored: loss 0 and gradients 0, not 0/0.
        total = of_target.sum()
        inverse = 1.0 / torch.where(total == 0, 1.0, total)
        row_weight, of_target, smoothed = row_weight * inverse, of_target * inverse, smoothed * inverse
    nll_weight = of_target * (1.0 - label_smoothing)
    mean_class = 1.0 if class_weight is None else class_weight.mean()
    lse_weight = smoothed * mean_class if label_smoothing else None
    square_weight = row_weight * z_loss if z_loss else None
    options = {"ignore_index": ignore_index, "temperature": temperature, "softcap": softcap, "backend": backend}
    mask = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in (hidden, weight, bias)]
    if reduction != "none" and any(mask):
        loss = torch.ops.fusedce.linear_ce_sum(
            hidden, weight, target, bias, row_temperature, nll_weight, lse_weight, square_weight, mask=mask, **options
        )[0]
    else:
        logprob, _, lse, _ = torch.ops.fusedce.linear_logprob(
            hidden, weight, target, bias, row_temperature, with_entropy=False, **options
        )
        loss = -nll_weight * logprob
        loss = loss if lse_weight is None else loss + lse_weight * lse
        loss = loss if square_weight is None else loss + square_weight * lse * lse
        loss = loss if reduction == "none" else loss.sum(dtype=torch.float64).to(loss.dtype)
    if label_smoothing:
        inverse_temperature = 1.0 / (temperature if row_temperature is None else row_temperature.detach())
        uniform = smoothed * inverse_temperature * _mean_logit(hidden, weight, bias, class_weight, kept)
        loss = loss - (uniform if reduction == "none" else uniform.sum(dtype=torch.float64).to(uniform.dtype))
    return loss


def _mean_logit(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, class_weight: Tensor | None, kept: Tensor
) -> Tensor:
    """(N,): the plain logits' mean over the vocabulary, each times its class weight: one product with one vector."""
    dtype, vocab = result_dtype(hidden), weight.shape[0]
    if class_weight is None:
        word, offset = weight.sum(0, dtype=dtype), 0.0 if bias is None else bias.sum(dtype=dtype)
    else:
        word = (class_weight[:, None] * weight).sum(0, dtype=dtype)
        offset = 0.0 if bias is None else (class_weight * bias).sum(dtype=dtype)
    # Rows that take no part may hold NaN or inf.
    rows = torch.where(kept[:, None], hidden, 0.0)
    return ((rows * word).sum(1, dtype=dtype) + offset) / vocab


for _key in ("CPU", "CUDA"):
    LIB.impl("linear_ce_sum", _ce_sum, _key)
    LIB.impl("linear_ce_sum_backward", _ce_sum_backward, _key)
LIB.impl("linear_ce", _ce, "CompositeImplicitAutograd")


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
    **_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_sizes(hidden, weight, target, bias, row_temperature)
    return hidden.new_empty((), dtype=result_dtype(hidden)), *gradients_fake(hidden, weight, mask)


@torch.library.register_fake(f"{NAMESPACE}::linear_ce_sum_backward", lib=LIB)
def _ce_sum_backward_fake(
    d_loss: Tensor, d_hidden: Tensor, d_weight: Tensor, d_bias: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(d_hidden), torch.empty_like(d_weight), torch.empty_like(d_bias)


def _ce_sum_setup(ctx, inputs, keyword_only_inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, *grads = output
    ctx.mark_non_differentiable(*grads)
    # Else autograd makes zeros for the gradients of these gradients, d_weight's size among them.
    ctx.set_materialize_grads(False)
    ctx.mask, ctx.backend = keyword_only_inputs["mask"], keyword_only_inputs["backend"]
    ctx.save_for_backward(*grads)


def _ce_sum_autograd(ctx, d_loss, *_):  # type: ignore[no-untyped-def]
    if torch.is_grad_enabled():
        # create_graph=True: the saved gradients are constants to autograd, which would take their slope for 0.
        raise RuntimeError("fusedce.linear_ce_sum: double backward is not supported")
    if d_loss is None:
        return (None,) * 8
    grads = torch.ops.fusedce.linear_ce_sum_backward(d_loss, *ctx.saved_tensors, ctx.backend)
    d_hidden, d_weight, d_bias = given_away(grads, ctx.mask)
    return d_hidden, d_weight, None, d_bias, None, None, None, None


torch.library.register_autograd(f"{NAMESPACE}::linear_ce_sum", _ce_sum_autograd, setup_context=_ce_sum_setup, lib=LIB)
torch.library.register_autograd(f"{NAMESPACE}::linear_ce_sum_backward", no_double_backward, lib=LIB)
