"""What a grid search would have tried, predicted by the same model; and the same job on other cards."""

from dataclasses import dataclass, replace

from fusedce.plan.gpus import GPUS, Gpu
from fusedce.plan.layout import Job, Layout, refuse
from fusedce.plan.memory import peak
from fusedce.plan.recipe import Answer, Candidate, NothingFitsError, best_of, solve


@dataclass(frozen=True)
class Point:
    """One configuration of the grid: its prediction, or why it cannot run or does not fit."""

    layout: Layout
    candidate: Candidate | None
    refusal: str

    def against(self, best: Candidate) -> float:
        """Its step time over the chosen one's."""
        assert self.candidate is not None
        return self.candidate.step.total / best.step.total


def grid(answer: Answer) -> list[Point]:
    """Three values each of PP, TP, EP and CP: 81 configurations, those that run first, the fastest of them first."""
    job, chosen = answer.job, answer.layout
    points = [
        _point(job, pp, tp, ep, cp)
        for pp in _three(1)
        for tp in _three(1)
        for ep in _three(chosen.ep)
        for cp in _three(chosen.cp)
    ]
    return sorted(points, key=lambda p: p.candidate.step.total if p.candidate else float("inf"))


def compare(job: Job, cards: list[Gpu], recompute: float | None = None) -> list[tuple[Gpu, Answer | str]]:
    """The plan on each card, or why there is none. The reserve is the job's on every card."""
    found: list[tuple[Gpu, Answer | str]] = []
    for gpu in cards:
        try:
            found.append((gpu, solve(replace(job, gpu=gpu), recompute)))
        except NothingFitsError as error:
            found.append((gpu, str(error)))
    return found


def next_up(gpu: Gpu) -> Gpu | None:
    """The card with the next larger memory, of the same vendor's if it has one."""
    larger = [other for other in GPUS.values() if other.memory > gpu.memory]
    same = [other for other in larger if other.arch.startswith("gfx") == gpu.arch.startswith("gfx")]
    return min(same or larger, key=lambda other: other.memory, default=None)


def _three(value: int) -> tuple[int, int, int]:
    """A value with its neighbours, or the first three."""
    return (1, 2, 4) if value == 1 else (value // 2, value, value * 2)


def _point(job: Job, pp: int, tp: int, ep: int, cp: int) -> Point:
    inner = pp * tp * cp
    layout = Layout(pp=pp, tp=tp, cp=cp, dp=max(job.gpus // inner, 1), ep=ep)
    why = f"{inner} does not divide {job.gpus} cards" if job.gpus % inner else refuse(job, layout)
    if why:
        return Point(layout, None, why)
    found = best_of(job, layout)
    if found:
        return Point(found.layout, found, "")
    full = replace(layout, recomputed=layout.stage_layers(job.model))
    return Point(layout, None, f"{peak(job, full).total / 1e9:.0f} GB with all layers recomputed")
