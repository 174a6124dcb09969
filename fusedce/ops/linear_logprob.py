"""linear_logprob and linear_parts as torch ops: implementation by the chosen backend, fake, autograd."""

import math

import torch
from torch import Tensor

from fusedce import flags
from fusedce.ops import registry
from fusedce.ops.autograd import register_autograd
from fusedce.ops.gradients import given_away, no_double_backward
from fusedce.ops.outside import report_outside
from fusedce.ops.schema import LIB, NAMESPACE
from fusedce.options import LogitOptions, Upstream


def _logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None = None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float = 0.0,
    with_entropy: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    flags.raise_pending()
    check_sizes(hidden, weight, target, bias, row_temperature)
    options = logit_options(ignore_index, temperature, softcap, row_temperature)
    choice = registry.choose("linear_logprob", backend, hidden.device, hidden.dtype)
    report_outside(choice, "target", target, weight.shape[0], ignore_index)
    run = registry.function(choice, "linear_logprob")
    return run(hidden, weight, target, bias, options, with_entropy)


def _parts(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None = None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float = 0.0,
    with_entropy: bool = True,
    backend: str = "auto",
) -> Tensor:
    check_sizes(hidden, weight, target, bias, row_temperature)
    options = logit_options(ignore_index, temperature, softcap, row_temperature)
    choice = registry.choose("linear_parts", backend, hidden.device, hidden.dtype)
    # Who merges the parts knows their gradient; through them alone there is none.
    with torch.no_grad():
        return registry.function(choice, "linear_parts")(hidden, weight, target, bias, options, with_entropy)


def _logprob_backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    choice = registry.choose("linear_logprob", backend, hidden.device, hidden.dtype)
    run = registry.function(choice, "linear_logprob_backward")
    upstream, options = (
        Upstream(d_logprob, d_entropy, d_lse),
        logit_options(ignore_index, temperature, softcap, row_temperature),
    )
    return run(upstream, hidden, weight, target, bias, logprob, entropy, normalizer, options, mask)


def logit_options(
    ignore_index: int, temperature: float, softcap: float, row_temperature: Tensor | None
) -> LogitOptions:
    """The record that backends take. ValueError for numbers that no softmax has."""
    torch._check_value(
        0 < temperature < math.inf and 0 <= softcap < math.inf,
        lambda: (
            f"fusedce.linear_logprob: temperature is {temperature} and softcap {softcap}; expected above 0 and from 0"
        ),
    )
    return LogitOptions(ignore_index, temperature, softcap, row_temperature)


def check_sizes(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, row_temperature: Tensor | None
) -> None:
    """What keeps a direct caller of `torch.ops` from reading out of bounds; the whole set is in `functional`."""
    check_head_sizes("linear_logprob", hidden, weight, bias)
    for name, rows in (("target", target), ("row_temperature", row_temperature)):
        torch._check_value(
            rows is None or tuple(rows.shape) == (hidden.shape[0],),
            lambda name=name, rows=rows: (
                f"fusedce.linear_logprob: {name} has shape {tuple(rows.shape)}; expected ({hidden.shape[0]},)"
            ),
        )
    torch._check_type(
        target.dtype == torch.int64, lambda: f"fusedce.linear_logprob: target is {target.dtype}; expected torch.int64"
    )
    _check_devices("linear_logprob", hidden, target, row_temperature)


def check_head_sizes(op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """`check_sizes` of the operands of the logits alone."""
    torch._check_value(
        hidden.dim() == 2 and weight.dim() == 2 and hidden.shape[1] == weight.shape[1],
        lambda: (
            f"fusedce.{op}: hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} are not (N, D) and (V, D)"
        ),
    )
    torch._check_value(weight.numel() > 0, lambda: f"fusedce.{op}: weight {tuple(weight.shape)} is empty")
    torch._check_value(
        bias is None or tuple(bias.shape) == (weight.shape[0],),
        lambda: f"fusedce.{op}: bias is not ({weight.shape[0]},)",
    )
    same = hidden.dtype == weight.dtype and (bias is None or bias.dtype == hidden.dtype)
    torch._check_type(
        same and hidden.dtype.is_floating_point,
        lambda: f"fusedce.{op}: hidden is {hidden.dtype}, weight {weight.dtype}; expected one floating dtype",
    )
    _check_devices(op, hidden, weight, bias)


def _check_devices(op: str, hidden: Tensor, *others: Tensor | None) -> None:
    given = [t for t in others if t is not None]
    torch._check_value(
        all(t.device == hidden.device for t in given),
        lambda: f"fusedce.{op}: hidden is on {hidden.device}, the others on {', '.join(str(t.device) for t in given)}",
    )


def result_dtype(hidden: Tensor) -> torch.dtype:
    """Of losses and log-probs: fp32, fp64 for fp64."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


for _key in ("CPU", "CUDA"):
    LIB.impl("linear_logprob", _logprob, _key)
    LIB.impl("linear_parts", _parts, _key)
    LIB.impl("linear_logprob_backward", _logprob_backward, _key)


@torch.library.register_fake(f"{NAMESPACE}::linear_logprob", lib=LIB)
def _logprob_fake(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None = None,
    *,
    with_entropy: bool = True,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_sizes(hidden, weight, target, bias, row_temperature)
    dtype, num_rows = result_dtype(hidden), hidden.shape[0]
    logprob, lse = (hidden.new_empty(num_rows, dtype=dtype) for _ in range(2))
    entropy = hidden.new_empty(num_rows if with_entropy else 0, dtype=dtype)
    return logprob, entropy, lse, hidden.new_empty((num_rows, 2), dtype=dtype)


@torch.library.register_fake(f"{NAMESPACE}::linear_parts", lib=LIB)
def _parts_fake(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None = None,
    **_: object,
) -> Tensor:
    check_sizes(hidden, weight, target, bias, row_temperature)
    return hidden.new_empty((hidden.shape[0], 4), dtype=result_dtype(hidden))


def gradients_fake(hidden: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """d_hidden, d_weight, d_bias as fakes; those that `mask` does not want are empty."""
    return (
        hidden.new_empty(hidden.shape if mask[0] else (0,)),
        weight.new_empty(weight.shape if mask[1] else (0,)),
        weight.new_empty(weight.shape[:1] if mask[2] else (0,)),
    )


@torch.library.register_fake(f"{NAMESPACE}::linear_logprob_backward", lib=LIB)
def _logprob_backward_fake(
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
) -> tuple[Tensor, Tensor, Tensor]:
    return gradients_fake(hidden, weight, mask)


def _logprob_setup(ctx, inputs, keyword_only_inputs, output) -> None:  # type: ignore[no-untyped-def]
    hidden, weight, target, bias, row_temperature = inputs
    logprob, entropy, _, normalizer = output
    ctx.mark_non_differentiable(normalizer)
    # None where a result is not used: the entropy's gradient costs registers and time.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, target, bias, row_temperature, logprob, entropy, normalizer)
    ctx.options = keyword_only_inputs


def _logprob_autograd(ctx, d_logprob, d_entropy, d_lse, _):  # type: ignore[no-untyped-def]
    hidden, weight, target, bias, row_temperature, logprob, entropy, normalizer = ctx.saved_tensors
    needs = ctx.needs_input_grad
    mask = [needs[0], needs[1], bias is not None and needs[3]]
    options = ctx.options
    if not options["with_entropy"]:
        d_entropy = None
    grads = torch.ops.fusedce.linear_logprob_backward(
        d_logprob, d_entropy, d_lse, hidden, weight, target, bias, row_temperature, logprob, entropy, normalizer,
        options["ignore_index"], options["temperature"], options["softcap"], mask, options["backend"],
    )  # fmt: skip
    d_hidden, d_weight, d_bias = given_away(grads, mask)
    return d_hidden, d_weight, None, d_bias, None


register_autograd("linear_logprob", _logprob_autograd, _logprob_setup)
register_autograd("linear_logprob_backward", no_double_backward("linear_logprob"))
