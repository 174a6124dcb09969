"""The mixture-of-experts ops: implementation by the chosen backend, fakes, autograd."""

import torch
from torch import Tensor

from fusedce import flags
from fusedce.ops import registry
from fusedce.ops.schema import LIB, NAMESPACE

SCORES = ("softmax", "sigmoid")
MAX_ROWS = 2**31 - 1  # plans are int32


def _route(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    flags.raise_pending()
    _check_route(logits, top_k, score)
    choice = registry.choose("moe_route", backend, logits.device, logits.dtype)
    return registry.function(choice, "moe_route")(logits, top_k, score, renormalize, scale)


def _route_backward(
    d_weights: Tensor,
    logits: Tensor,
    top_k_index: Tensor,
    score: str,
    renormalize: bool,
    scale: float,
    backend: str,
) -> Tensor:
    choice = registry.choose("moe_route", backend, logits.device, logits.dtype)
    run = registry.function(choice, "moe_route_backward")
    return run(d_weights, logits, top_k_index, score, renormalize, scale)


def _plan(top_k_index: Tensor, num_experts: int, *, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    flags.raise_pending()
    _check_plan(top_k_index, num_experts)
    # A plan is integers: every dtype that the kernels take is as good.
    choice = registry.choose("moe_plan", backend, top_k_index.device, torch.float32)
    flags.report_outside("moe_plan", "top_k_index", top_k_index.reshape(-1), num_experts)
    return registry.function(choice, "moe_plan")(top_k_index, num_experts)


def _experts(
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    slot_row: Tensor,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    flags.raise_pending()
    _check_experts(hidden, gate_up_proj, down_proj, top_k_weights, offsets, row_slot, slot_row)
    choice = registry.choose("moe_experts", backend, hidden.device, hidden.dtype)
    run = registry.function(choice, "moe_experts")
    return run(hidden, gate_up_proj, down_proj, top_k_weights, offsets, row_slot, slot_row)


def _experts_backward(
    d_rows: Tensor,
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    slot_row: Tensor,
    pre_act: Tensor,
    mask: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    choice = registry.choose("moe_experts", backend, hidden.device, hidden.dtype)
    run = registry.function(choice, "moe_experts_backward")
    plan = (offsets, row_slot, slot_row)
    return run(d_rows, hidden, gate_up_proj, down_proj, top_k_weights, *plan, pre_act, mask)


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


def _check_route(logits: Tensor, top_k: int, score: str) -> None:
    torch._check_value(logits.dim() == 2, lambda: f"fusedce.moe_route: logits {tuple(logits.shape)} are not (N, E)")
    torch._check_value(
        1 <= top_k <= logits.shape[1],
        lambda: f"fusedce.moe_route: top_k is {top_k}; expected 1 to E = {logits.shape[1]}",
    )
    torch._check_value(score in SCORES, lambda: f"fusedce.moe_route: score is {score!r}; expected one of {SCORES}")
    torch._check_type(
        logits.dtype.is_floating_point, lambda: f"fusedce.moe_route: logits are {logits.dtype}; expected floats"
    )


def _check_plan(top_k_index: Tensor, num_experts: int) -> None:
    shape = tuple(top_k_index.shape)
    torch._check_type(
        top_k_index.dtype == torch.int64,
        lambda: f"fusedce.moe_plan: top_k_index is {top_k_index.dtype}; expected torch.int64",
    )
    torch._check_value(
        num_experts >= 1 and top_k_index.dim() == 2 and 1 <= top_k_index.shape[1] <= num_experts,
        lambda: f"fusedce.moe_plan: top_k_index {shape} is not (N, K) with K from 1 to E = {num_experts}",
    )
    torch._check_value(
        top_k_index.numel() <= MAX_ROWS,
        lambda: f"fusedce.moe_plan: top_k_index {shape} has more than {MAX_ROWS} slots",
    )


def _check_rows(op: str, name: str, values: Tensor, first: torch.Size, row_slot: Tensor, slot_row: Tensor) -> None:
    _check_plan_tensors(op, values, row_slot, slot_row)
    torch._check_value(
        values.dim() == 2 and values.shape[0] == first[0],
        lambda: f"fusedce.{op}: {name} {tuple(values.shape)} is not of {first[0]} rows",
    )


def _check_plan_tensors(op: str, values: Tensor, row_slot: Tensor, slot_row: Tensor) -> None:
    torch._check_value(
        slot_row.dim() == 2 and slot_row.shape[1] >= 1 and tuple(row_slot.shape) == (slot_row.numel(),),
        lambda: (
            f"fusedce.{op}: row_slot {tuple(row_slot.shape)} and slot_row {tuple(slot_row.shape)} are not (N·K,) and "
            "(N, K)"
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


for _name, _function in {
    "moe_route": _route,
    "moe_route_backward": _route_backward,
    "moe_plan": _plan,
    "moe_experts": _experts,
    "moe_experts_backward": _experts_backward,
    "moe_dispatch": _dispatch,
    "moe_combine": _combine,
}.items():
    for _key in ("CPU", "CUDA"):
        LIB.impl(_name, _function, _key)


# ── fakes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.library.register_fake(f"{NAMESPACE}::moe_route", lib=LIB)
def _route_fake(logits: Tensor, top_k: int, *, score: str = "softmax", **_: object) -> tuple[Tensor, Tensor]:
    _check_route(logits, top_k, score)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


@torch.library.register_fake(f"{NAMESPACE}::moe_route_backward", lib=LIB)
def _route_backward_fake(d_weights: Tensor, logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.register_fake(f"{NAMESPACE}::moe_plan", lib=LIB)
def _plan_fake(top_k_index: Tensor, num_experts: int, **_: object) -> tuple[Tensor, Tensor, Tensor]:
    _check_plan(top_k_index, num_experts)
    return (
        top_k_index.new_empty(num_experts + 1, dtype=torch.int32),
        top_k_index.new_empty(top_k_index.numel(), dtype=torch.int32),
        top_k_index.new_empty(top_k_index.shape, dtype=torch.int32),
    )


@torch.library.register_fake(f"{NAMESPACE}::moe_experts", lib=LIB)
def _experts_fake(
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    slot_row: Tensor,
    **_: object,
) -> tuple[Tensor, Tensor]:
    _check_experts(hidden, gate_up_proj, down_proj, top_k_weights, offsets, row_slot, slot_row)
    num_rows = row_slot.shape[0]
    return hidden.new_empty((num_rows, hidden.shape[1])), hidden.new_empty((num_rows, gate_up_proj.shape[1]))


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
    pre_act: Tensor,
    mask: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors = (hidden, gate_up_proj, down_proj, top_k_weights)
    grads = (t.new_empty(t.shape if wanted else (0,)) for t, wanted in zip(tensors, mask, strict=True))
    d_hidden, d_gate_up_proj, d_down_proj, d_top_k_weights = grads
    return d_hidden, d_gate_up_proj, d_down_proj, d_top_k_weights


@torch.library.register_fake(f"{NAMESPACE}::moe_dispatch", lib=LIB)
def _dispatch_fake(hidden: Tensor, row_slot: Tensor, slot_row: Tensor, **_: object) -> Tensor:
    _check_rows("moe_dispatch", "hidden", hidden, slot_row.shape[:1], row_slot, slot_row)
    return hidden.new_empty((row_slot.shape[0], hidden.shape[1]))


@torch.library.register_fake(f"{NAMESPACE}::moe_combine", lib=LIB)
def _combine_fake(rows: Tensor, row_slot: Tensor, slot_row: Tensor, **_: object) -> Tensor:
    _check_rows("moe_combine", "rows", rows, row_slot.shape, row_slot, slot_row)
    return rows.new_empty((slot_row.shape[0], rows.shape[1]))


# ── autograd ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _route_context(ctx, inputs, keyword_only_inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, index = output
    ctx.mark_non_differentiable(index)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], index)
    ctx.options = keyword_only_inputs


def _route_autograd(ctx, d_weights, _):  # type: ignore[no-untyped-def]
    if d_weights is None:
        return None, None
    logits, index = ctx.saved_tensors
    options = ctx.options
    d_logits = torch.ops.fusedce.moe_route_backward(
        d_weights, logits, index, options["score"], options["renormalize"], options["scale"], options["backend"]
    )
    return d_logits, None


def _experts_context(ctx, inputs, keyword_only_inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, pre_act = output
    ctx.mark_non_differentiable(pre_act)
    # Else autograd makes zeros of pre_act's size for the backward: R · 2F elements that nobody reads.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, pre_act)
    ctx.backend = keyword_only_inputs["backend"]


def _experts_autograd(ctx, d_rows, _):  # type: ignore[no-untyped-def]
    if d_rows is None:
        return (None,) * 7
    mask = list(ctx.needs_input_grad[:4])
    grads = torch.ops.fusedce.moe_experts_backward(d_rows, *ctx.saved_tensors, mask, ctx.backend)
    return *(grad if wanted else None for grad, wanted in zip(grads, mask, strict=True)), None, None, None


def _plan_context(ctx, inputs, keyword_only_inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[1:])
    ctx.backend = keyword_only_inputs["backend"]


def _dispatch_autograd(ctx, d_rows):  # type: ignore[no-untyped-def]
    return torch.ops.fusedce.moe_combine(d_rows, *ctx.saved_tensors, backend=ctx.backend), None, None


def _combine_autograd(ctx, d_out):  # type: ignore[no-untyped-def]
    return torch.ops.fusedce.moe_dispatch(d_out, *ctx.saved_tensors, backend=ctx.backend), None, None


def _no_double_backward(ctx, *_):  # type: ignore[no-untyped-def]
    raise RuntimeError("fusedce: the MoE ops do not support double backward")


_autograd = torch.library.register_autograd
_autograd(f"{NAMESPACE}::moe_route", _route_autograd, setup_context=_route_context, lib=LIB)
_autograd(f"{NAMESPACE}::moe_route_backward", _no_double_backward, lib=LIB)
_autograd(f"{NAMESPACE}::moe_experts", _experts_autograd, setup_context=_experts_context, lib=LIB)
_autograd(f"{NAMESPACE}::moe_experts_backward", _no_double_backward, lib=LIB)
_autograd(f"{NAMESPACE}::moe_dispatch", _dispatch_autograd, setup_context=_plan_context, lib=LIB)
_autograd(f"{NAMESPACE}::moe_combine", _combine_autograd, setup_context=_plan_context, lib=LIB)
