"""Mixture of experts on rows: dispatch or experts, combine. Each checks its arguments and is one op call."""

import torch
from torch import Tensor

from fusedce import checks
from fusedce.functional.autocast import autocast
from fusedce.options import MoEPlan

__all__ = ["moe_combine", "moe_dispatch", "moe_experts"]


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
        (N, D) in rows' dtype, differentiable in rows; summed in slot order in fp32, rounded once. A slot that takes no
        part adds nothing; a slot whose expert id was out of range makes its token NaN.

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


def _check_plan(op: str, plan: MoEPlan) -> None:
    if not isinstance(plan, MoEPlan):
        raise TypeError(f"fusedce.{op}: argument 'plan' has {checks.describe(plan)}; expected a MoEPlan")
    num_tokens, top_k = plan.slot_row.shape
    checks.shape(op, "plan.row_slot", plan.row_slot, (num_tokens * top_k,), "(N·K,)")
    checks.shape(op, "plan.offsets", plan.offsets, (None,), "(E + 1,)")
