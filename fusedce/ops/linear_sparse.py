"""linear_logprob_sparse as a torch op: linear_logprob with a backward that leaves out what does not count."""

import torch
from torch import Tensor

from fusedce import budget, flags
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
from fusedce.options import Upstream


def _logprob_sparse(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None = None,
    certificate: Tensor | None = None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float = 0.0,
    with_entropy: bool = True,
    gradient_budget: float = 0.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    flags.raise_pending()
    _check(hidden, weight, target, bias, row_temperature, certificate, gradient_budget)
    options = logit_options(ignore_index, temperature, softcap, row_temperature)
    choice = registry.choose("linear_logprob_sparse", backend, hidden.device, hidden.dtype)
    report_outside(choice, "target", target, weight.shape[0], ignore_index)
    run = registry.function(choice, "linear_logprob_sparse")
    return run(hidden, weight, target, bias, options, with_entropy, gradient_budget)


def _logprob_sparse_backward(
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
    mass: Tensor,
    ignore_index: int,
    temperature: float,
    softcap: float,
    gradient_budget: float,
    mask: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    choice = registry.choose("linear_logprob_sparse", backend, hidden.device, hidden.dtype)
    run = registry.function(choice, "linear_logprob_sparse_backward")
    upstream = Upstream(d_logprob, d_entropy, d_lse)
    options = logit_options(ignore_index, temperature, softcap, row_temperature)
    saved = (hidden, weight, target, bias, logprob, entropy, normalizer, mass)
    return run(upstream, *saved, options, gradient_budget, mask)


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    certificate: Tensor | None,
    gradient_budget: float,
) -> None:
    check_sizes(hidden, weight, target, bias, row_temperature)
    torch._check_value(
        0 <= gradient_budget < 1,
        lambda: f"fusedce.linear_logprob: gradient_budget is {gradient_budget}; expected from 0 to below 1",
    )
    torch._check_value(
        certificate is None or (tuple(certificate.shape) == (4,) and certificate.dtype == torch.float32),
        lambda: "fusedce.linear_logprob: certificate is not (4,) fp32",
    )


for _key in ("CPU", "CUDA"):
    LIB.impl("linear_logprob_sparse", _logprob_sparse, _key)
    LIB.impl("linear_logprob_sparse_backward", _logprob_sparse_backward, _key)


@torch.library.register_fake(f"{NAMESPACE}::linear_logprob_sparse", lib=LIB)
def _logprob_sparse_fake(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None = None,
    certificate: Tensor | None = None,
    *,
    with_entropy: bool = True,
    gradient_budget: float = 0.0,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check(hidden, weight, target, bias, row_temperature, certificate, gradient_budget)
    dtype, num_rows = result_dtype(hidden), hidden.shape[0]
    logprob, lse = (hidden.new_empty(num_rows, dtype=dtype) for _ in range(2))
    entropy = hidden.new_empty(num_rows if with_entropy else 0, dtype=dtype)
    normalizer = hidden.new_empty((num_rows, 2), dtype=dtype)
    shape = (budget.num_tiles(weight.shape[0]), num_rows) if gradient_budget else (0, 0)
    return logprob, entropy, lse, normalizer, hidden.new_empty(shape, dtype=torch.bfloat16)


@torch.library.register_fake(f"{NAMESPACE}::linear_logprob_sparse_backward", lib=LIB)
def _logprob_sparse_backward_fake(
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
    mass: Tensor,
    ignore_index: int,
    temperature: float,
    softcap: float,
    gradient_budget: float,
    mask: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *gradients_fake(hidden, weight, mask), hidden.new_empty(4, dtype=torch.float32)


def _setup(ctx, inputs, keyword_only_inputs, output) -> None:  # type: ignore[no-untyped-def]
    hidden, weight, target, bias, row_temperature, _ = inputs
    logprob, entropy, _, normalizer, mass = output
    ctx.mark_non_differentiable(normalizer, mass)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, target, bias, row_temperature, logprob, entropy, normalizer, mass)
    ctx.options = keyword_only_inputs


def _autograd(ctx, d_logprob, d_entropy, d_lse, *_):  # type: ignore[no-untyped-def]
    needs, options = ctx.needs_input_grad, ctx.options
    mask = [needs[0], needs[1], ctx.saved_tensors[3] is not None and needs[3]]
    if not options["with_entropy"]:
        d_entropy = None
    grads = torch.ops.fusedce.linear_logprob_sparse_backward(
        d_logprob, d_entropy, d_lse, *ctx.saved_tensors, options["ignore_index"], options["temperature"],
        options["softcap"], options["gradient_budget"], mask, options["backend"],
    )  # fmt: skip
    d_hidden, d_weight, d_bias, certificate = given_away(grads, [*mask, needs[5]])
    return d_hidden, d_weight, None, d_bias, None, certificate


register_autograd("linear_logprob_sparse", _autograd, _setup)
register_autograd("linear_logprob_sparse_backward", no_double_backward("linear_logprob"))
