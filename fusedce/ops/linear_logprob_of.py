"""linear_logprob_of as a torch op: implementation by the chosen backend, fake, autograd."""

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


def _logprob_of(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None = None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float = 0.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    flags.raise_pending()
    _check_ids(hidden, weight, ids, bias, row_temperature)
    options = logit_options(ignore_index, temperature, softcap, row_temperature)
    choice = registry.choose("linear_logprob_of", backend, hidden.device, hidden.dtype)
    report_outside(choice, "ids", ids.reshape(-1), weight.shape[0], ignore_index)
    return registry.function(choice, "linear_logprob_of")(hidden, weight, ids, bias, options)


def _logprob_of_backward(
    d_logprob: Tensor,
    d_lse: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    logprob: Tensor,
    target: Tensor,
    normalizer: Tensor,
    ignore_index: int,
    temperature: float,
    softcap: float,
    mask: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    choice = registry.choose("linear_logprob_of", backend, hidden.device, hidden.dtype)
    options = logit_options(ignore_index, temperature, softcap, row_temperature)
    run = registry.function(choice, "linear_logprob_of_backward")
    return run(d_logprob, d_lse, hidden, weight, ids, bias, logprob, target, normalizer, options, mask)


def _check_ids(
    hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, row_temperature: Tensor | None
) -> None:
    torch._check_value(
        ids.dim() == 2 and ids.shape[1] > 0,
        lambda: f"fusedce.linear_logprob_of: ids {tuple(ids.shape)} are not (N, K) with K from 1",
    )
    check_sizes(hidden, weight, ids[:, 0], bias, row_temperature)


for _key in ("CPU", "CUDA"):
    LIB.impl("linear_logprob_of", _logprob_of, _key)
    LIB.impl("linear_logprob_of_backward", _logprob_of_backward, _key)


@torch.library.register_fake(f"{NAMESPACE}::linear_logprob_of", lib=LIB)
def _logprob_of_fake(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_ids(hidden, weight, ids, bias, row_temperature)
    dtype, num_rows = result_dtype(hidden), hidden.shape[0]
    logprob, normalizer = hidden.new_empty(ids.shape, dtype=dtype), hidden.new_empty((num_rows, 2), dtype=dtype)
    return logprob, ids.new_empty(num_rows), normalizer


@torch.library.register_fake(f"{NAMESPACE}::linear_logprob_of_backward", lib=LIB)
def _logprob_of_backward_fake(
    d_logprob: Tensor,
    d_lse: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    logprob: Tensor,
    target: Tensor,
    normalizer: Tensor,
    ignore_index: int,
    temperature: float,
    softcap: float,
    mask: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return gradients_fake(hidden, weight, mask)


def _setup(ctx, inputs, keyword_only_inputs, output) -> None:  # type: ignore[no-untyped-def]
    logprob, target, normalizer = output
    ctx.mark_non_differentiable(target, normalizer)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, logprob, target, normalizer)
    ctx.options = keyword_only_inputs


def _autograd(ctx, d_logprob, *_):  # type: ignore[no-untyped-def]
    if d_logprob is None:
        return (None,) * 5
    needs, options, bias = ctx.needs_input_grad, ctx.options, ctx.saved_tensors[3]
    mask = [needs[0], needs[1], bias is not None and needs[3]]
    grads = torch.ops.fusedce.linear_logprob_of_backward(
        d_logprob, None, *ctx.saved_tensors, options["ignore_index"], options["temperature"], options["softcap"], mask,
        options["backend"],
    )  # fmt: skip
    d_hidden, d_weight, d_bias = given_away(grads, mask)
    return d_hidden, d_weight, None, d_bias, None


register_autograd("linear_logprob_of", _autograd, _setup)
register_autograd("linear_logprob_of_backward", no_double_backward("linear_logprob_of"))
