"""The plan of a mixture of experts over several ranks: who sends what to whom, and whose row it is there."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce import checks, flags
from fusedce.distributed.dispatchers import DISPATCHERS, Dispatcher, choose_dispatcher, slot_ranks
from fusedce.distributed.expert_counts import DTYPES, MAX_CHUNKS, Counts, DeviceCounts, Header, exchange_counts
from fusedce.distributed.slot_route import ELSEWHERE, SlotRoute, reordered
from fusedce.functional import moe_plan, moe_plan_chunks, moe_rank_index
from fusedce.functional.moe_route import check_index
from fusedce.ops import registry
from fusedce.ops.outside import report_outside
from fusedce.options import MoEChunks, MoEPlan

__all__ = ["ExpertChunk", "ExpertPlan", "auto_chunks", "expert_plan"]

OP = "expert_plan"
ROWS_PER_EXPERT = 1024  # of a chunk: from there on a grouped GEMM gains nothing by more rows
MOST_CHUNKS = 8


@dataclass(frozen=True)
class ExpertChunk:
    """Tokens [start, stop) of this rank, and the rows of all ranks that cross with them.

    send: the plan of the rows for each rank, in rank order; its sums bring a token's rows back together. sent,
    received: rows for and from each rank. experts: the plan of the received rows, as tokens of at most K slots, over
    this rank's experts.
    """

    start: int
    stop: int
    send: MoEPlan
    sent: tuple[int, ...]
    received: tuple[int, ...]
    experts: MoEPlan


@dataclass(frozen=True)
class ExpertPlan:
    """All that routing decides, integers only: keep it, and the layer runs again without routing, counts or sync.

    top_k_index: (N, K) as given. whole: the plan of all chunks' received rows at once, for the weight gradients.
    dispatcher, reason: who was chosen, and why. sizes: (N, D), the hidden states' that it was made for.
    """

    top_k_index: Tensor
    chunks: tuple[ExpertChunk, ...]
    route: SlotRoute
    whole: MoEPlan
    dispatcher: str
    reason: str
    sizes: tuple[int, int]
    num_experts: int

    @property
    def group(self) -> dist.ProcessGroup:
        return self.route.group

    @property
    def num_chunks(self) -> int:
        return len(self.chunks)

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.group.size()

    def whole_rows(self, chunk: int) -> Tensor:
        """(rows,) int64: where the rows of a chunk's `experts` are in `whole`."""
        earlier = sum(sum(each.received) for each in self.chunks[:chunk])
        slots = self.chunks[chunk].experts.row_slot.long() + earlier * self.whole.top_k
        return self.whole.slot_row.reshape(-1)[slots].long()


def auto_chunks(num_tokens: int, top_k: int, num_experts: int, num_ranks: int) -> int:
    """How many chunks for N tokens a rank, K experts a token of E on R ranks: of about 1024 rows an expert, 1 to 8.

    At an even load a rank's E / R experts serve N · K rows. num_tokens must be the same number on every rank: take the
    largest batch of a training run, not each rank's own.
    """
    return max(1, min(num_tokens * top_k * num_ranks // (num_experts * ROWS_PER_EXPERT), MOST_CHUNKS))


def expert_plan(
    hidden: Tensor,
    top_k_index: Tensor,
    num_experts: int,
    *,
    group: dist.ProcessGroup | None = None,
    dispatcher: str = "auto",
    num_chunks: int = 1,
    backend: str = "auto",
) -> ExpertPlan:
    """Plan the way of the tokens to their experts, rank r of `group` holding experts [r·E/R, (r + 1)·E/R) of R ranks.

    A collective call: every rank of the group makes it, with tokens or without.

    Args:
        hidden: (N, D) fp32, bf16, fp16 or fp64: this rank's tokens. Its sizes and dtype are used, not its values. N may
            differ from rank to rank and be 0.
        top_k_index: (N, K) int64 expert ids in [0, E) of all experts, or −1 for a slot that takes no part.
        num_experts: E, a multiple of R.
        group: the expert-parallel group, see `new_expert_group`; None for all ranks.
        dispatcher: "naive", "deduplicated" or "all_gather", see `DISPATCHERS`; "auto" is `choose_dispatcher`'s.
        num_chunks: C, from 1 to 64: the tokens in C parts of ⌈N / C⌉, of which one crosses while the experts work on
            another. The same on every rank; see `auto_chunks`.
        backend: of the ops that plan, see `fusedce.explain()`.

    Returns:
        `ExpertPlan`. With it `expert_parallel_moe` is planned once and may run any number of times.

    Raises:
        TypeError, ValueError: on this rank a wrong kind, dtype, device, shape or value, naming the argument; E that is
            no multiple of R. On every other rank of the group, at the same time, ValueError that names this rank; and
            on all of them where they do not agree on D, dtype, E, K, the chunks or the dispatcher. Ids out of range
            are refused in this call on a GPU too.

    Memory, S slots a row being K, or 1 for "naive": 8·S + 4 bytes for a row sent, 4·S for a row received and 4 for each
    of its slots here, the last two twice with several chunks; 16·N·K. One all-to-all of 1 KiB a pair of ranks and one
    copy to the host, which waits for it; then one all-to-all of the expert ids. Deterministic.
    """
    group = dist.group.WORLD if group is None else group
    assert group is not None
    header, error, request = Header(), None, None
    try:
        request = _Request.of(hidden, top_k_index, num_experts, group.size(), dispatcher, num_chunks, backend)
        header = request.header(hidden)
    except (TypeError, ValueError, RuntimeError) as raised:
        error = raised
    try:
        counts = exchange_counts(header, request.counts() if request else None, group)
    except ValueError as told:
        # Ids out of range, which a GPU has reported by now, in words of their own.
        flags.raise_pending()
        raise error or told from None
    assert request is not None
    return request.plan(hidden, counts, group)


@dataclass(frozen=True)
class _Request:
    """What is known before the ranks have talked. slots: the chunks' plans of all slots by rank; sending: of the rows
    that cross, which is the same but where a row stands for several slots.
    """

    top_k_index: Tensor
    num_experts: int
    num_ranks: int
    name: str
    reason: str
    backend: str
    sending: MoEChunks
    slots: MoEChunks

    @classmethod
    def of(
        cls, hidden: Tensor, top_k_index: Tensor, num_experts: int, num_ranks: int, name: str, num_chunks: int,
        backend: str,
    ) -> "_Request":  # fmt: skip
        checks.tensor(OP, "hidden", hidden, DTYPES)
        checks.shape(OP, "hidden", hidden, (None, None), "(N, D)")
        check_index(OP, top_k_index, hidden.shape[0])
        checks.same_device(OP, hidden=hidden, top_k_index=top_k_index)
        checks.count(OP, "num_experts", num_experts)
        checks.count(OP, "num_chunks", num_chunks, MAX_CHUNKS, "the most")
        checks.one_of(OP, "dispatcher", name, ("auto", *DISPATCHERS))
        if num_experts % num_ranks:
            raise ValueError(
                f"fusedce.{OP}: argument 'num_experts' is {num_experts}; expected a multiple of the group's "
                f"{num_ranks} ranks"
            )
        choice = registry.choose("moe_plan", backend, top_k_index.device, torch.float32)
        report_outside(choice, "top_k_index", top_k_index.reshape(-1), num_experts, -1, OP)
        name, reason = choose_dispatcher(num_ranks, top_k_index.shape[1]) if name == "auto" else (name, "asked for")
        dispatcher = DISPATCHERS[name]
        ranks = slot_ranks(top_k_index, num_experts, num_ranks)
        slots = sending = moe_plan_chunks(ranks, num_ranks, num_chunks, backend=backend)
        if dispatcher.once_per_rank and not dispatcher.to_all:
            once = moe_rank_index(top_k_index, num_experts, num_ranks)
            sending = moe_plan_chunks(once, num_ranks, num_chunks, backend=backend)
        return cls(top_k_index, num_experts, num_ranks, name, reason, backend, sending, slots)

    @property
    def dispatcher(self) -> Dispatcher:
        return DISPATCHERS[self.name]

    def header(self, hidden: Tensor) -> Header:
        """What the other ranks are told."""
        (num_tokens, depth), top_k = hidden.shape, self.top_k_index.shape[1]
        sizes = (depth, self.num_experts, top_k, self.sending.num_chunks, tuple(DISPATCHERS).index(self.name))
        return Header(0, DTYPES.index(hidden.dtype), *sizes, num_tokens)

    def counts(self) -> DeviceCounts:
        """What the device knows of it."""
        bad = (self.top_k_index < -1) | (self.top_k_index >= self.num_experts)
        return DeviceCounts(self.sending.counts, self.slots.counts, bad.any())

    def plan(self, hidden: Tensor, counts: Counts, group: dist.ProcessGroup) -> ExpertPlan:
        """The plan, once the ranks' counts are known. Nothing here waits for the GPU."""
        if self.dispatcher.to_all:
            sends, sent, received = self._to_all(counts)
        else:
            sends, (sent, received) = self._to_some(counts), (counts.sent_rows, counts.received_rows)
        route = SlotRoute(self._slots(sends, sent), tuple(self.top_k_index.shape), sent, received, group)
        local = self.num_experts // self.num_ranks
        ids = route.to_experts(torch.where(self.top_k_index < 0, -1, self.top_k_index % local), -1)
        served = [sum(line) for line in counts.received_slots]
        plans = [
            _shortened(moe_plan(part, local, backend=self.backend), rows)
            for part, rows in zip(ids.split([sum(line) for line in received]), served, strict=True)
        ]
        chunks = tuple(
            ExpertChunk(*self.sending.tokens(at), sends[at], sent[at], received[at], plans[at])
            for at in range(len(plans))
        )
        whole = plans[0]
        if len(plans) > 1:
            whole = _shortened(moe_plan(ids, local, backend=self.backend), sum(served))
        return ExpertPlan(
            self.top_k_index, chunks, route, whole, self.name, self.reason,
            (hidden.shape[0], hidden.shape[1]), self.num_experts,
        )  # fmt: skip

    def _to_some(self, counts: Counts) -> list[MoEPlan]:
        return [_shortened(self.sending.chunk(at), sum(line)) for at, line in enumerate(counts.sent_rows)]

    def _to_all(self, counts: Counts) -> tuple[list[MoEPlan], tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Every rank is sent as many tokens as the fullest has in a chunk; those past a rank's own take no part."""
        num_ranks, num_chunks = self.num_ranks, self.sending.num_chunks
        length = -(-max(counts.num_tokens) // num_chunks)
        token = torch.arange(length, device=self.top_k_index.device, dtype=torch.int32)
        rank = torch.arange(num_ranks, device=self.top_k_index.device, dtype=torch.int32)
        row_slot = (rank[:, None] + num_ranks * token[None, :]).reshape(-1)
        slot_row = token[:, None] + length * rank[None, :]
        offsets = length * torch.arange(num_ranks + 1, device=token.device, dtype=torch.int32)
        table = ((length,) * num_ranks,) * num_chunks
        return [MoEPlan(offsets, row_slot, slot_row)] * num_chunks, table, table

    def _slots(self, sends: list[MoEPlan], sent: tuple[tuple[int, ...], ...]) -> Tensor:
        """(sent rows, S) as `SlotRoute` has them, S = K where a row stands for all experts of a rank, else 1."""
        top_k, device = self.top_k_index.shape[1], self.top_k_index.device
        ranks = torch.cat((slot_ranks(self.top_k_index, self.num_experts, self.num_ranks).reshape(-1), self._nobody))
        parts = []
        for at, (plan, line) in enumerate(zip(sends, sent, strict=True)):
            start, stop = self.sending.tokens(at)
            slot = plan.row_slot.long()
            if not self.dispatcher.once_per_rank:
                parts.append((start * top_k + slot)[:, None])
                continue
            token = slot // plan.top_k
            slots = (start + token)[:, None] * top_k + torch.arange(top_k, device=device)
            # past the chunk's end: a token that fills up
            slots = torch.where((token < stop - start)[:, None], slots, ELSEWHERE)
            to = torch.arange(len(line), device=device).repeat_interleave(plan.counts, output_size=sum(line))
            parts.append(torch.where(ranks[slots] == to[:, None], slots, ELSEWHERE))
        return reordered(torch.cat(parts), sent)

    @property
    def _nobody(self) -> Tensor:
        """The rank of ELSEWHERE, behind those of the slots."""
        return self.top_k_index.new_full((1,), -1)


def _shortened(plan: MoEPlan, num_rows: int) -> MoEPlan:
    """The plan without room for slots that take no part: num_rows of them do, as the ranks have counted."""
    return MoEPlan(plan.offsets, plan.row_slot[:num_rows], plan.slot_row)
