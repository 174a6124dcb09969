"""The mixture-of-experts ops on rows: implementation by the chosen backend, fakes, autograd."""

import torch
from torch import Tensor

from fusedce import flags
from fusedce.ops import registry
from fusedce.ops.autograd import register_autograd
from fusedce.ops.gradients import given_away, no_double_backward
from fusedce.ops.schema import LIB, NAMESPACE
from fusedce.options import ACTIVATIONS, SAVES, ExpertOptions


def _experts(
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    slot_row: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_main_grad: Tensor | None = None,
    down_main_grad: Tensor | None = None,
    *,
    activation: str = "swiglu",
    limit: float = 7.0,
    interleaved: bool = False,
    save: str = "pre_activation",
    combine: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    flags.raise_pending()
    tensors = (hidden, gate_up_proj, down_proj, top_k_weights, offsets, row_slot, slot_row, gate_up_bias, down_bias)
    _check_experts(*tensors, gate_up_main_grad, down_main_grad, activation, save)
    choice = registry.choose("moe_experts", backend, hidden.device, hidden.dtype)
    run = registry.function(choice, "moe_experts")
    return run(*tensors, ExpertOptions(activation, limit, interleaved, save, combine))


def _experts_backward(
    d_rows: Tensor,
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    slot_row: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    pre_act: Tensor,
    activation: str,
    limit: float,
    interleaved: bool,
    save: str,
    combine: bool,
    mask: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    choice = registry.choose("moe_experts", backend, hidden.device, hidden.dtype)
    run = registry.function(choice, "moe_experts_backward")
    tensors = (hidden, gate_up_proj, down_proj, top_k_weights, offsets, row_slot, slot_row, gate_up_bias, down_bias)
    settings = ExpertOptions(activation, limit, interleaved, save, combine)
    return run(d_rows, *tensors, pre_act, settings, mask)


def _experts_backward_into(
    d_rows: Tensor,
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    slot_row: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    pre_act: Tensor,
    activation: str,
    limit: float,
    interleaved: bool,
    save: str,
    combine: bool,
    mask: list[bool],
    gate_up_main_grad: Tensor | None,
    down_main_grad: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    choice = registry.choose("moe_experts", backend, hidden.device, hidden.dtype)
    run = registry.function(choice, "moe_experts_backward_into")
    tensors = (hidden, gate_up_proj, down_proj, top_k_weights, offsets, row_slot, slot_row, gate_up_bias, down_bias)
    settings = ExpertOptions(activation, limit, interleaved, save, combine)
    return run(d_rows, *tensors, pre_act, settings, mask, (gate_up_main_grad, down_main_grad))


def _dispatch(hidden: Tensor, row_slot: Tensor, slot_row: Tensor, *, backend: str = "auto") -> Tensor:
    flags.raise_pending()
    _check_rows("moe_dispatch", "hidden", hidden, slot_row.shape[:1], row_slot, slot_row)
    choice = registry.choose("moe_dispatch", backend, hidden.device, hidden.dtype)
    return registry.function(choice, "moe_dispatch")(hidden, row_slot, slot_row)


def _combine(rows: Tensor, row_slot: Tensor, slot_row: Tensor, *, backend: str = "auto") -> Tensor:
    flags.raise_pending()
    _check_rows("moe_combine", "rows", rows, row_slot.shape, row_slot, slot_row)
    choice = registry.choose("moe_combine", backend, rows.device, rows.dtype)
    return registry.function(choice, "moe_combine")(rows, row_slot, slot_row)


# ── what keeps a direct caller of `torch.ops` from reading out of bounds; the whole set is in `functional` ─────────


def _check_rows(op: str, name: str, values: Tensor, first: torch.Size, row_slot: Tensor, slot_row: Tensor) -> None:
    _check_plan_tensors(op, values, row_slot, slot_row)
    torch._check_value(
        values.dim() == 2 and values.shape[0] == first[0],
        lambda: f"fusedce.{op}: {name} {tuple(values.shape)} is not of {first[0]} rows",
    )


def _check_plan_tensors(op: str, values: Tensor, row_slot: Tensor, slot_row: Tensor) -> None:
    torch._check_value(
        slot_row.dim() == 2
        and slot_row.shape[1] >= 1
        and row_slot.dim() == 1
        and row_slot.shape[0] <= slot_row.numel(),
        lambda: (
            f"fusedce.{op}: row_slot {tuple(row_slot.shape)} and slot_row {tuple(slot_row.shape)} are not (R,) with R "
            "at most N·K and (N, K)"
        ),
    )
    torch._check_type(
        row_slot.dtype == slot_row.dtype == torch.int32 and values.dtype.is_floating_point,
        lambda: (
            f"fusedce.{op}: expected a plan of int32 and floats, got {row_slot.dtype}, {slot_row.dtype} and "
            f"{values.dtype}"
        ),
    )
    torch._check_value(
        row_slot.device == slot_row.device == values.device,
        lambda: f"fusedce.{op}: the plan is on {row_slot.device}, the rows on {values.device}",
    )


def _check_experts(
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    slot_row: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_up_main_grad: Tensor | None,
    down_main_grad: Tensor | None,
    activation: str,
    save: str,
) -> None:
    op = "moe_experts"
    _check_rows(op, "hidden", hidden, slot_row.shape[:1], row_slot, slot_row)
    torch._check_value(
        down_proj.dim() == 3
        and down_proj.numel() > 0
        and down_proj.shape[1] == hidden.shape[1]
        and tuple(gate_up_proj.shape) == (down_proj.shape[0], 2 * down_proj.shape[2], hidden.shape[1]),
        lambda: (
            f"fusedce.{op}: gate_up_proj {tuple(gate_up_proj.shape)} and down_proj {tuple(down_proj.shape)} are not "
            f"(E, 2F, D) and (E, D, F) with D = {hidden.shape[1]}"
        ),
    )
    torch._check_value(
        tuple(offsets.shape) == (down_proj.shape[0] + 1,) and top_k_weights.shape == slot_row.shape,
        lambda: (
            f"fusedce.{op}: offsets {tuple(offsets.shape)} and top_k_weights {tuple(top_k_weights.shape)} are not "
            f"(E + 1,) = ({down_proj.shape[0] + 1},) and (N, K) = {tuple(slot_row.shape)}"
        ),
    )
    for name, bias, weight in (("gate_up_bias", gate_up_bias, gate_up_proj), ("down_bias", down_bias, down_proj)):
        if bias is not None:
            _check_like(name, bias, weight.shape[:2], weight.dtype, weight.device)
    pairs = (("gate_up_main_grad", gate_up_main_grad, gate_up_proj), ("down_main_grad", down_main_grad, down_proj))
    for name, main_grad, weight in pairs:
        if main_grad is not None:
            _check_like(name, main_grad, weight.shape, torch.float32, weight.device)
    for name, value, known in (("activation", activation, ACTIVATIONS), ("save", save, SAVES)):
        torch._check_value(
            value in known,
            lambda name=name, value=value, known=known: f"fusedce.{op}: {name} is {value!r}; expected one of {known}",
        )
    torch._check_type(
        hidden.dtype == gate_up_proj.dtype == down_proj.dtype
        and top_k_weights.dtype.is_floating_point
        and offsets.dtype == torch.int32,
        lambda: (
            f"fusedce.{op}: hidden is {hidden.dtype}, gate_up_proj {gate_up_proj.dtype}, down_proj {down_proj.dtype}, "
            f"top_k_weights {top_k_weights.dtype}, offsets {offsets.dtype}; expected one dtype, floats, int32"
        ),
    )
    torch._check_value(
        all(t.device == hidden.device for t in (gate_up_proj, down_proj, top_k_weights, offsets)),
        lambda: f"fusedce.{op}: the arguments are not all on {hidden.device}",
    )


def _check_like(name: str, given: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    torch._check_value(
        given.shape == shape and given.device == device,
        lambda: f"fusedce.moe_experts: {name} {tuple(given.shape)} is not {tuple(shape)} on {device}",
    )
    torch._check_type(given.dtype == dtype, lambda: f"fusedce.moe_experts: {name} is {given.dtype}; expected {dtype}")


for _name, _function in {
    "moe_experts": _experts,
    "moe_experts_backward": _experts_backward,
    "moe_experts_backward_into": _experts_backward_into,
    "moe_dispatch": _dispatch,
    "moe_combine": _combine,
}.items():
    for _key in ("CPU", "CUDA"):
        LIB.impl(_name, _function, _key)


# ── fakes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.library.register_fake(f"{NAMESPACE}::moe_experts", lib=LIB)
def _experts_fake(
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    slot_row: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_main_grad: Tensor | None = None,
    down_main_grad: Tensor | None = None,
    *,
    activation: str = "swiglu",
    save: str = "pre_activation",
    combine: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor]:
    tensors = (hidden, gate_up_proj, down_proj, top_k_weights, offsets, row_slot, slot_row, gate_up_bias, down_bias)
    _check_experts(*tensors, gate_up_main_grad, down_main_grad, activation, save)
    num_rows = row_slot.shape[0]
    rows = hidden.new_empty((hidden.shape[0] if combine else num_rows, hidden.shape[1]))
    return rows, hidden.new_empty((num_rows if save == "pre_activation" else 0, gate_up_proj.shape[1]))


@torch.library.register_fake(f"{NAMESPACE}::moe_experts_backward", lib=LIB)
def _experts_backward_fake(
    d_rows: Tensor,
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    slot_row: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    pre_act: Tensor,
    activation: str,
    limit: float,
    interleaved: bool,
    save: str,
    combine: bool,
    mask: list[bool],
    backend: str,
) -> list[Tensor]:
    return _gradients_like(hidden, gate_up_proj, down_proj, top_k_weights, mask)


@torch.library.register_fake(f"{NAMESPACE}::moe_experts_backward_into", lib=LIB)
def _experts_backward_into_fake(
    d_rows: Tensor,
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    slot_row: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    pre_act: Tensor,
    activation: str,
    limit: float,
    interleaved: bool,
    save: str,
    combine: bool,
    mask: list[bool],
    gate_up_main_grad: Tensor | None,
    down_main_grad: Tensor | None,
    backend: str,
) -> list[Tensor]:
    own = [mask[0], mask[1] and gate_up_main_grad is None, mask[2] and down_main_grad is None, *mask[3:]]
    return _gradients_like(hidden, gate_up_proj, down_proj, top_k_weights, own)


def _gradients_like(
    hidden: Tensor, gate_up: Tensor, down: Tensor, top_k_weights: Tensor, mask: list[bool]
) -> list[Tensor]:
    """Empty gradients; those of weights in the order in which the weights are stored."""
    biases = [hidden.new_empty(weight.shape[:2]) for weight in (gate_up, down)]
    found = [
        hidden.new_empty(hidden.shape), *map(torch.empty_like, (gate_up, down)),
        top_k_weights.new_empty(top_k_weights.shape), *biases,
    ]  # fmt: skip
    return [t if wanted else t.new_empty(0) for t, wanted in zip(found, mask, strict=True)]


@torch.library.register_fake(f"{NAMESPACE}::moe_dispatch", lib=LIB)
def _dispatch_fake(hidden: Tensor, row_slot: Tensor, slot_row: Tensor, **_: object) -> Tensor:
    _check_rows("moe_dispatch", "hidden", hidden, slot_row.shape[:1], row_slot, slot_row)
    return hidden.new_empty((row_slot.shape[0], hidden.shape[1]))


@torch.library.register_fake(f"{NAMESPACE}::moe_combine", lib=LIB)
def _combine_fake(rows: Tensor, row_slot: Tensor, slot_row: Tensor, **_: object) -> Tensor:
    _check_rows("moe_combine", "rows", rows, row_slot.shape, row_slot, slot_row)
    return rows.new_empty((slot_row.shape[0], rows.shape[1]))


# ── autograd ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _experts_context(ctx, inputs, keyword_only_inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, pre_act = output
    ctx.mark_non_differentiable(pre_act)
    # Else autograd makes zeros of its size, as the upstream gradient of what nobody differentiates.
    ctx.set_materialize_grads(False)
    # Not saved: other backwards add to the main gradients before this one, and autograd would call that a mistake.
    ctx.main_grads = inputs[9:]
    ctx.save_for_backward(*inputs[:9], pre_act)
    ctx.options = keyword_only_inputs


def _experts_autograd(ctx, d_rows, _):  # type: ignore[no-untyped-def]
    options, needs = ctx.options, ctx.needs_input_grad
    if d_rows is None:
        return (None,) * 11
    mask = [*needs[:4], *needs[7:9]]
    settings = [options[name] for name in ("activation", "limit", "interleaved", "save", "combine")]
    arguments = (d_rows, *ctx.saved_tensors, *settings, mask)
    own = list(mask)
    if ctx.main_grads == (None, None):
        grads = torch.ops.fusedce.moe_experts_backward(*arguments, options["backend"])
    else:
        if torch.is_grad_enabled():
            no_double_backward("moe_experts")(ctx)
        grads = torch.ops.fusedce.moe_experts_backward_into(*arguments, *ctx.main_grads, options["backend"])
        own[1:3] = [wanted and main is None for wanted, main in zip(mask[1:3], ctx.main_grads, strict=True)]
    given = given_away(grads, own)
    return *given[:4], None, None, None, *given[4:], None, None


def _plan_context(ctx, inputs, keyword_only_inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[1:])
    ctx.backend = keyword_only_inputs["backend"]


def _dispatch_autograd(ctx, d_rows):  # type: ignore[no-untyped-def]
    return torch.ops.fusedce.moe_combine(d_rows, *ctx.saved_tensors, backend=ctx.backend), None, None


def _combine_autograd(ctx, d_out):  # type: ignore[no-untyped-def]
    return torch.ops.fusedce.moe_dispatch(d_out, *ctx.saved_tensors, backend=ctx.backend), None, None


register_autograd("moe_experts", _experts_autograd, _experts_context)
register_autograd("moe_experts_backward", no_double_backward("moe_experts"))
register_autograd("moe_dispatch", _dispatch_autograd, _plan_context)
register_autograd("moe_combine", _combine_autograd, _plan_context)
