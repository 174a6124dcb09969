"""The ops of routing and of the plan: implementation by the chosen backend, fakes, autograd."""

import torch
from torch import Tensor

from fusedce import flags
from fusedce.ops import registry
from fusedce.ops.autograd import register_autograd
from fusedce.ops.gradients import no_double_backward
from fusedce.ops.outside import report_outside
from fusedce.ops.schema import LIB, NAMESPACE

SCORES = ("softmax", "sigmoid")
MAX_ROWS = 2**31 - 1  # plans are int32
NO_PART = -1  # the expert id, and in a plan the row, of a slot that takes no part


def _route(
    logits: Tensor,
    top_k: int,
    correction: Tensor | None = None,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    flags.raise_pending()
    _check_route(logits, top_k, correction, score, num_groups, top_groups, group_best)
    choice = registry.choose("moe_route", backend, logits.device, logits.dtype)
    run = registry.function(choice, "moe_route")
    return run(logits, top_k, correction, score, renormalize, scale, num_groups, top_groups, group_best)


def _replay(
    logits: Tensor,
    top_k_index: Tensor,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    backend: str = "auto",
) -> Tensor:
    flags.raise_pending()
    _check_index("moe_replay", logits, top_k_index, score)
    choice = registry.choose("moe_replay", backend, logits.device, logits.dtype)
    report_outside(choice, "top_k_index", top_k_index.reshape(-1), logits.shape[1], ignore=NO_PART)
    return registry.function(choice, "moe_replay")(logits, top_k_index, score, renormalize, scale)


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


def _balance(
    logits: Tensor,
    top_k_index: Tensor,
    mask: Tensor | None,
    *,
    num_sequences: int = 1,
    score: str = "softmax",
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    flags.raise_pending()
    _check_balance(logits, top_k_index, mask, num_sequences, score)
    choice = registry.choose("moe_balance", backend, logits.device, logits.dtype)
    return registry.function(choice, "moe_balance")(logits, top_k_index, mask, num_sequences, score)


def _balance_backward(
    d_share: Tensor, d_square: Tensor, logits: Tensor, mask: Tensor | None, num_sequences: int, score: str, backend: str
) -> Tensor:
    choice = registry.choose("moe_balance", backend, logits.device, logits.dtype)
    run = registry.function(choice, "moe_balance_backward")
    return run(d_share, d_square, logits, mask, num_sequences, score)


def _plan(top_k_index: Tensor, num_experts: int, *, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    flags.raise_pending()
    _check_plan("moe_plan", top_k_index, num_experts, 1)
    # A plan is integers: every dtype that the kernels take is as good.
    choice = registry.choose("moe_plan", backend, top_k_index.device, torch.float32)
    report_outside(choice, "top_k_index", top_k_index.reshape(-1), num_experts, ignore=NO_PART)
    return registry.function(choice, "moe_plan")(top_k_index, num_experts)


def _plan_chunks(
    top_k_index: Tensor, num_experts: int, num_chunks: int, *, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    flags.raise_pending()
    _check_plan("moe_plan_chunks", top_k_index, num_experts, num_chunks)
    choice = registry.choose("moe_plan_chunks", backend, top_k_index.device, torch.float32)
    report_outside(choice, "top_k_index", top_k_index.reshape(-1), num_experts, ignore=NO_PART)
    return registry.function(choice, "moe_plan_chunks")(top_k_index, num_experts, num_chunks)


# ── what keeps a direct caller of `torch.ops` from reading out of bounds; the whole set is in `functional` ─────────


def _check_logits(op: str, logits: Tensor, score: str) -> None:
    torch._check_value(logits.dim() == 2, lambda: f"fusedce.{op}: logits {tuple(logits.shape)} are not (N, E)")
    torch._check_value(score in SCORES, lambda: f"fusedce.{op}: score is {score!r}; expected one of {SCORES}")
    torch._check_type(
        logits.dtype.is_floating_point, lambda: f"fusedce.{op}: logits are {logits.dtype}; expected floats"
    )


def _check_route(
    logits: Tensor, top_k: int, correction: Tensor | None, score: str, num_groups: int, top_groups: int, group_best: int
) -> None:
    op = "moe_route"
    _check_logits(op, logits, score)
    num_experts = logits.shape[1]
    torch._check_value(
        num_groups >= 1 and num_experts % num_groups == 0 and 1 <= top_groups <= num_groups,
        lambda: f"fusedce.{op}: {top_groups} of {num_groups} groups do not fit E = {num_experts} experts",
    )
    size = num_experts // num_groups
    torch._check_value(
        1 <= top_k <= top_groups * size,
        lambda: (
            f"fusedce.{op}: top_k is {top_k}; expected 1 to {top_groups * size}, the experts of {top_groups} groups"
        ),
    )
    torch._check_value(group_best >= 1, lambda: f"fusedce.{op}: group_best is {group_best}; expected at least 1")
    if correction is not None:
        torch._check_value(
            tuple(correction.shape) == (num_experts,) and correction.device == logits.device,
            lambda: (
                f"fusedce.{op}: correction {tuple(correction.shape)} on {correction.device} is not ({num_experts},) on "
                f"{logits.device}"
            ),
        )
        torch._check_type(
            correction.dtype.is_floating_point,
            lambda: f"fusedce.{op}: correction is {correction.dtype}; expected floats",
        )


def _check_index(op: str, logits: Tensor, top_k_index: Tensor, score: str) -> None:
    _check_logits(op, logits, score)
    torch._check_value(
        top_k_index.dim() == 2 and top_k_index.shape[0] == logits.shape[0] and top_k_index.shape[1] >= 1,
        lambda: (
            f"fusedce.{op}: top_k_index {tuple(top_k_index.shape)} is not (N, K) with N = {logits.shape[0]} and K at "
            "least 1"
        ),
    )
    torch._check_type(
        top_k_index.dtype == torch.int64,
        lambda: f"fusedce.{op}: top_k_index is {top_k_index.dtype}; expected torch.int64",
    )
    torch._check_value(
        top_k_index.device == logits.device,
        lambda: f"fusedce.{op}: top_k_index is on {top_k_index.device}, logits on {logits.device}",
    )


def _check_balance(logits: Tensor, top_k_index: Tensor, mask: Tensor | None, num_sequences: int, score: str) -> None:
    op = "moe_balance"
    _check_index(op, logits, top_k_index, score)
    torch._check_value(
        num_sequences >= 1 and logits.shape[0] % num_sequences == 0,
        lambda: f"fusedce.{op}: {num_sequences} sequences do not divide N = {logits.shape[0]} tokens",
    )
    if mask is not None:
        torch._check_value(
            mask.shape == logits.shape[:1] and mask.device == logits.device,
            lambda: (
                f"fusedce.{op}: mask {tuple(mask.shape)} on {mask.device} is not ({logits.shape[0]},) beside logits"
            ),
        )
        torch._check_type(mask.dtype.is_floating_point, lambda: f"fusedce.{op}: mask is {mask.dtype}; expected floats")


def _check_plan(op: str, top_k_index: Tensor, num_experts: int, num_chunks: int) -> None:
    shape = tuple(top_k_index.shape)
    torch._check_type(
        top_k_index.dtype == torch.int64,
        lambda: f"fusedce.{op}: top_k_index is {top_k_index.dtype}; expected torch.int64",
    )
    torch._check_value(
        num_experts >= 1 and num_chunks >= 1 and top_k_index.dim() == 2 and top_k_index.shape[1] >= 1,
        lambda: (
            f"fusedce.{op}: top_k_index {shape} is not (N, K) with K at least 1, or E = {num_experts} or the number of "
            f"chunks {num_chunks} is below 1"
        ),
    )
    torch._check_value(
        top_k_index.numel() <= MAX_ROWS,
        lambda: f"fusedce.{op}: top_k_index {shape} has more than {MAX_ROWS} slots",
    )


for _name, _function in {
    "moe_route": _route,
    "moe_replay": _replay,
    "moe_route_backward": _route_backward,
    "moe_balance": _balance,
    "moe_balance_backward": _balance_backward,
    "moe_plan": _plan,
    "moe_plan_chunks": _plan_chunks,
}.items():
    for _key in ("CPU", "CUDA"):
        LIB.impl(_name, _function, _key)


# ── fakes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


@torch.library.register_fake(f"{NAMESPACE}::moe_route", lib=LIB)
def _route_fake(
    logits: Tensor,
    top_k: int,
    correction: Tensor | None = None,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    _check_route(logits, top_k, correction, score, num_groups, top_groups, group_best)
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=_wide(logits)), logits.new_empty(shape, dtype=torch.int64)


@torch.library.register_fake(f"{NAMESPACE}::moe_replay", lib=LIB)
def _replay_fake(logits: Tensor, top_k_index: Tensor, *, score: str = "softmax", **_: object) -> Tensor:
    _check_index("moe_replay", logits, top_k_index, score)
    return logits.new_empty(top_k_index.shape, dtype=_wide(logits))


@torch.library.register_fake(f"{NAMESPACE}::moe_route_backward", lib=LIB)
def _route_backward_fake(d_weights: Tensor, logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.register_fake(f"{NAMESPACE}::moe_balance", lib=LIB)
def _balance_fake(
    logits: Tensor,
    top_k_index: Tensor,
    mask: Tensor | None,
    *,
    num_sequences: int = 1,
    score: str = "softmax",
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    _check_balance(logits, top_k_index, mask, num_sequences, score)
    dtype, shape = _wide(logits), (num_sequences, logits.shape[1])
    load, share = (logits.new_empty(shape, dtype=dtype) for _ in range(2))
    return load, share, logits.new_empty(num_sequences, dtype=dtype)


@torch.library.register_fake(f"{NAMESPACE}::moe_balance_backward", lib=LIB)
def _balance_backward_fake(d_share: Tensor, d_square: Tensor, logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.register_fake(f"{NAMESPACE}::moe_plan", lib=LIB)
def _plan_fake(top_k_index: Tensor, num_experts: int, **_: object) -> tuple[Tensor, Tensor, Tensor]:
    _check_plan("moe_plan", top_k_index, num_experts, 1)
    return _plan_of(top_k_index, (num_experts + 1,))


@torch.library.register_fake(f"{NAMESPACE}::moe_plan_chunks", lib=LIB)
def _plan_chunks_fake(
    top_k_index: Tensor, num_experts: int, num_chunks: int, **_: object
) -> tuple[Tensor, Tensor, Tensor]:
    _check_plan("moe_plan_chunks", top_k_index, num_experts, num_chunks)
    return _plan_of(top_k_index, (num_chunks, num_experts + 1))


def _plan_of(top_k_index: Tensor, offsets: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    return (
        top_k_index.new_empty(offsets, dtype=torch.int32),
        top_k_index.new_empty(top_k_index.numel(), dtype=torch.int32),
        top_k_index.new_empty(top_k_index.shape, dtype=torch.int32),
    )


# ── autograd ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _route_context(ctx, inputs, keyword_only_inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, index = output
    ctx.mark_non_differentiable(index)
    ctx.save_for_backward(inputs[0], index)
    ctx.options = keyword_only_inputs


def _replay_context(ctx, inputs, keyword_only_inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)
    ctx.options = keyword_only_inputs


def _replay_autograd(ctx, d_weights):  # type: ignore[no-untyped-def]
    logits, index = ctx.saved_tensors
    options = ctx.options
    d_logits = torch.ops.fusedce.moe_route_backward(
        d_weights, logits, index, options["score"], options["renormalize"], options["scale"], options["backend"]
    )
    return d_logits, None


def _route_autograd(ctx, d_weights, _):  # type: ignore[no-untyped-def]
    return *_replay_autograd(ctx, d_weights), None


def _balance_context(ctx, inputs, keyword_only_inputs, output) -> None:  # type: ignore[no-untyped-def]
    logits, _, mask = inputs
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(logits, mask)
    ctx.options = keyword_only_inputs


def _balance_autograd(ctx, _, d_share, d_square):  # type: ignore[no-untyped-def]
    logits, mask = ctx.saved_tensors
    options = ctx.options
    d_logits = torch.ops.fusedce.moe_balance_backward(
        d_share, d_square, logits, mask, options["num_sequences"], options["score"], options["backend"]
    )
    return d_logits, None, None


register_autograd("moe_route", _route_autograd, _route_context)
register_autograd("moe_replay", _replay_autograd, _replay_context)
register_autograd("moe_route_backward", no_double_backward("moe_route"))
register_autograd("moe_balance", _balance_autograd, _balance_context)
register_autograd("moe_balance_backward", no_double_backward("moe_balance"))
