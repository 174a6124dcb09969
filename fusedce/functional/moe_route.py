"""Mixture of experts: the choice of experts, their weights, and the plan. Each is one op call behind checks."""

from typing import NamedTuple

import torch
from torch import Tensor

from fusedce import checks, flags
from fusedce.options import MoEChunks, MoEPlan

__all__ = ["Routing", "moe_plan", "moe_plan_chunks", "moe_rank_index", "moe_replay", "moe_route"]

SCORES = ("softmax", "sigmoid")


class Routing(NamedTuple):
    """What a router decides: (N, K) weights, fp32 and differentiable, and (N, K) int64 expert ids."""

    top_k_weights: Tensor
    top_k_index: Tensor


def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    correction: Tensor | None = None,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
    backend: str = "auto",
) -> Routing:
    """The K experts of each token and their weights.

    s = softmax(logits) over the experts, or sigmoid(logits); the K largest of s + correction, the lowest id first among
    equals; w_k = scale · s_k / Σ_K s (renormalize) or scale · s_k. A softmax over the K chosen logits is the same as
    softmax with renormalize.

    Args:
        logits: (N, E) fp32, bf16 or fp16 (fp64 on the eager backend); any strides. Scores are made in fp32.
        top_k: K, from 1 to the number of experts that may be chosen.
        correction: (E,) floats or None: added to the scores for the choice, not for the weights. No gradient.
        score: "softmax" or "sigmoid".
        renormalize: whether a token's K weights sum to `scale`. With K = 1 every weight is then `scale`, and no
            gradient reaches the router.
        scale: a finite factor above 0 on the weights.
        num_groups: G, a divisor of E: experts g·E/G to (g + 1)·E/G − 1 are group g.
        top_groups: from 1 to G; the K come from the groups of the highest score, the lowest group first among equals.
        group_best: a group's score is the sum of so many of its best s + correction: 2 in DeepSeek-V3, 1 in
            DeepSeek-V2.
        backend: "auto", "eager", "triton" or "native"; `fusedce.explain()` says what "auto" takes and why.

    Returns:
        `Routing(top_k_weights, top_k_index)`: (N, K) fp32 (fp64 for fp64), differentiable in logits, and (N, K) int64,
        best first. A row with NaN has NaN weights and valid ids; other rows do not see it. Where all K sigmoid
        scores are 0, renormalized weights are 0. Double backward raises RuntimeError.

    Raises:
        TypeError, ValueError: a wrong kind, dtype, shape or value, naming the argument.
        RuntimeError: a named backend that cannot run here, with the reason.

    Memory: 12·N·K bytes. Deterministic, and each row's result depends on that row alone. Without correction and groups
    the choice is exact, by the logits; with them scores are compared in fp32, and backends may differ where two experts
    are as close as its rounding.
    """
    op = "moe_route"
    checks.tensor(op, "logits", logits, checks.FLOATS)
    checks.shape(op, "logits", logits, (None, None), "(N, E)")
    num_experts = logits.shape[1]
    check_groups(op, num_experts, num_groups, top_groups, group_best)
    checks.count(
        op, "top_k", top_k, top_groups * (num_experts // num_groups), "E" if num_groups == 1 else "top_groups·E/G"
    )
    check_scores(op, score, scale)
    if correction is not None:
        checks.tensor(op, "correction", correction, checks.FLOATS)
        checks.shape(op, "correction", correction, (num_experts,), "(E,)")
        checks.same_device(op, logits=logits, correction=correction)
        correction = correction.detach().to(_wide(logits))
    weights, index = torch.ops.fusedce.moe_route(
        logits,
        top_k,
        correction,
        score=score,
        renormalize=bool(renormalize),
        scale=float(scale),
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=group_best,
        backend=backend,
    )
    return Routing(weights, index)


def moe_replay(
    logits: Tensor,
    top_k_index: Tensor,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    check: str = "auto",
    backend: str = "auto",
) -> Routing:
    """The weights of experts that were chosen elsewhere, such as by the engine that made a rollout.

    w_k = scale · s_k / Σ_K s (renormalize) or scale · s_k, with s as in `moe_route` and s_k that of expert
    top_k_index[n, k]. With the ids of a `moe_route` of the same logits the weights are its weights.

    Args:
        logits: (N, E), as for `moe_route`.
        top_k_index: (N, K) int64; −1 for a slot that takes no part: its weight is 0 and it is in no sum. An expert
            named twice counts twice, in the sum as in the gradient.
        score: "softmax" or "sigmoid".
        renormalize: whether the weights of a token's slots that take part sum to `scale`.
        scale: a finite factor above 0 on the weights.
        check: what happens to an id that is neither −1 nor in [0, E), see `moe_plan`. On a GPU its weight is NaN.
        backend: "auto", "eager", "triton" or "native".

    Returns:
        `Routing(top_k_weights, top_k_index)`: (N, K) fp32 (fp64 for fp64), differentiable in logits, and the ids as
        they came.

    Raises:
        TypeError, ValueError, RuntimeError: as `moe_route`.

    Memory: 4·N·K bytes. Deterministic, and each row's result depends on that row alone.
    """
    op = "moe_replay"
    checks.tensor(op, "logits", logits, checks.FLOATS)
    checks.shape(op, "logits", logits, (None, None), "(N, E)")
    checks.positive(op, E=logits.shape[1])
    check_index(op, top_k_index, logits.shape[0])
    checks.same_device(op, logits=logits, top_k_index=top_k_index)
    check_scores(op, score, scale)
    checks.one_of(op, "check", check, ("auto", "sync"))
    weights = torch.ops.fusedce.moe_replay(
        logits, top_k_index, score=score, renormalize=bool(renormalize), scale=float(scale), backend=backend
    )
    if check == "sync":
        flags.check_flags()
    return Routing(weights, top_k_index)


def moe_plan(top_k_index: Tensor, num_experts: int, *, check: str = "auto", backend: str = "auto") -> MoEPlan:
    """The permutation that sorts the routed slots by expert: integers only, and all that routing needs afterwards.

    Slot n·K + k is token n's k-th choice. Rows are the slots sorted by expert id, stably, so that an expert's rows
    stay in slot order. The same plan used again (activation recompute, router replay) routes identically.

    Args:
        top_k_index: (N, K) int64 expert ids in [0, E), or −1 for a slot that takes no part: it has no row, adds nothing
            to its token, and its weight's gradient is 0. An expert that a token names twice gets two rows of it. N may
            be 0.
        num_experts: E.
        check: what happens to any other id. On a CPU: ValueError at once. On a GPU "auto" gives the slot no row, so
            that its token's result and gradient are NaN, and raises at a later call or in `fusedce.check_flags()`,
            without a sync; "sync" waits for the GPU and raises here.
        backend: "auto", "eager", "triton" or "native".

    Returns:
        `MoEPlan(offsets, row_slot, slot_row)`, int32. See its docstring.

    Raises:
        TypeError, ValueError: a wrong kind, dtype, shape or value, naming the argument; more than 2³¹ − 1 slots.
        RuntimeError: a named backend that cannot run here, with the reason.

    Memory: 8·N·K bytes, and in between 4·E bytes for 128 slots. Deterministic: stable, no atomics; no host sync but in
    the eager backend. The Triton backend can be captured in a CUDA graph after one call outside of it.
    """
    op = "moe_plan"
    check_index(op, top_k_index)
    checks.count(op, "num_experts", num_experts)
    checks.one_of(op, "check", check, ("auto", "sync"))
    offsets, row_slot, slot_row = torch.ops.fusedce.moe_plan(top_k_index, num_experts, backend=backend)
    if check == "sync":
        flags.check_flags()
    return MoEPlan(offsets, row_slot, slot_row)


def moe_plan_chunks(
    top_k_index: Tensor, num_experts: int, num_chunks: int, *, check: str = "auto", backend: str = "auto"
) -> MoEChunks:
    """The plans of a batch's chunks at once: chunk c is tokens [c·S, (c + 1)·S), S = ⌈N / num_chunks⌉, the last ones
    shorter or empty.

    Each chunk's plan is that of `moe_plan` of its tokens, in the chunk's own numbers, so that experts that run chunk by
    chunk give the same bits (Triton's kernels; cuBLAS chooses its own by the number of rows). All counts lie in one
    tensor and can cross to the host, or to other ranks, in one copy.

    Args:
        top_k_index: (N, K) int64, as for `moe_plan`; `moe_rank_index` makes of it the ids of ranks.
        num_experts: E, or the number of ranks.
        num_chunks: C, from 1 to 65535; it may be more than N.
        check: see `moe_plan`.
        backend: "auto", "eager", "triton" or "native".

    Returns:
        `MoEChunks`: `chunk(c)` is a `MoEPlan`, `counts` (C, E), `rank_counts(R)` (C, R). See its docstring.

    Raises:
        TypeError, ValueError, RuntimeError: as `moe_plan`.

    Memory and determinism are those of `moe_plan`; the launches are those of one plan, whatever C is.
    """
    op = "moe_plan_chunks"
    check_index(op, top_k_index)
    checks.count(op, "num_experts", num_experts)
    checks.count(op, "num_chunks", num_chunks, 65535, "2¹⁶ − 1")
    checks.one_of(op, "check", check, ("auto", "sync"))
    parts = torch.ops.fusedce.moe_plan_chunks(top_k_index, num_experts, num_chunks, backend=backend)
    if check == "sync":
        flags.check_flags()
    return MoEChunks(*parts)


def moe_rank_index(top_k_index: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """The ranks that each token is sent to, each once: what expert parallelism without duplicates plans by.

    Rank r owns experts [r·E/R, (r + 1)·E/R). A slot holds its expert's rank, or −1 where an earlier slot of the token
    goes to the same rank. `moe_plan(result, num_ranks)` is then the order of sending: its `counts` are the tokens for
    each rank, `moe_dispatch` gathers them, and `moe_combine` sums the ranks' partial results of a token.

    Args:
        top_k_index: (N, K) int64 expert ids in [0, E); −1, and any id out of range, stays as it is.
        num_experts: E, a multiple of num_ranks.
        num_ranks: R.

    Returns:
        (N, K) int64.

    Raises:
        TypeError, ValueError: a wrong kind, dtype, shape or value, naming the argument.

    Memory: N·K² bytes in between. Plain torch on every device; deterministic, no host sync.
    """
    op = "moe_rank_index"
    check_index(op, top_k_index)
    checks.count(op, "num_experts", num_experts)
    checks.count(op, "num_ranks", num_ranks, num_experts, "E")
    if num_experts % num_ranks:
        raise ValueError(f"fusedce.{op}: argument 'num_ranks' is {num_ranks}; expected a divisor of E = {num_experts}")
    inside = (top_k_index >= 0) & (top_k_index < num_experts)
    ranks = torch.where(inside, top_k_index // (num_experts // num_ranks), -1)
    again = (ranks[:, :, None] == ranks[:, None, :]).tril(-1).any(2)
    # Out of range for the experts is out of range for the ranks, so that the plan reports it.
    return torch.where(inside, torch.where(again, -1, ranks), torch.where(top_k_index < 0, top_k_index, num_ranks))


def check_index(op: str, top_k_index: Tensor, num_tokens: int | None = None) -> None:
    """TypeError or ValueError unless these are ids of K ≥ 1 experts a token."""
    checks.tensor(op, "top_k_index", top_k_index, (torch.int64,))
    checks.shape(op, "top_k_index", top_k_index, (num_tokens, None), "(N, K)")
    checks.count(op, "top_k_index.shape[1]", top_k_index.shape[1])


def check_scores(op: str, score: str, scale: float) -> None:
    """TypeError or ValueError for a score or scale that no router has."""
    checks.one_of(op, "score", score, SCORES)
    checks.positive_number(op, "scale", scale)


def check_groups(op: str, num_experts: int, num_groups: int, top_groups: int, group_best: int) -> None:
    """TypeError or ValueError unless E experts make such groups."""
    checks.count(op, "num_groups", num_groups)
    checks.count(op, "top_groups", top_groups, num_groups, "num_groups")
    checks.count(op, "group_best", group_best)
    if num_experts % num_groups:
        raise ValueError(
            f"fusedce.{op}: argument 'num_groups' is {num_groups}; expected a divisor of E = {num_experts}"
        )


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
