"""What is asked, and what is answered: the job, the dtypes of its state, and a layout of ranks."""

import math
from dataclasses import dataclass

from fusedce.plan.gpus import Gpu
from fusedce.plan.models import Model


@dataclass(frozen=True)
class Policy:
    """Bytes a parameter that stay, sharded over all ranks: weight, gradient, and the optimizer's (a master copy, if
    there is one, and Adam's two moments); reduce: of the gradient on its way to its shard. Compute is bf16 in all.
    """

    name: str
    weight: int
    grad: int
    optimizer: int
    reduce: int
    title: str

    @property
    def static(self) -> int:
        """Bytes a parameter, all together."""
        return self.weight + self.grad + self.optimizer


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("fp32-shards", 4, 4, 8, 4, "fp32 shards, gradients and Adam; bf16 copies only while a layer runs"),
        Policy("master", 2, 4, 12, 4, "bf16 weights, fp32 gradients, fp32 master copy and Adam"),
        Policy("bf16-grads", 2, 2, 12, 2, "bf16 weights and gradients, fp32 master copy and Adam"),
        Policy("bf16", 2, 2, 4, 2, "everything bf16, Adam too"),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What is to be trained on what.

    seq_len: tokens of a sequence; tokens_per_step: of one optimizer step, all ranks together, a multiple of seq_len;
    reserve: bytes of a card that the plan leaves alone: the driver's context, communication buffers, fragmentation, and
    whatever else is to live there, such as a rollout engine.
    """

    model: Model
    gpu: Gpu
    gpus: int
    seq_len: int
    tokens_per_step: int
    policy: Policy
    reserve: float

    @property
    def sequences(self) -> int:
        """Sequences of one step."""
        return self.tokens_per_step // self.seq_len

    def tokens_per_second_of(self, seconds: float) -> float:
        """Of all ranks together, if a step takes `seconds`."""
        return self.sequences * self.seq_len / seconds

    @property
    def budget(self) -> float:
        """Bytes that the plan may use."""
        return self.gpu.memory - self.reserve


@dataclass(frozen=True)
class Layout:
    """How the ranks are used. One stage of the pipeline has tp · cp · dp ranks, over all of which weights are sharded;
    ep of them share the experts, and come out of the same ranks.

    recomputed: layers whose activations are computed again in the backward; chunks: parts of the tokens that an expert
    layer takes one after the other.
    """

    pp: int = 1
    tp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    recomputed: int = 0
    chunks: int = 1

    @property
    def stage(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.stage

    def local_tokens(self, job: Job) -> int:
        """Tokens of one sequence on one rank."""
        return job.seq_len // self.cp

    def stage_layers(self, model: Model) -> int:
        """Layers of the longest stage."""
        return math.ceil(model.layers / self.pp)

    def micro_batches(self, job: Job) -> int:
        """Forwards and backwards of a step on one rank, a sequence each. Where sequences do not divide over the ranks,
        some ranks run along without a loss in the last one.
        """
        return math.ceil(job.sequences / self.dp)


def refuse(job: Job, layout: Layout) -> str | None:
    """Why a layout cannot be run at all, memory aside; None if it can."""
    model = job.model
    if layout.world > job.gpus:
        return f"{layout.world} ranks on {job.gpus} cards"
    if model.experts and model.experts % layout.ep:
        return f"EP {layout.ep} does not divide {model.experts} experts"
    if layout.stage % layout.ep:
        return f"EP {layout.ep} does not divide {layout.stage} ranks of a stage"
    if layout.cp > 1 and job.seq_len % (2 * layout.cp):
        return f"CP {layout.cp} does not cut {job.seq_len} tokens into equal halves"
    if model.kv_heads % layout.tp:
        return f"TP {layout.tp} does not divide {model.kv_heads} key and value heads"
    if layout.pp > model.layers:
        return f"PP {layout.pp} on {model.layers} layers"
    if layout.dp > job.sequences:
        return f"DP {layout.dp} has more ranks than a step has sequences, {job.sequences}"
    return None
