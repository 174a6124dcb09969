"""Mixture of experts: route, plan, dispatch or experts, combine. Each checks its arguments and is one op call."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedce import checks, flags
from fusedce.functional.autocast import autocast
from fusedce.options import MoEPlan

__all__ = ["Routing", "moe_combine", "moe_dispatch", "moe_experts", "moe_plan", "moe_route"]


class Routing(NamedTuple):
    """What a router decides: (N, K) weights, fp32 and differentiable, and (N, K) int64 expert ids."""

    top_k_weights: Tensor
    top_k_index: Tensor


def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    backend: str = "auto",
) -> Routing:
    """The K experts of each token and their weights.

    s = softmax(logits) over the experts, or sigmoid(logits); the K largest, the lowest id first among equal logits;
    w_k = scale · s_k / Σ_K s (renormalize) or scale · s_k.

    Args:
        logits: (N, E) fp32, bf16 or fp16 (fp64 on the eager backend); any strides. Scores are made in fp32.
        top_k: K, from 1 to E.
        score: "softmax" or "sigmoid".
        renormalize: whether a token's K weights sum to `scale`. With K = 1 every weight is then `scale`, and no
            gradient reaches the router.
        scale: a finite factor above 0 on the weights.
        backend: "auto", "eager", "triton" or "native"; `fusedce.explain()` says what "auto" takes and why.

    Returns:
        `Routing(top_k_weights, top_k_index)`: (N, K) fp32 (fp64 for fp64), differentiable in logits, and (N, K) int64,
        largest first. A row with NaN has NaN weights and valid ids; other rows do not see it. Where all K sigmoid
        scores are 0, renormalized weights are 0. Double backward raises RuntimeError.

    Raises:
        TypeError, ValueError: a wrong kind, dtype, shape or value, naming the argument.
        RuntimeError: a named backend that cannot run here, with the reason.

    Memory: 12·N·K bytes. Deterministic, and each row's result depends on that row alone.
    """
    op = "moe_route"
    checks.tensor(op, "logits", logits, checks.FLOATS)
    checks.shape(op, "logits", logits, (None, None), "(N, E)")
    _check_count(op, "top_k", top_k, logits.shape[1], "E")
    checks.one_of(op, "score", score, ("softmax", "sigmoid"))
    checks.positive_number(op, "scale", scale)
    weights, index = torch.ops.fusedce.moe_route(
        logits, top_k, score=score, renormalize=bool(renormalize), scale=float(scale), backend=backend
    )
    return Routing(weights, index)


def moe_plan(top_k_index: Tensor, num_experts: int, *, check: str = "auto", backend: str = "auto") -> MoEPlan:
    """The permutation that sorts the routed slots by expert: integers only, and all that routing needs afterwards.

    Slot n·K + k is token n's k-th choice. Rows are the slots sorted by expert id, stably, so that an expert's rows
    stay in slot order. The same plan used again (activation recompute, router replay) routes identically.

    Args:
        top_k_index: (N, K) int64 expert ids in [0, E); a token may name an expert twice. N may be 0.
        num_experts: E, at least K.
        check: what happens to an id out of range. On a CPU: ValueError at once. On a GPU "auto" gives the slot no row,
            so that its token's result and gradient are NaN, and raises at a later call or in `fusedce.check_flags()`,
            without a sync; "sync" waits for the GPU and raises here.
        backend: "auto", "eager", "triton" or "native".

    Returns:
        `MoEPlan(offsets, row_slot, slot_row)`, int32. See its docstring.

    Raises:
        TypeError, ValueError: a wrong kind, dtype, shape or value, naming the argument; more than 2³¹ − 1 slots.
        RuntimeError: a named backend that cannot run here, with the reason.

    Memory: 8·N·K bytes, and in between 4·E bytes for 128 slots. Deterministic: stable, no atomics; no host sync but in
    the eager backend.
    """
    op = "moe_plan"
    checks.tensor(op, "top_k_index", top_k_index, (torch.int64,))
    checks.shape(op, "top_k_index", top_k_index, (None, None), "(N, K)")
    _check_count(op, "num_experts", num_experts)
    _check_count(op, "top_k_index.shape[1]", top_k_index.shape[1], num_experts, "E")
    checks.one_of(op, "check", check, ("auto", "sync"))
    offsets, row_slot, slot_row = torch.ops.fusedce.moe_plan(top_k_index, num_experts, backend=backend)
    if check == "sync":
        flags.check_flags()
    return MoEPlan(offsets, row_slot, slot_row)


def moe_experts(
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    plan: MoEPlan,
    *,
    backend: str = "auto",
) -> Tensor:
    """Every expert's SwiGLU block on its own tokens: two grouped GEMMs, rows gathered inside the first.

    For row r of expert e, token n and slot (n, k): [g, u] = hidden[n] · gate_up_proj[e]ᵀ;
    rows[r] = top_k_weights[n, k] · (silu(g) · u) · down_proj[e]ᵀ. `moe_combine` sums a token's rows.

    Args:
        hidden: (N, D) fp32, bf16 or fp16 (fp64 on the eager backend). Rows are gathered where they lie; only a strided
            last dimension is copied.
        gate_up_proj: (E, 2F, D), hidden's dtype, any strides: the first F rows of an expert make the gate.
        down_proj: (E, D, F), hidden's dtype, any strides. Under torch.autocast the three are cast to its dtype first.
        top_k_weights: (N, K), any of the float dtypes; applied in fp32. NaN spoils its own token only.
        plan: the `moe_plan` of the routing, for these N, K and E. Its values are trusted.
        backend: "auto", "eager", "triton" or "native".

    Returns:
        rows (N·K, D) in hidden's dtype, sorted by expert, each already times its routing weight; differentiable in the
        four tensors. An expert without rows gets gradients that are exactly 0. Rows past plan.offsets[E], which serve
        no slot, are 0. Double backward raises RuntimeError.

    Raises:
        TypeError, ValueError: a wrong kind, dtype, device or shape, naming the argument.
        RuntimeError: a named backend that cannot run here, with the reason.

    Memory, s bytes an element: forward s·N·K·(D + 3F), of which 2F (the pre-activation) are kept for the backward;
    backward s·N·K·(D + 3F) beside the gradients. Work: 6·N·K·D·F FLOP forward, twice that backward. Products are
    summed in fp32, weight gradients over an expert's rows in fp32 and rounded once. Deterministic.
    """
    op = "moe_experts"
    hidden, gate_up_proj, down_proj = autocast(hidden, gate_up_proj, down_proj)
    _check_plan(op, plan)
    checks.tensor(op, "hidden", hidden, checks.FLOATS)
    checks.shape(op, "hidden", hidden, (plan.num_tokens, None), "(N, D)")
    num_experts, depth = plan.num_experts, hidden.shape[1]
    checks.tensor(op, "down_proj", down_proj, checks.FLOATS)
    checks.shape(op, "down_proj", down_proj, (num_experts, depth, None), "(E, D, F)")
    ffn = down_proj.shape[2]
    checks.positive(op, D=depth, F=ffn)
    checks.tensor(op, "gate_up_proj", gate_up_proj, checks.FLOATS)
    checks.shape(op, "gate_up_proj", gate_up_proj, (num_experts, 2 * ffn, depth), "(E, 2F, D)")
    checks.tensor(op, "top_k_weights", top_k_weights, checks.FLOATS)
    checks.shape(op, "top_k_weights", top_k_weights, tuple(plan.slot_row.shape), "(N, K)")
    weights = {"gate_up_proj": gate_up_proj, "down_proj": down_proj}
    checks.same_dtype(op, hidden=hidden, **weights)
    checks.same_device(op, hidden=hidden, **weights, top_k_weights=top_k_weights, plan=plan.offsets)
    rows, _ = torch.ops.fusedce.moe_experts(
        hidden,
        gate_up_proj,
        down_proj,
        top_k_weights,
        plan.offsets,
        plan.row_slot,
        plan.slot_row,
        backend=backend,
    )
    return rows


def moe_dispatch(hidden: Tensor, plan: MoEPlan, *, backend: str = "auto") -> Tensor:
    """The tokens as rows sorted by expert: rows[r] = hidden[plan.row_slot[r] // K]. Its gradient is `moe_combine`.

    Args:
        hidden: (N, D), any float dtype and strides.
        plan: the `moe_plan` of the routing. Its values are trusted.
        backend: "auto", "eager", "triton" or "native".

    Returns:
        rows (N·K, D), differentiable in hidden; rows that serve no slot are 0.

    Raises:
        TypeError, ValueError, RuntimeError: as `moe_experts`.

    Memory: one N·K × D tensor. Deterministic.
    """
    op = "moe_dispatch"
    _check_plan(op, plan)
    checks.tensor(op, "hidden", hidden, checks.FLOATS)
    checks.shape(op, "hidden", hidden, (plan.num_tokens, None), "(N, D)")
    checks.same_device(op, hidden=hidden, plan=plan.offsets)
    return torch.ops.fusedce.moe_dispatch(hidden, plan.row_slot, plan.slot_row, backend=backend)


def moe_combine(rows: Tensor, plan: MoEPlan, *, backend: str = "auto") -> Tensor:
    """The sum of each token's K rows: out[n] = Σ_k rows[plan.slot_row[n, k]]. Its gradient is `moe_dispatch`.

    Args:
        rows: (N·K, D), any float dtype and strides.
        plan: the `moe_plan` of the routing. Its values are trusted.
        backend: "auto", "eager", "triton" or "native".

    Returns:
        (N, D) in rows' dtype, differentiable in rows; summed in slot order in fp32, rounded once. NaN for a token with
        a slot that has no row.

    Raises:
        TypeError, ValueError, RuntimeError: as `moe_experts`.

    Memory: one N × D tensor. Deterministic, and a token's result depends on its own rows alone.
    """
    op = "moe_combine"
    _check_plan(op, plan)
    checks.tensor(op, "rows", rows, checks.FLOATS)
    checks.shape(op, "rows", rows, (plan.row_slot.shape[0], None), "(N·K, D)")
    checks.same_device(op, rows=rows, plan=plan.offsets)
    return torch.ops.fusedce.moe_combine(rows, plan.row_slot, plan.slot_row, backend=backend)


def _check_count(op: str, argument: str, value: int, most: float = math.inf, letter: str = "") -> None:
    """TypeError unless `value` is an int, ValueError unless it is from 1 to `most`, `letter` in the message."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"fusedce.{op}: argument '{argument}' has {checks.describe(value)}; expected an int")
    if value < 1 or value > most:
        limit = f"1 to {letter} = {most}" if letter else "at least 1"
        raise ValueError(f"fusedce.{op}: argument '{argument}' is {value}; expected {limit}")


def _check_plan(op: str, plan: MoEPlan) -> None:
    if not isinstance(plan, MoEPlan):
        raise TypeError(f"fusedce.{op}: argument 'plan' has {checks.describe(plan)}; expected a MoEPlan")
    num_tokens, top_k = plan.slot_row.shape
    checks.shape(op, "plan.row_slot", plan.row_slot, (num_tokens * top_k,), "(N·K,)")
    checks.shape(op, "plan.offsets", plan.offsets, (None,), "(E + 1,)")
