"""Seconds of a step on one rank, by part: a roofline for each op, the exchange of rows overlapped with the experts'
GEMMs by the pipeline model, gathers of weights hidden behind compute as far as they fit, the pipeline's bubble.
"""

from dataclasses import dataclass

from fusedce.plan.flops import BACKWARD_ATTENTION, BACKWARD_GEMM, forward, mfu
from fusedce.plan.gpus import Gpu
from fusedce.plan.layout import Job, Layout
from fusedce.plan.measured import HBM_SHARE, LINK_SHARE, rate

BF16 = 2
# Passes of a layer over its residual stream that are no product: norms, rotation, residual sums, SwiGLU and their
# backward, each a read or a write of N · D elements. Counted off the model's code, forward and backward.
STREAM_PASSES = (24, 44)


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer step by part, in the order of the bar: compute first, then what is not hidden behind it.

    rates: where the speed of each op comes from; model_mfu, hardware_mfu, not_causal_mfu: see `fusedce.plan.flops`.
    """

    parts: dict[str, float]
    rates: dict[str, str]
    tokens_per_second: float
    model_mfu: float
    hardware_mfu: float
    not_causal_mfu: float

    @property
    def total(self) -> float:
        """Seconds."""
        return sum(self.parts.values())


def step(job: Job, layout: Layout) -> Step:
    """The prediction for a layout that can run."""
    model, gpu = job.model, job.gpu
    flops = forward(model, job.seq_len)
    recompute = layout.recomputed / layout.stage_layers(model)
    compute, rates = _compute(job, layout, recompute)
    exposed = _exposed(job, layout, recompute, compute)
    micro = layout.micro_batches(job)
    # The last round may have more ranks than sequences: the others run along without a loss.
    parts = {name: micro * value for name, value in (compute | exposed).items()}
    # 1F1B: of m + P − 1 slots, P − 1 are empty.
    parts["bubble"] = sum(parts.values()) * (layout.pp - 1) / micro
    parts["optimizer"] = _optimizer(job, layout)
    total = sum(parts.values())
    per_card = job.tokens_per_second_of(total) / layout.world
    return Step(
        parts={name: value for name, value in parts.items() if value > 0},
        rates=rates,
        tokens_per_second=job.tokens_per_second_of(total),
        model_mfu=mfu(flops.model, per_card, gpu.peak),
        hardware_mfu=mfu(flops.executed(recompute), per_card, gpu.peak),
        not_causal_mfu=mfu(flops.not_causal(), per_card, gpu.peak),
    )


def overlapped(exchange: float, gemms: float, chunks: int) -> float:
    """Seconds of an expert layer whose tokens go through in `chunks` parts: the longer of both, and one part of the
    shorter for the ramp. Dispatch and combine share one link. One chunk: their sum.
    """
    return max(exchange, gemms) + min(exchange, gemms) / chunks


def rows_sent(ep: int, top_k: int) -> float:
    """Rows that a rank sends away for each token and direction: one to each of its experts that lives elsewhere."""
    return top_k * (ep - 1) / ep


def link_rate(gpu: Gpu, ranks: int) -> float:
    """Bytes/s one way between `ranks` cards that are next to each other: of the node's links, or of the network."""
    return LINK_SHARE * (gpu.link if ranks <= gpu.per_node else gpu.network)


def _compute(job: Job, layout: Layout, recompute: float) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of one micro-batch's compute on the fullest stage."""
    model, gpu, tokens = job.model, job.gpu, layout.local_tokens(job)
    flops = forward(model, job.seq_len)
    layers = layout.stage_layers(model) / model.layers
    # A chunk is dispatched and computed again by itself: within a recomputed layer all but the last once more.
    again = _chunks_again(layout, recompute)
    work = {
        "attention": layers * flops.scores * (1 + BACKWARD_ATTENTION + recompute),
        "projections": layers * (flops.projections + flops.recurrence) * (1 + BACKWARD_GEMM + recompute),
        "experts": layers * flops.experts * (1 + BACKWARD_GEMM + recompute + again),
        "loss": flops.head * (1 + BACKWARD_GEMM),
    }
    rates = {part: rate(part, gpu, tokens) for part, amount in work.items() if amount}
    seconds = {part: tokens * work[part] / layout.tp / (rates[part].share * gpu.peak) for part in rates}
    passes = STREAM_PASSES[0] * (1 + recompute) + STREAM_PASSES[1]
    stream = BF16 * tokens * model.hidden / layout.tp * layout.stage_layers(model)
    seconds["elementwise"] = passes * stream / (HBM_SHARE * gpu.hbm)
    return seconds, {part: found.source for part, found in rates.items()}


def _chunks_again(layout: Layout, recompute: float) -> float:
    """Extra forwards of the experts that chunks cost, as a share of one."""
    if layout.chunks == 1:
        return 0.0
    return recompute * (1 - 1 / layout.chunks) + (1 - recompute)


def _exposed(job: Job, layout: Layout, recompute: float, compute: dict[str, float]) -> dict[str, float]:
    """Seconds of one micro-batch's communication that compute does not hide."""
    model, gpu, tokens = job.model, job.gpu, layout.local_tokens(job)
    layers, moe = layout.stage_layers(model), model.moe_layers / model.layers
    parts: dict[str, float] = {}
    if layout.ep > 1:
        once = BF16 * tokens * model.hidden * rows_sent(layout.ep, model.top_k) / link_rate(gpu, layout.ep * layout.tp)
        # dispatch and combine, forward, again, and backward
        exchange = 2 * once * layers * moe * (2 + recompute + _chunks_again(layout, recompute))
        together = overlapped(exchange, compute["experts"], layout.chunks)
        parts["exchange"] = together - compute["experts"]
    if layout.cp > 1:
        # Keys and values of the other ranks, once a forward; their gradients come back.
        attention_layers = layers * (1 - model.linear_layers / model.layers)
        kv = 2 * BF16 * model.kv / layout.tp * tokens * (layout.cp - 1) * attention_layers
        parts["context"] = max(0.0, kv * (3 + recompute) / link_rate(gpu, layout.cp * layout.tp) - compute["attention"])
    if layout.tp > 1:
        moved = 2 * (layout.tp - 1) / layout.tp * BF16 * tokens * model.hidden
        parts["tensor"] = 2 * (2 + recompute) * layers * moved / link_rate(gpu, layout.tp)
    busy = sum(compute.values()) - compute.get("experts", 0.0)
    parts["weights"] = max(0.0, _gathers(job, layout) - busy)
    return parts


def _gathers(job: Job, layout: Layout) -> float:
    """Seconds that weights and gradients of one micro-batch travel: bf16 gathered for the forward and for the backward,
    the gradient reduced once.
    """
    model, gpu = job.model, job.gpu
    share = layout.stage_layers(model) / model.layers / layout.tp
    per_param = 2 * BF16 + job.policy.reduce
    dense = (model.dense_params * share + 2 * model.head_params / layout.tp) * per_param
    experts = model.moe_layers * model.routed_params * share / layout.ep * per_param
    return _ring(gpu, layout.stage, 1, dense) + _ring(gpu, layout.stage // layout.ep, layout.ep, experts)


def _ring(gpu: Gpu, ranks: int, stride: int, size: float) -> float:
    """Seconds in which each of `ranks` cards, every `stride`-th of the machine, gets `size` bytes from all the others.

    Within a node all of it comes over the links; of what other nodes have, a card's own adapter brings the part that
    its neighbours of the same group do not bring.
    """
    if ranks == 1:
        return 0.0
    in_node = max(1, min(ranks, gpu.per_node // stride))
    nodes = ranks / in_node
    from_network = size * (1 - 1 / nodes) / in_node / (LINK_SHARE * gpu.network)
    from_links = size * (1 - 1 / ranks) / (LINK_SHARE * gpu.link) if in_node > 1 else 0.0
    return max(from_network, from_links)


def _optimizer(job: Job, layout: Layout) -> float:
    """Adam reads the gradient, reads and writes the rest."""
    policy = job.policy
    moved = policy.grad + 2 * (policy.weight + policy.optimizer)
    return moved * job.model.params / layout.world / (HBM_SHARE * job.gpu.hbm)
