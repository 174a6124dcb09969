"""One optimizer step of rank 0 under torch's memory tracker."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor import DTensor

from fusedce.dryrun.world import build, fake_world
from fusedce.plan.layout import Job, Layout
from fusedce.train.model import LM

# The tracker's kinds, by the planner's parts.
KINDS = {
    "weights": ("SHARDED_PARAM",),
    "gradients": ("SHARDED_GRAD",),
    "optimizer": ("OPT",),
    "gathered weights": ("UNSHARDED_PARAM", "ALL_GATHER"),
    "leaving gradients": ("REDUCE_SCATTER",),
    "activations and gradients in use": ("ACT", "TEMP", "UNSHARDED_GRAD", "INP", "BUFFER"),
}


@dataclass(frozen=True)
class Tracked:
    """Bytes at the peak, by the keys of KINDS."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.parts.values())


def track(job: Job, layout: Layout) -> Tracked:
    """The peak of two steps, a sequence of job.seq_len tokens a micro-batch and rank. The first has one micro-batch and
    makes the optimizer's state; the second has two, so that the last one finds the gradients there.

    ValueError for a layout with tensors, sequences or stages split: the trainer's model knows none of these.
    """
    if (layout.pp, layout.tp, layout.cp) != (1, 1, 1):
        raise ValueError("fusedce.dryrun: PP, TP and CP must be 1; see fusedce.dryrun.compare.as_run")
    with fake_world(layout) as ranks, FakeTensorMode():
        model = build(job.model, layout, ranks)
        # The optimizer works on the shards themselves: over DTensors it asks for results of the whole shape, to learn
        # their sharding, and the tracker would count them.
        params = [cast(DTensor, parameter) for parameter in model.parameters()]
        shards = [nn.Parameter(parameter.to_local().detach()) for parameter in params]
        optimizer = torch.optim.AdamW(shards, fused=True)
        tracker = FSDPMemTracker(model, optimizer)
        with tracker:
            for micro_batches in (1, 2):
                for _ in range(micro_batches):
                    _micro_batch(model, job.seq_len)
                    tracker.reset_mod_stats()
                for parameter, shard in zip(params, shards, strict=True):
                    shard.grad = cast(DTensor, parameter.grad).to_local()
                    parameter.grad = None
                optimizer.step()
                optimizer.zero_grad()
        snapshot: dict[Any, dict[Any, int]] = tracker.get_tracker_snapshot("peak")
    (kinds,) = snapshot.values()
    found = {getattr(kind, "name", str(kind)): size for kind, size in kinds.items()}
    return Tracked({part: float(sum(found[kind] for kind in names)) for part, names in KINDS.items()})


def _micro_batch(model: LM, tokens: int) -> None:
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    loss = model.head(model(ids), ids)
    loss.backward()
