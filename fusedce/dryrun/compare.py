"""Predicted beside tracked."""

from dataclasses import replace
from typing import Any

from fusedce.dryrun.tracked import KINDS, Tracked, track
from fusedce.plan.launch import trainable
from fusedce.plan.layout import Job, Layout
from fusedce.plan.memory import HIDDEN_PARTS, Moment, moments
from fusedce.plan.recipe import Answer

# Layers and chunks that are run: they are all alike, and a whole model takes minutes.
MAX_LAYERS = 4
MAX_CHUNKS = 8


def measure(answer: Answer) -> dict[str, Any]:
    """Bytes by part, (predicted, tracked), and a title. ValueError for a model that the trainer cannot build."""
    if not trainable(answer.job):
        raise ValueError(
            f"--run: the trainer's model cannot be {answer.job.model.name}: full attention and routed experts only"
        )
    job, layout = as_run(answer.job, answer.layout)
    tracked = track(job, layout)
    parts = beside(predicted(job, layout), tracked)
    total = sum(p for p, _ in parts.values()), tracked.total
    run = f"rank 0 of {layout.world}, {job.model.layers} layers, {layout.recomputed} recomputed, {layout.chunks} chunks"
    title = f"{run}, {job.seq_len:,} tokens: predicted and tracked (not inside kernels)"
    return {"title": title, "parts": parts | {"all": total}}


def as_run(job: Job, layout: Layout) -> tuple[Job, Layout]:
    """What the dry run can do of a plan: the trainer's block on a rank's slice of the sequence as if it were all of it,
    for as many ranks of data parallelism; at most MAX_CHUNKS chunks and MAX_LAYERS layers, with the plan's share of
    recompute, and of either kind at least one if the plan has both.
    """
    if (layout.pp, layout.tp) != (1, 1):
        raise ValueError(f"--run: the plan has PP {layout.pp} and TP {layout.tp}; the trainer's model has neither")
    layers = min(job.model.layers, MAX_LAYERS)
    recomputed = round(layout.recomputed / job.model.layers * layers)
    if 0 < layout.recomputed < job.model.layers:
        recomputed = min(max(recomputed, 1), layers - 1)
    local = layout.local_tokens(job)
    shorter = replace(
        job,
        model=replace(job.model, layers=layers),
        seq_len=local,
        tokens_per_step=2 * layout.world * local,
        reserve=0.0,
    )
    chunks = min(layout.chunks, MAX_CHUNKS)
    return shorter, replace(layout, cp=1, dp=layout.cp * layout.dp, recomputed=recomputed, chunks=chunks)


def predicted(job: Job, layout: Layout) -> Moment:
    """The moment in which torch's tensors hold most; what lives inside kernels no tracker sees."""
    return max(moments(job, layout), key=lambda moment: moment.visible)


def beside(moment: Moment, tracked: Tracked) -> dict[str, tuple[float, float]]:
    """(predicted, tracked) bytes by the tracker's kinds."""
    visible = {name: value for name, value in moment.parts.items() if name not in HIDDEN_PARTS}
    named = {name: visible.pop(name, 0.0) for name in KINDS if name != "activations and gradients in use"}
    named["activations and gradients in use"] = sum(visible.values())
    return {name: (named[name], tracked.parts[name]) for name in KINDS}
