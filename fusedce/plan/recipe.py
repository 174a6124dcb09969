"""One layout instead of a sweep: each dimension by the one constraint that binds it, in a fixed order.

EP by experts and node; CP as small as memory allows; recompute as little as fits; chunks of the expert layer by memory
and overlap; TP and PP only where nothing else fits. The simplest layout that fits is taken unless it is more than
SIMPLICITY slower than the fastest: then the simplest that is not. Memory and time come from `memory` and `seconds`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fusedce.plan.layout import Job, Layout, refuse
from fusedce.plan.memory import Moment, peak
from fusedce.plan.seconds import Step, step

# Experts of one rank: with one alone, the busiest expert is the busiest rank.
MIN_LOCAL_EXPERTS = 2
# Rows of one expert in one chunk: below, the grouped GEMM's tiles are not full.
MIN_EXPERT_ROWS = 256
CHUNKS = (1, 2, 4, 8, 16, 32)
# How much slower than the fastest a simpler layout may be: a choice.
SIMPLICITY = 1.10


@dataclass(frozen=True)
class Candidate:
    """A layout with its prediction."""

    layout: Layout
    peak: Moment
    step: Step


@dataclass(frozen=True)
class Answer:
    """The layout to take, and the simplest one that fits, often the same. job.gpus may be fewer than were offered: with
    more, nothing fits.
    """

    job: Job
    offered: int
    best: Candidate
    simplest: Candidate
    forced_recompute: bool = False

    @property
    def layout(self) -> Layout:
        """Its ranks."""
        return self.best.layout


class NothingFitsError(ValueError):
    """No layout fits; the message names the smallest peak that was found, and the budget."""


def solve(job: Job, recompute: float | None = None) -> Answer:
    """The recipe for a job. recompute: a share of the layers that is to be recomputed; None takes as few as fit.

    Raises NothingFitsError.
    """
    for gpus in range(job.gpus, 0, -1):
        fewer = replace(job, gpus=gpus)
        for pp, tp in _pipelines_and_tensors(fewer):
            fitting = [
                found for layout in _expert_and_context(fewer, pp, tp) if (found := best_of(fewer, layout, recompute))
            ]
            if fitting:
                bar = SIMPLICITY * min(found.step.total for found in fitting)
                best = next(found for found in fitting if found.step.total <= bar)
                return Answer(fewer, job.gpus, best, fitting[0], recompute is not None)
    smallest = min(
        (
            peak(job, replace(layout, recomputed=layout.stage_layers(job.model), chunks=chunks)).total
            for pp, tp in _pipelines_and_tensors(job)
            for layout in _expert_and_context(job, pp, tp)
            for chunks in _chunks(job, layout)
        ),
        default=None,
    )
    have = f"{job.gpu.title} has {job.gpu.memory / 1e9:.0f} GB, {job.reserve / 1e9:.0f} of them reserved"
    need = "no layout can run" if smallest is None else f"the smallest peak is {smallest / 1e9:.1f} GB a card"
    raise NothingFitsError(f"{job.model.name} at {job.seq_len} tokens on {job.gpus} cards: {need}, and {have}")


def best_of(job: Job, layout: Layout, recompute: float | None = None) -> Candidate | None:
    """The fastest of the chunk counts of a layout, each with as few recomputed layers as fit; None if none fits."""
    fitting = []
    for chunks in _chunks(job, layout):
        whole = replace(layout, chunks=chunks)
        recomputed = _least_recompute(job, whole, recompute)
        if recomputed is not None:
            found = replace(whole, recomputed=recomputed)
            fitting.append(Candidate(found, peak(job, found), step(job, found)))
    return min(fitting, key=lambda candidate: candidate.step.total, default=None)


def expert_parallel(job: Job, pp: int, tp: int) -> int:
    """The recipe's EP: the most ranks that divide experts and stage, within a node, with at least two experts each."""
    experts, stage = job.model.experts, job.gpus // (pp * tp)
    most = min(max(experts // MIN_LOCAL_EXPERTS, 1), max(job.gpu.per_node // tp, 1))
    return max((ep for ep in _divisors(stage) if ep <= most and experts % ep == 0), default=1)


def _pipelines_and_tensors(job: Job) -> Iterator[tuple[int, int]]:
    """(PP, TP) in the order of the recipe: none, then tensors within a node, then pipelines."""
    for pp in (1, 2, 4, 8, 16):
        for tp in (1, 2, 4, 8):
            allowed = job.model.kv_heads % tp == 0 and tp <= job.gpu.per_node and pp <= job.model.layers
            if allowed and job.gpus % (pp * tp) == 0:
                yield pp, tp


def _expert_and_context(job: Job, pp: int, tp: int) -> Iterator[Layout]:
    """From simple to less so: EP by the recipe and every CP, the smallest first; then larger EP, with one expert a rank
    or across nodes.
    """
    stage = job.gpus // (pp * tp)
    preferred = expert_parallel(job, pp, tp)
    larger = [ep for ep in _divisors(stage) if ep > preferred and job.model.experts and job.model.experts % ep == 0]
    for ep in (preferred, *larger):
        for cp in _divisors(stage):
            layout = Layout(pp=pp, tp=tp, cp=cp, dp=stage // cp, ep=ep)
            if refuse(job, layout) is None:
                yield layout


def _least_recompute(job: Job, layout: Layout, share: float | None) -> int | None:
    """The fewest recomputed layers that fit, by bisection: more of them never take more memory but for one step, from
    none to some. None if all of them do not fit.
    """
    layers = layout.stage_layers(job.model)

    def fits(count: int) -> bool:
        return peak(job, replace(layout, recomputed=count)).total <= job.budget + job.reserve

    if share is not None:
        asked = round(share * layers)
        return asked if fits(asked) else None
    if fits(0):
        return 0
    if not fits(layers):
        return None
    low, high = 0, layers
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _chunks(job: Job, layout: Layout) -> list[int]:
    """Chunk counts worth a look: the tokens divide, and an expert still gets whole tiles."""
    model, tokens = job.model, layout.local_tokens(job)
    if not model.experts:
        return [1]
    rows = tokens * model.top_k * layout.ep / model.experts
    return [c for c in CHUNKS if c == 1 or (tokens % c == 0 and rows / c >= MIN_EXPERT_ROWS)]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
