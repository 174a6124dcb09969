"""The experts over several ranks, chunk by chunk: while one chunk's rows are with the experts, the next ones cross.

    on the wire:    D0 D1 C0 D2 C1    C2        D: rows to the experts' ranks; C: their results back
    in the kernels:    G0    G1    G2           G: the experts

Forward and backward are one loop with other rows: the backward sends the upstream gradients on the tokens' way and
brings the tokens' gradients back. The collectives run on the stream of their process group, in the order in which they
are issued here; the order of issue is the picture's. Every rank issues every collective, whatever it has to send and
whichever gradients it wants itself, for another rank may want them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce import arch, checks, flags
from fusedce.distributed.collectives import Transfer, local_part, start_all_gather, start_all_to_all
from fusedce.distributed.dispatchers import DISPATCHERS
from fusedce.distributed.expert_group import MOST_BLOCKS
from fusedce.distributed.expert_plan import ExpertChunk, ExpertPlan
from fusedce.distributed.local_experts import LocalWeights
from fusedce.functional.autocast import autocast
from fusedce.functional.moe import check_experts
from fusedce.options import ExpertOptions

__all__ = ["expert_parallel_moe"]

# A chunk's number and received rows -> its results, as many rows.
Compute = Callable[[int, Tensor], Tensor]


def expert_parallel_moe(
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    plan: ExpertPlan,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "swiglu",
    limit: float = 7.0,
    interleaved: bool = False,
    save: str = "pre_activation",
    backend: str = "auto",
) -> Tensor:
    """`fusedce.moe_experts` with combine over the ranks of a group: out[n] = Σ_k w[n,k] · expert_e(hidden[n]), e being
    the expert of slot (n, k), on whichever rank.

    A collective call, forward and backward: every rank of the plan's group makes it, also one without tokens, and lets
    its result take part in the loss.

    Args:
        hidden: (N, D), this rank's tokens, as the plan was made for them.
        gate_up_proj: (E/R, 2F, D), hidden's dtype: this rank's experts. A DTensor is taken for its local part.
        down_proj: (E/R, D, F), likewise. Under torch.autocast the three are cast to its dtype first.
        top_k_weights: (N, K), any of the float dtypes, the same on every rank.
        plan: of `expert_plan`, for the routing of these tokens.
        gate_up_bias, down_bias: (E/R, 2F) and (E/R, D), or None.
        activation, limit, interleaved, save: as in `fusedce.moe_experts`, the same on every rank.
        backend: of the experts' ops, see `fusedce.explain()`.

    Returns:
        (N, D) in hidden's dtype, differentiable in the four tensors. Expert gradients are sums over the tokens of all
        ranks of the group, for the losses that the ranks differentiate: if each rank's loss is a mean over its own
        tokens and the other parameters' gradients are averaged over the ranks, divide the experts' by R. An expert
        without tokens gets gradients that are exactly 0. Double backward raises RuntimeError.

    Raises:
        TypeError, ValueError, RuntimeError: as `fusedce.moe_experts`, on this rank alone: check shapes before.

    Memory, s bytes an element, A received rows, V their slots: s·(A·D + V·2F) are kept for the backward, without the
    second with save "plan"; with several chunks the backward holds as much again. Without gradients two chunks' rows
    are held at once. A forward is 2·C + 1 collectives, a backward too; no sync, no counts.

    Deterministic. A token's result does not depend on the number of chunks, as long as a row of the experts' GEMMs does
    not depend on the other rows: bitwise so with the Triton kernels. Weight gradients are one product over the rows of
    all chunks, in fp32, and rounded once.
    """
    op = "expert_parallel_moe"
    if not isinstance(plan, ExpertPlan):
        raise TypeError(f"fusedce.{op}: argument 'plan' has {checks.describe(plan)}; expected an ExpertPlan")
    tensors: tuple[Tensor | None, ...] = (gate_up_proj, down_proj, gate_up_bias, down_bias)
    tensors = tuple(None if t is None else local_part(t) for t in tensors)
    hidden, gate_up_proj, down_proj, gate_up_bias, down_bias = autocast(hidden, *tensors)
    weights = (gate_up_proj, down_proj, gate_up_bias, down_bias)
    settings = ExpertOptions(activation, limit, bool(interleaved), save, combine=True)
    check_experts(op, hidden, *weights, top_k_weights, (*plan.top_k_index.shape, plan.num_local_experts), settings)
    checks.shape(op, "hidden", hidden, plan.sizes, "(N, D)")
    checks.same_device(op, hidden=hidden, plan=plan.top_k_index)
    flags.raise_pending()
    leaves = (hidden, top_k_weights, *weights)
    if torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves):
        return _Experts.apply(*leaves, plan, settings, backend)
    return _forward(hidden, top_k_weights, LocalWeights(*weights, settings, backend), plan, keep=False)[0]


class _Experts(torch.autograd.Function):
    """Saves the received rows and the experts' pre-activations; the plan is the graph's, not a saved tensor, so that a
    checkpoint's recompute has the same tensors to save."""

    @staticmethod
    def forward(ctx, hidden, top_k_weights, gate_up, down, gate_up_bias, down_bias, plan, settings, backend):  # type: ignore[no-untyped-def]
        experts = LocalWeights(gate_up, down, gate_up_bias, down_bias, settings, backend)
        out, rows, weights, pre_acts = _forward(hidden, top_k_weights, experts, plan, keep=True)
        ctx.save_for_backward(rows, weights, *experts.tensors, *pre_acts)
        ctx.plan, ctx.settings, ctx.backend = plan, settings, backend
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        wanted = ctx.needs_input_grad[:6]
        rows, weights, gate_up, down, gate_up_bias, down_bias, *pre_acts = ctx.saved_tensors
        experts = LocalWeights(gate_up, down, gate_up_bias, down_bias, ctx.settings, ctx.backend)
        grads = _Backward(experts, rows, weights, pre_acts, ctx.plan, wanted[2:]).run(d_out)
        return *(grad if want else None for grad, want in zip(grads, wanted, strict=True)), None, None, None


def _forward(
    hidden: Tensor, top_k_weights: Tensor, experts: LocalWeights, plan: ExpertPlan, *, keep: bool
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """out (N, D); the received rows (A, D), their routing weights (A, S) and each chunk's pre-activations (V, 2F), not
    all of the first and none of the last without `keep`."""
    weights = plan.route.to_experts(top_k_weights, 0.0)
    weights_of = weights.split([sum(chunk.received) for chunk in plan.chunks])
    pre_acts: list[Tensor] = []

    def compute(at: int, rows: Tensor) -> Tensor:
        results, pre_act = experts.forward(rows, weights_of[at], plan.chunks[at].experts)
        if keep:
            pre_acts.append(pre_act)
        return results

    received = Received.of(hidden, plan, keep)
    out = _pipeline(hidden, plan, received, compute, experts.backend)
    return out, received.buffer, weights, pre_acts


@dataclass(frozen=True)
class _Backward:
    """What the backward has of the forward. wanted: which gradients of the experts' tensors this rank wants."""

    experts: LocalWeights
    rows: Tensor
    weights: Tensor
    pre_acts: list[Tensor]
    plan: ExpertPlan
    wanted: tuple[bool, ...]

    def run(self, d_out: Tensor) -> tuple[Tensor, ...]:
        """d_hidden, d_top_k_weights and the gradients of the experts' tensors."""
        plan, chunks = self.plan, self.plan.chunks
        once = len(chunks) == 1
        sizes = [sum(chunk.received) for chunk in chunks]
        rows_of, weights_of = self.rows.split(sizes), self.weights.split(sizes)
        d_weights: list[Tensor] = []
        d_experts: list[Tensor] = []

        def compute(at: int, d_results: Tensor) -> Tensor:
            mask = self._mask(tokens=True, experts=once)
            grads = self.experts.backward(
                d_results, rows_of[at], weights_of[at], chunks[at].experts, self.pre_acts[at], mask
            )
            d_weights.append(grads[3])
            d_experts[:] = (*grads[1:3], *grads[4:])
            return grads[0]

        def meanwhile() -> None:
            """The experts' gradients of all chunks, while the last one's results cross."""
            if not once and any(self.wanted):
                mask = self._mask(tokens=False, experts=True)
                grads = self.experts.backward(
                    received.buffer, self.rows, self.weights, plan.whole, self._whole_pre_act(), mask
                )
                d_experts[:] = (*grads[1:3], *grads[4:])

        received = Received.of(d_out, plan, keep=not once and any(self.wanted))
        d_hidden = _pipeline(d_out, plan, received, compute, self.experts.backend, meanwhile)
        return d_hidden, plan.route.from_experts(_joined(d_weights)), *d_experts

    def _whole_pre_act(self) -> Tensor:
        """(V, 2F) the chunks' pre-activations in the order of the rows of `plan.whole`."""
        if not self.experts.settings.keeps_pre_act:
            return self.pre_acts[0]
        whole = self.rows.new_empty((self.plan.whole.row_slot.shape[0], self.pre_acts[0].shape[1]))
        for at, pre_act in enumerate(self.pre_acts):
            whole.index_copy_(0, self.plan.whole_rows(at), pre_act)
        return whole

    def _mask(self, *, tokens: bool, experts: bool) -> list[bool]:
        """Of rows, the projections, the slots' weights and the biases."""
        gate_up, down, gate_up_bias, down_bias = (want and experts for want in self.wanted)
        return [tokens, gate_up, down, tokens, gate_up_bias, down_bias]


@dataclass(frozen=True)
class Received:
    """Where the chunks' rows arrive: each chunk's place in one buffer, or two places in turn.

    Two are enough: when chunk i + 2 begins to arrive, the experts' kernels on chunk i are queued already, and the
    collective waits for what is queued before it.
    """

    buffer: Tensor
    places: tuple[Tensor, ...]

    @classmethod
    def of(cls, like: Tensor, plan: ExpertPlan, keep: bool) -> "Received":
        """keep: whether all rows are wanted afterwards, as `buffer` (A, D)."""
        sizes = [sum(chunk.received) for chunk in plan.chunks]
        if keep:
            buffer = like.new_empty((sum(sizes), like.shape[1]))
            return cls(buffer, buffer.split(sizes))
        buffer = like.new_empty((min(2, len(sizes)), max(sizes), like.shape[1]))
        return cls(buffer, tuple(buffer[at % 2, :size] for at, size in enumerate(sizes)))


def _pipeline(
    tokens: Tensor,
    plan: ExpertPlan,
    received: Received,
    compute: Compute,
    backend: str,
    meanwhile: Callable[[], None] = lambda: None,
) -> Tensor:
    """The tokens' (N, D) sums of what `compute` makes of their rows. meanwhile: called while the last ones cross."""
    out = tokens.new_empty(tokens.shape)
    coming = _send(tokens, plan, 0, received, backend)
    leaving: Transfer | None = None
    # Beside a chunk's experts the next one's rows arrive and the last one's leave.
    busy = MOST_BLOCKS if plan.num_chunks > 1 else 0
    for at in range(plan.num_chunks):
        following = _send(tokens, plan, at + 1, received, backend) if at + 1 < plan.num_chunks else None
        with arch.keep_units_free(busy):
            results = compute(at, coming.wait())
        back = _give_back(results, plan.chunks[at], plan.group)
        if leaving is not None:
            _collect(out, leaving, plan.chunks[at - 1], backend)
        leaving = back
        if following is not None:
            coming = following
    with arch.keep_units_free(busy):
        meanwhile()
    assert leaving is not None
    _collect(out, leaving, plan.chunks[-1], backend)
    return out


def _send(tokens: Tensor, plan: ExpertPlan, at: int, received: Received, backend: str) -> Transfer:
    """The chunk's rows on their way to the experts' ranks."""
    chunk, place = plan.chunks[at], received.places[at]
    part = tokens[chunk.start : chunk.stop]
    if DISPATCHERS[plan.dispatcher].to_all:
        missing = chunk.send.num_tokens - part.shape[0]
        rows = torch.nn.functional.pad(part, (0, 0, 0, missing)) if missing else part.contiguous()
        return start_all_gather(place, rows, plan.group)
    rows = torch.ops.fusedce.moe_dispatch(part, chunk.send.row_slot, chunk.send.slot_row, backend=backend)
    return start_all_to_all(place, rows, chunk.received, chunk.sent, plan.group)


def _give_back(results: Tensor, chunk: ExpertChunk, group: dist.ProcessGroup) -> Transfer:
    """The experts' results on their way to the tokens' ranks.

    After an all-gather too, where a reduce-scatter would do: it moves as many bytes over a ring, but sums in the rows'
    dtype and in an order of its own, where `_collect` sums in fp32, in rank order, and rounds once.
    """
    out = results.new_empty((sum(chunk.sent), results.shape[1]))
    return start_all_to_all(out, results, chunk.sent, chunk.received, group)


def _collect(out: Tensor, back: Transfer, chunk: ExpertChunk, backend: str) -> None:
    """The sums of the chunk's rows, in their place in `out`."""
    send = chunk.send
    sums = torch.ops.fusedce.moe_combine(back.wait(), send.row_slot, send.slot_row, backend=backend)
    out[chunk.start : chunk.stop] = sums[: chunk.stop - chunk.start]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
