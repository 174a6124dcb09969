"""Bytes of one rank, by part and by moment; the largest moment is the peak.

The state of FSDP2 over all ranks of a stage: shards stay, a layer's weights are gathered in bf16 while it runs, its
gradient is made whole in bf16 and reduced in fp32 while the layer before it runs. `fusedce plan --run` holds this
against torch's own tracker.
"""

import math
from dataclasses import dataclass

from fusedce import env
from fusedce.plan.layout import Job, Layout
from fusedce.plan.models import Model
from fusedce.plan.widths import Widths, widths

BF16 = 2
FP32 = 4
# Parts that a tracker of tensors does not see: they live inside the ops, or outside torch.
HIDDEN_PARTS = ("inside kernels", "reserve")

Parts = dict[str, float]


@dataclass(frozen=True)
class Moment:
    """A point of the step where memory may be highest: its name and bytes by part."""

    name: str
    parts: Parts

    @property
    def total(self) -> float:
        """Bytes, all parts."""
        return sum(self.parts.values())

    @property
    def visible(self) -> float:
        """Bytes that torch's tensors hold between ops."""
        return sum(value for name, value in self.parts.items() if name not in HIDDEN_PARTS)


@dataclass(frozen=True)
class Weights:
    """Parameters of one rank's copy of things while they are gathered: a layer's dense part and its share of the
    experts, and the head (the embedding is as large).
    """

    dense: float
    experts: float
    head: float

    @property
    def layer(self) -> float:
        """A whole layer."""
        return self.dense + self.experts


def moments(job: Job, layout: Layout) -> list[Moment]:
    """Every moment that can be the peak, in the order of a step. Gradients are there from the start: a step of more
    than one micro-batch is taken, and a step of one needs less.
    """
    model = job.model
    wide = widths(model, layout)
    weights = _weights(model, layout)
    always = _static(job, layout) | {"reserve": job.reserve}
    kept = _kept(model, layout, wide) * layout.local_tokens(job)
    found = _loss(job, layout, weights) + _layers(job, layout, weights, wide) + _embedding(job, weights)
    # By the time the embedding's gradient is made the activations are gone.
    return [
        Moment(name, always | ({} if name == "embedding backward" else {"kept activations": kept}) | parts)
        for name, parts in found
    ]


def peak(job: Job, layout: Layout) -> Moment:
    """The largest moment."""
    return max(moments(job, layout), key=lambda moment: moment.total)


def _static(job: Job, layout: Layout) -> Parts:
    """Shards of weights, gradients and optimizer on the fullest rank. With a pipeline, the fullest stage holds its
    layers and the head or the embedding.
    """
    model, policy = job.model, job.policy
    heads = model.head_params * (1 if model.tied or layout.pp > 1 else 2)
    share = layout.stage_layers(model) / model.layers
    experts = model.moe_layers * model.routed_params * share / layout.ep * _expert_share(model, layout)
    shard = (model.dense_params * share + heads) / layout.stage + experts
    return {"weights": policy.weight * shard, "gradients": policy.grad * shard, "optimizer": policy.optimizer * shard}


def _expert_share(model: Model, layout: Layout) -> float:
    """The part of its experts that the fullest of the ranks with the same experts keeps: they are cut by rows where the
    rows of both matrices divide, else by experts, and then some ranks hold one more than others, or none.
    """
    ranks, local = layout.stage // layout.ep, max(model.experts // layout.ep, 1)
    if (2 * model.ffn) % ranks == 0 and model.hidden % ranks == 0:
        return 1 / ranks
    return math.ceil(local / ranks) / local


def _weights(model: Model, layout: Layout) -> Weights:
    """The largest layer's."""
    attention = max(model.attention_params, model.linear_params)
    dense = attention + (model.shared_params if model.moe_layers else 0)
    if model.dense_layers:
        dense = max(dense, attention + 3 * model.hidden * model.dense_ffn)
    return Weights(
        dense / layout.tp, model.routed_params / layout.ep / layout.tp, model.head_params / layout.tp
    )  # fmt: skip


def _kept(model: Model, layout: Layout, wide: Widths) -> float:
    """Bytes a token that all layers of a stage hold between forward and backward: a recomputed layer its input, the
    others everything.
    """
    layers = layout.stage_layers(model)
    # A pipeline's first stage holds the activations of up to pp micro-batches.
    flights = layout.pp
    per_layer = wide.stream + wide.mean_kept
    recomputed = min(layout.recomputed, layers)
    return flights * (recomputed * wide.stream + (layers - recomputed) * per_layer)


def _loss(job: Job, layout: Layout, weights: Weights) -> list[tuple[str, Parts]]:
    """The fused loss: hidden states in and out of the last norm and their gradient; the head, gathered, and its
    gradient. Inside, that gradient is summed in fp32 beside a chunk of d_logits, and then stands there in both forms.
    """
    tokens, hidden = layout.local_tokens(job), job.model.hidden / layout.tp
    rows = BF16 * tokens * hidden
    chunk = min(env.workspace_bytes(round(BF16 * weights.head)), BF16 * tokens * weights.head / hidden)
    inside = max(FP32 * weights.head + chunk - BF16 * weights.head, FP32 * weights.head)
    head = BF16 * weights.head
    return [
        ("loss forward", {"loss": 3 * rows + head, "gathered weights": head, "inside kernels": inside}),
        # The gradient times the upstream one is a second tensor.
        ("loss backward", {"loss": 4 * rows + 2 * head, "gathered weights": head}),
        ("loss gradient leaves", {"loss": 2 * rows + head, "leaving gradients": job.policy.reduce * weights.head}),
    ]


def _layers(job: Job, layout: Layout, weights: Weights, wide: Widths) -> list[tuple[str, Parts]]:
    """The backward of the last layer, while the head's gradient is still on its way to its shards, and of the one
    before it, which waits for the last layer's.

    With experts of their own (ep > 1) a layer is two groups: one is gathered while the other runs, and the experts'
    gradient leaves before attention's backward. Else it is one.
    """
    tokens, reduce = layout.local_tokens(job), job.policy.reduce
    recomputes = layout.recomputed >= layout.stage_layers(job.model)
    shared = layout.ep == 1
    next_group = weights.layer if shared else weights.dense
    # Whole sequences of keys and values are there while attention runs on a slice of the queries.
    all_kv = 2 * BF16 * job.model.kv / layout.tp * job.seq_len if layout.cp > 1 else 0.0
    found = []
    for name, reduced in (("last layer", weights.head), ("layer before", next_group)):
        # What the last layer kept is gone when the layer before it runs backward.
        gone = 0.0 if name == "last layer" else wide.stream + (0.0 if recomputes else wide.mean_kept)
        kept = wide.attention_kept + wide.moe_kept if recomputes else wide.chunk_kept
        gathered = BF16 * (weights.layer + next_group)
        experts = {
            "layer activations": (kept - gone) * tokens,
            "expert buffers": wide.moe_backward * tokens,
            "gathered weights": gathered,
            "whole gradients": BF16 * weights.experts,
            "leaving gradients": reduce * reduced,
            "inside kernels": wide.moe_inside * (tokens + _padding(job, layout)),
        }
        again = {
            "layer activations": (wide.attention_forward - gone) * tokens + all_kv,
            "gathered weights": gathered - (0.0 if shared else BF16 * weights.dense),
            "leaving gradients": reduce * reduced,
        }
        attention = {
            "layer activations": ((wide.attention_backward if recomputes else wide.rotation) - gone) * tokens + all_kv,
            "gathered weights": gathered if shared else 2 * BF16 * weights.dense,
            "whole gradients": BF16 * (weights.layer if shared else weights.dense),
            "leaving gradients": reduce * (reduced if shared else weights.experts),
        }
        found += [(f"experts backward, {name}", experts), (f"attention backward, {name}", attention)]
        if recomputes:
            found.append((f"attention again, {name}", again))
        if layout.chunks > 1:
            # A second chunk's gradient is there before it is added to the first one's. With two groups, what was
            # leaving has left by then.
            leaving = {"leaving gradients": reduce * reduced if shared else 0.0}
            two = {"whole gradients": 2 * BF16 * weights.experts}
            found.append((f"experts backward, second chunk, {name}", experts | two | leaving))
    return found


def _padding(job: Job, layout: Layout) -> float:
    """Tokens whose rows would fill up each expert's rows of a chunk to a multiple of 128, at most."""
    if not job.model.moe_layers:
        return 0.0
    return 127 * job.model.experts / layout.ep * layout.chunks / job.model.top_k


def _embedding(job: Job, weights: Weights) -> list[tuple[str, Parts]]:
    whole = BF16 * weights.head
    leaving = job.policy.reduce * (weights.head + weights.dense)
    parts = {"gathered weights": whole, "whole gradients": whole, "leaving gradients": leaving}
    return [("embedding backward", parts)]
