"""Mixture of experts on rows: dispatch or experts, combine. Each checks its arguments and is one op call."""

import torch
from torch import Tensor

from fusedce import checks
from fusedce.functional.autocast import autocast
from fusedce.options import ACTIVATIONS, SAVES, ExpertOptions, MoEPlan

__all__ = ["moe_combine", "moe_dispatch", "moe_experts"]


def moe_experts(
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    plan: MoEPlan,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_main_grad: Tensor | None = None,
    down_main_grad: Tensor | None = None,
    activation: str = "swiglu",
    limit: float = 7.0,
    interleaved: bool = False,
    save: str = "pre_activation",
    combine: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Every expert's gated block on its own tokens: two grouped GEMMs with the activation between them.

    For row r of expert e, token n and slot (n, k): [g, u] = hidden[n] · gate_up_proj[e]ᵀ + gate_up_bias[e];
    rows[r] = top_k_weights[n, k] · (act(g, u) · down_proj[e]ᵀ + down_bias[e]). `moe_combine` sums a token's rows.

    Args:
        hidden: (N, D) fp32, bf16 or fp16 (fp64 on the eager backend). Only a strided last dimension is copied.
        gate_up_proj: (E, 2F, D), hidden's dtype, any strides: the first F rows of an expert make the gate. Weights that
            lie in memory as (E, D, 2F) are read there: pass the view `.mT`.
        down_proj: (E, D, F), hidden's dtype, any strides. Under torch.autocast weights, biases and hidden are cast to
            its dtype first.
        top_k_weights: (N, K), any of the float dtypes; applied in fp32. NaN spoils its own token only.
        plan: the `moe_plan` of the routing, for these N, K and E. Its values are trusted.
        gate_up_bias, down_bias: (E, 2F) and (E, D), hidden's dtype, or None. The first is in gate_up_proj's order.
        gate_up_main_grad, down_main_grad: fp32, like gate_up_proj and down_proj, or None. The backward adds the
            gradient of the weight to it, unrounded and in one pass, and the weight itself gets None.
        activation: "swiglu": silu(g)·u; "geglu": gelu(g)·u; "geglu_tanh": the same by gelu's tanh approximation;
            "gpt_oss": (u' + 1)·g'·sigmoid(1.702·g'), g' = min(g, limit), u' = u within ±limit.
        limit: above 0, for "gpt_oss".
        interleaved: gate and up are the rows 2j and 2j + 1 of gate_up_proj, as in gpt-oss, not j and F + j.
        save: what is kept for the backward beside the arguments: "pre_activation", g and u, or "plan", nothing: the
            backward runs the first GEMM again.
        combine: return the sums of each token's rows, as `moe_combine` would, without the rows' way through memory in
            the plan's order, forward and backward.
        backend: "auto", "eager", "triton" or "native".

    Returns:
        rows (N·K, D) in hidden's dtype, sorted by expert, each already times its routing weight, or with combine
        (N, D); differentiable in hidden, the weights, the biases and top_k_weights. An expert without rows gets
        gradients that are exactly 0. Rows past plan.offsets[E], which serve no slot, are 0. Double backward raises
        RuntimeError.

    Raises:
        TypeError, ValueError: a wrong kind, dtype, device, shape or value, naming the argument.
        RuntimeError: a named backend that cannot run here, with the reason.

    Memory, s bytes an element: 2·s·N·K·F are kept for the backward, none with save "plan". At once in the forward at
    most s·P·(D + F) beside them and the result, in the backward s·P·(D + 3F) beside the gradients, and with save
    "plan" the 2·s·N·K·F made again. P ≤ N·K + 127·E: the rows, each expert's padded to a multiple of 128. Work:
    6·N·K·D·F FLOP forward, twice that backward, and 4·N·K·D·F more with save "plan". Products are summed in fp32,
    weight gradients over an expert's rows in fp32 and rounded once. Deterministic, and bitwise the same for both values
    of save.
    """
    op = "moe_experts"
    hidden, gate_up_proj, down_proj, gate_up_bias, down_bias = autocast(
        hidden, gate_up_proj, down_proj, gate_up_bias, down_bias
    )
    _check_plan(op, plan)
    settings = ExpertOptions(activation, limit, bool(interleaved), save, bool(combine))
    weights = (gate_up_proj, down_proj, gate_up_bias, down_bias)
    check_experts(op, hidden, *weights, top_k_weights, (*plan.slot_row.shape, plan.num_experts), settings)
    main_grads = {"gate_up_main_grad": gate_up_main_grad, "down_main_grad": down_main_grad}
    for (name, main_grad), weight in zip(main_grads.items(), (gate_up_proj, down_proj), strict=True):
        if main_grad is not None:
            checks.tensor(op, name, main_grad, (torch.float32,))
            checks.shape(op, name, main_grad, tuple(weight.shape), "like its weight")
    checks.same_device(op, hidden=hidden, **main_grads, plan=plan.offsets)
    rows, _ = torch.ops.fusedce.moe_experts(
        hidden, gate_up_proj, down_proj, top_k_weights, plan.offsets, plan.row_slot, plan.slot_row, gate_up_bias,
        down_bias, gate_up_main_grad, down_main_grad, activation=activation, limit=float(limit),
        interleaved=bool(interleaved), save=save, combine=bool(combine), backend=backend,
    )  # fmt: skip
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


def check_experts(
    op: str,
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    top_k_weights: Tensor,
    sizes: tuple[int, int, int],
    settings: ExpertOptions,
) -> None:
    """TypeError or ValueError unless these are hidden (N, D) and E experts' weights, sizes being N, K and E."""
    num_tokens, top_k, num_experts = sizes
    checks.tensor(op, "hidden", hidden, checks.FLOATS)
    checks.shape(op, "hidden", hidden, (num_tokens, None), "(N, D)")
    depth = hidden.shape[1]
    checks.tensor(op, "down_proj", down_proj, checks.FLOATS)
    checks.shape(op, "down_proj", down_proj, (num_experts, depth, None), "(E, D, F)")
    ffn = down_proj.shape[2]
    checks.positive(op, D=depth, F=ffn)
    weights = {"gate_up_proj": gate_up_proj, "down_proj": down_proj}
    for name, weight, shape, letters in (
        ("gate_up_proj", gate_up_proj, (num_experts, 2 * ffn, depth), "(E, 2F, D)"),
        ("gate_up_bias", gate_up_bias, (num_experts, 2 * ffn), "(E, 2F)"),
        ("down_bias", down_bias, (num_experts, depth), "(E, D)"),
    ):
        if weight is not None:
            checks.tensor(op, name, weight, checks.FLOATS)
            checks.shape(op, name, weight, shape, letters)
            weights[name] = weight
    checks.tensor(op, "top_k_weights", top_k_weights, checks.FLOATS)
    checks.shape(op, "top_k_weights", top_k_weights, (num_tokens, top_k), "(N, K)")
    checks.same_dtype(op, hidden=hidden, **weights)
    checks.same_device(op, hidden=hidden, **weights, top_k_weights=top_k_weights)
    checks.one_of(op, "activation", settings.activation, ACTIVATIONS)
    checks.positive_number(op, "limit", settings.limit)
    checks.one_of(op, "save", settings.save, SAVES)


def _check_plan(op: str, plan: MoEPlan) -> None:
    if not isinstance(plan, MoEPlan):
        raise TypeError(f"fusedce.{op}: argument 'plan' has {checks.describe(plan)}; expected a MoEPlan")
    num_tokens, top_k = plan.slot_row.shape
    checks.shape(op, "plan.row_slot", plan.row_slot, (num_tokens * top_k,), "(N·K,)")
    checks.shape(op, "plan.offsets", plan.offsets, (None,), "(E + 1,)")
