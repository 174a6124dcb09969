"""linear_ce and linear_logprob as torch ops: implementation by the chosen backend, fake, autograd."""

import math

import torch
from torch import Tensor

from fusedce import flags
from fusedce.ops import registry
from fusedce.ops.schema import LIB, NAMESPACE
from fusedce.options import LogitOptions, Upstream


def _logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float = 0.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    flags.raise_pending()
    _check_sizes(hidden, weight, target, bias)
    torch._check_value(
        0 < temperature < math.inf and 0 <= softcap < math.inf,
        lambda: (
            f"fusedce.linear_logprob: temperature is {temperature} and softcap {softcap}; expected above 0 and from 0"
        ),
    )
    choice = registry.choose("linear_logprob", backend, hidden.device, hidden.dtype)
    flags.report_outside("linear_logprob", "target", target, weight.shape[0], ignore_index)
    run = registry.function(choice, "linear_logprob")
    return run(hidden, weight, target, bias, LogitOptions(ignore_index, temperature, softcap))


def _logprob_backward(
    d_logprob: Tensor,
    d_entropy: Tensor,
    d_lse: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
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
    upstream, options = Upstream(d_logprob, d_entropy, d_lse), LogitOptions(ignore_index, temperature, softcap)
    return run(upstream, hidden, weight, target, bias, entropy, normalizer, options, mask)


def _check_sizes(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    """What keeps a direct caller of `torch.ops` from reading out of bounds; the whole set is in `functional`."""
    torch._check_value(
        hidden.dim() == 2 and weight.dim() == 2 and hidden.shape[1] == weight.shape[1],
        lambda: (
            f"fusedce.linear_logprob: hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} are not "
            "(N, D) and (V, D)"
        ),
    )
    torch._check_value(weight.numel() > 0, lambda: f"fusedce.linear_logprob: weight {tuple(weight.shape)} is empty")
    torch._check_value(
        tuple(target.shape) == (hidden.shape[0],),
        lambda: f"fusedce.linear_logprob: target has shape {tuple(target.shape)}; expected ({hidden.shape[0]},)",
    )
    torch._check_value(
        bias is None or tuple(bias.shape) == (weight.shape[0],),
        lambda: f"fusedce.linear_logprob: bias is not ({weight.shape[0]},)",
    )
    torch._check_type(
        target.dtype == torch.int64, lambda: f"fusedce.linear_logprob: target is {target.dtype}; expected torch.int64"
    )
    same = hidden.dtype == weight.dtype and (bias is None or bias.dtype == hidden.dtype)
    torch._check_type(
        same and hidden.dtype.is_floating_point,
        lambda: f"fusedce.linear_logprob: hidden is {hidden.dtype}, weight {weight.dtype}; expected one floating dtype",
    )
    tensors = (weight, target) if bias is None else (weight, target, bias)
    torch._check_value(
        all(t.device == hidden.device for t in tensors),
        lambda: (
            f"fusedce.linear_logprob: hidden is on {hidden.device}, the others on "
            f"{', '.join(str(t.device) for t in tensors)}"
        ),
    )


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
    backend: str = "auto",
) -> Tensor:
    """Composite: autograd and compile see linear_logprob and a reduction of N numbers."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"fusedce.linear_ce: argument 'reduction' is {reduction!r}; expected one of none, mean, sum")
    logprob, _, _, _ = torch.ops.fusedce.linear_logprob(
        hidden,
        weight,
        target,
        bias,
        ignore_index=ignore_index,
        temperature=temperature,
        softcap=softcap,
        backend=backend,
    )
    if reduction == "none":
        return -logprob
    total = -logprob.sum()
    if reduction == "sum":
        return total
    # All rows ignored: loss 0 and gradients 0, not 0/0.
    return total / (target != ignore_index).sum().clamp(min=1)


for _key in ("CPU", "CUDA"):
    LIB.impl("linear_logprob", _logprob, _key)
    LIB.impl("linear_logprob_backward", _logprob_backward, _key)
LIB.impl("linear_ce", _ce, "CompositeImplicitAutograd")


@torch.library.register_fake(f"{NAMESPACE}::linear_logprob", lib=LIB)
def _logprob_fake(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_sizes(hidden, weight, target, bias)
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logprob, entropy, lse = (hidden.new_empty(hidden.shape[0], dtype=dtype) for _ in range(3))
    return logprob, entropy, lse, hidden.new_empty((hidden.shape[0], 2), dtype=dtype)


@torch.library.register_fake(f"{NAMESPACE}::linear_logprob_backward", lib=LIB)
def _logprob_backward_fake(
    d_logprob: Tensor,
    d_entropy: Tensor,
    d_lse: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    entropy: Tensor,
    normalizer: Tensor,
    ignore_index: int,
    temperature: float,
    softcap: float,
    mask: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if mask[0] else (0,)),
        weight.new_empty(weight.shape if mask[1] else (0,)),
        weight.new_empty(weight.shape[:1] if mask[2] else (0,)),
    )


def _setup_context(ctx, inputs, keyword_only_inputs, output) -> None:  # type: ignore[no-untyped-def]
    hidden, weight, target, bias = inputs
    _, entropy, _, normalizer = output
    ctx.mark_non_differentiable(normalizer)
    ctx.save_for_backward(hidden, weight, target, bias, entropy, normalizer)
    ctx.options = keyword_only_inputs


def _logprob_autograd(ctx, d_logprob, d_entropy, d_lse, _):  # type: ignore[no-untyped-def]
    hidden, weight, target, bias, entropy, normalizer = ctx.saved_tensors
    needs = ctx.needs_input_grad
    mask = [needs[0], needs[1], bias is not None and needs[3]]
    options = ctx.options
    grads = torch.ops.fusedce.linear_logprob_backward(
        d_logprob,
        d_entropy,
        d_lse,
        hidden,
        weight,
        target,
        bias,
        entropy,
        normalizer,
        options["ignore_index"],
        options["temperature"],
        options["softcap"],
        mask,
        options["backend"],
    )
    d_hidden, d_weight, d_bias = (grad if wanted else None for grad, wanted in zip(grads, mask, strict=True))
    return d_hidden, d_weight, None, d_bias


def _no_double_backward(ctx, *_):  # type: ignore[no-untyped-def]
    raise RuntimeError("fusedce.linear_logprob: double backward is not supported")


torch.library.register_autograd(
    f"{NAMESPACE}::linear_logprob", _logprob_autograd, setup_context=_setup_context, lib=LIB
)
torch.library.register_autograd(f"{NAMESPACE}::linear_logprob_backward", _no_double_backward, lib=LIB)
