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

from fusedce import checks, flags
from fusedce.distributed.collectives import Transfer, local_part, start_all_gather, start_all_to_all
from fusedce.distributed.dispatchers import DISPATCHERS
from fusedce.distributed.expert_plan import ExpertChunk, ExpertPlan
from fusedce.functional.autocast import autocast
from fusedce.options import MoEPlan

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
    backend: str = "auto",
) -> Tensor:
    """out[n] = Σ_k w[n,k] · down_e · (silu(gate_e · x_n) · (up_e · x_n)), e the expert of slot (n, k), on whichever rank.

    A collective call, forward and backward: every rank of the plan's group makes it, also one without tokens, and lets
    its result take part in the loss.

    Args:
        hidden: (N, D), this rank's tokens, as the plan was made for them.
        gate_up_proj: (E/R, 2F, D), hidden's dtype: this rank's experts. A DTensor is taken for its local part.
        down_proj: (E/R, D, F), likewise. Under torch.autocast the three are cast to its dtype first.
        top_k_weights: (N, K), any of the float dtypes, the same on every rank.
        plan: of `expert_plan`, for the routing of these tokens.
        backend: of the experts' ops, see `fusedce.explain()`.

    Returns:
        (N, D) in hidden's dtype, differentiable in the four tensors. Expert gradients are sums over the tokens of all
        ranks of the group, for the losses that the ranks differentiate: if each rank's loss is a mean over its own
        tokens and the other parameters' gradients are averaged over the ranks, divide the experts' by R. An expert
        without tokens gets gradients that are exactly 0. Double backward raises RuntimeError.

    Raises:
        TypeError, ValueError, RuntimeError: as `fusedce.moe_experts`, on this rank alone: check shapes before.

    Memory, s bytes an element, A received rows, V their slots: s·(A·D + V·2F) are kept for the backward, and with several
    chunks the backward takes s·(A·D + V·(2F + D)) more. Without gradients two chunks' rows are held at once. A forward is
    2·C + 1 collectives, a backward too; no sync, no counts.

    Deterministic. A token's result does not depend on the number of chunks, as long as a row of the experts' GEMMs does
    not depend on the other rows: bitwise so with the Triton kernels. Weight gradients are one product over the rows of
    all chunks, in fp32, and rounded once.
    """
    op = "expert_parallel_moe"
    gate_up_proj, down_proj = local_part(gate_up_proj), local_part(down_proj)
    hidden, gate_up_proj, down_proj = autocast(hidden, gate_up_proj, down_proj)
    if not isinstance(plan, ExpertPlan):
        raise TypeError(f"fusedce.{op}: argument 'plan' has {checks.describe(plan)}; expected an ExpertPlan")
    checks.tensor(op, "hidden", hidden, checks.FLOATS)
    checks.shape(op, "hidden", hidden, plan.sizes, "(N, D)")
    checks.tensor(op, "down_proj", down_proj, checks.FLOATS)
    experts, depth = plan.num_local_experts, hidden.shape[1]
    checks.shape(op, "down_proj", down_proj, (experts, depth, None), "(E/R, D, F)")
    checks.tensor(op, "gate_up_proj", gate_up_proj, checks.FLOATS)
    checks.shape(op, "gate_up_proj", gate_up_proj, (experts, 2 * down_proj.shape[2], depth), "(E/R, 2F, D)")
    checks.tensor(op, "top_k_weights", top_k_weights, checks.FLOATS)
    checks.shape(op, "top_k_weights", top_k_weights, tuple(plan.top_k_index.shape), "(N, K)")
    tensors = (hidden, gate_up_proj, down_proj, top_k_weights)
    checks.same_dtype(op, hidden=hidden, gate_up_proj=gate_up_proj, down_proj=down_proj)
    checks.same_device(op, hidden=hidden, gate_up_proj=gate_up_proj, down_proj=down_proj, top_k_weights=top_k_weights)
    flags.raise_pending()
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Experts.apply(*tensors, plan, backend)
    return _forward(*tensors, plan, backend, keep=False)[0]


class _Experts(torch.autograd.Function):
    """Saves the received rows and the experts' pre-activations; the plan is the graph's, not a saved tensor, so that a
    checkpoint's recompute has the same tensors to save."""

    @staticmethod
    def forward(ctx, hidden, gate_up_proj, down_proj, top_k_weights, plan, backend):  # type: ignore[no-untyped-def]
        out, *kept = _forward(hidden, gate_up_proj, down_proj, top_k_weights, plan, backend, keep=True)
        ctx.save_for_backward(gate_up_proj, down_proj, *kept)
        ctx.plan, ctx.backend = plan, backend
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        wanted = list(ctx.needs_input_grad[:4])
        backward = _Backward(*ctx.saved_tensors, ctx.plan, ctx.backend, wanted[1:3])
        grads = backward.run(d_out)
        return *(grad if want else None for grad, want in zip(grads, wanted, strict=True)), None, None


def _forward(
    hidden: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    plan: ExpertPlan,
    backend: str,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (N, D); the received rows (A, D), their routing weights (A, S) and pre-activations (V, 2F), not all of the
    first and none of the last without `keep`."""
    weights = plan.route.to_experts(top_k_weights, 0.0)
    weights_of = weights.split([sum(chunk.received) for chunk in plan.chunks])
    pre_acts: list[Tensor] = []

    def compute(at: int, rows: Tensor) -> Tensor:
        experts = plan.chunks[at].experts
        results, pre_act = torch.ops.fusedce.moe_experts(
            rows, gate_up_proj, down_proj, weights_of[at], *_fields(experts), backend=backend
        )
        if keep:
            pre_acts.append(pre_act)
        return torch.ops.fusedce.moe_combine(results, experts.row_slot, experts.slot_row, backend=backend)

    received = Received.of(hidden, plan, keep)
    out = _pipeline(hidden, plan, received, compute, backend)
    return out, received.buffer, weights, _joined(pre_acts) if keep else hidden.new_empty(0)


@dataclass(frozen=True)
class _Backward:
    """What the backward has of the forward. want_weights: of gate_up_proj and down_proj, whether this rank wants them."""

    gate_up_proj: Tensor
    down_proj: Tensor
    rows: Tensor
    weights: Tensor
    pre_act: Tensor
    plan: ExpertPlan
    backend: str
    want_weights: list[bool]

    def run(self, d_out: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """d_hidden, d_gate_up_proj, d_down_proj, d_top_k_weights."""
        plan, chunks = self.plan, self.plan.chunks
        rows = [self.rows, self.weights]
        rows_of, weights_of = (t.split([sum(chunk.received) for chunk in chunks]) for t in rows)
        pre_act_of = self.pre_act.split([chunk.experts.row_slot.shape[0] for chunk in chunks])
        once = len(chunks) == 1
        d_weights: list[Tensor] = []
        d_projections: list[Tensor] = []

        def compute(at: int, d_results: Tensor) -> Tensor:
            mask = [True, *(self.want_weights if once else (False, False)), True]
            grads = self._experts(d_results, rows_of[at], weights_of[at], chunks[at].experts, pre_act_of[at], mask)
            d_weights.append(grads[3])
            d_projections.extend(grads[1:3])
            return grads[0]

        def meanwhile() -> None:
            """The weight gradients of all chunks, while the last one's results cross."""
            if once or not any(self.want_weights):
                return
            assert plan.of_chunks is not None
            pre_act, mask = self.pre_act[plan.of_chunks], [False, *self.want_weights, False]
            d_projections[:] = self._experts(
                received.buffer, self.rows, self.weights, plan.whole, pre_act, mask
            )[1:3]  # fmt: skip

        received = Received.of(d_out, plan, keep=not once)
        d_hidden = _pipeline(d_out, plan, received, compute, self.backend, meanwhile)
        return d_hidden, d_projections[0], d_projections[1], plan.route.from_experts(_joined(d_weights))

    def _experts(
        self, d_results: Tensor, rows: Tensor, weights: Tensor, plan: MoEPlan, pre_act: Tensor, mask: list[bool]
    ) -> list[Tensor]:
        """d_rows (A, D), d_gate_up_proj, d_down_proj, d_weights (A, S) of d_results (A, D), the sums' gradients."""
        d_slots = torch.ops.fusedce.moe_dispatch(d_results, plan.row_slot, plan.slot_row, backend=self.backend)
        return torch.ops.fusedce.moe_experts_backward(
            d_slots, rows, self.gate_up_proj, self.down_proj, weights, *_fields(plan), pre_act, mask, self.backend
        )


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
    """The tokens' (N, D) sums of what `compute` makes of their rows. meanwhile: called before the last rows are back."""
    out = tokens.new_empty(tokens.shape)
    coming = _send(tokens, plan, 0, received, backend)
    leaving: Transfer | None = None
    for at in range(plan.num_chunks):
        following = _send(tokens, plan, at + 1, received, backend) if at + 1 < plan.num_chunks else None
        results = compute(at, coming.wait())
        back = _give_back(results, plan.chunks[at], plan.group)
        if leaving is not None:
            _collect(out, leaving, plan.chunks[at - 1], backend)
        leaving = back
        if following is not None:
            coming = following
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


def _fields(plan: MoEPlan) -> tuple[Tensor, Tensor, Tensor]:
    return plan.offsets, plan.row_slot, plan.slot_row


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
