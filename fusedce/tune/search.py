"""The search: a stage after the other, every candidate right before it is timed, all of them timed in turns."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusedce import arch
from fusedce.configs import GemmTile
from fusedce.configs.choice import trial
from fusedce.tune.candidates import candidates
from fusedce.verify.check import margins, upstream_of
from fusedce.verify.primitives import LARGE, PRIMITIVES, SMALL, Primitive, Sizes

Timer = Callable[[Callable[[], object]], float]
# At the tuned shape, how far another tile's results may be from the table's, relative, in the norm: both are rounded.
# That a tile is right at all is `fusedce verify`'s rule, on smaller problems.
SAME = 1e-2
WARMUP = 2


@dataclass(frozen=True)
class Tried:
    """One candidate of a stage. p50 and p20 in ms, None where it was not timed; reason: why not."""

    stage: str
    tile: GemmTile
    p20: float | None
    p50: float | None
    reason: str = ""


@dataclass
class Outcome:
    """What a search came to: the tiles that were better than the table's, and all that was tried."""

    tiles: dict[str, GemmTile] = field(default_factory=dict)
    tried: list[Tried] = field(default_factory=list)


class Problem:
    """An op at a shape: `run` is its forward and its backward by Triton, in bf16."""

    def __init__(
        self, op: str, sizes: Sizes, device: torch.device, checked: tuple[Sizes, ...] = (SMALL, LARGE)
    ) -> None:
        self.primitive: Primitive = next(p for p in PRIMITIVES if p.op == op)
        self.device, self.checked = device, checked
        self.arch = arch.of_device(device)
        made = self.primitive.make(sizes, torch.bfloat16)
        self.tensors = [t if t is None else t.to(device).requires_grad_(t.is_floating_point()) for t in made]
        self.leaves = [t for t in self.tensors if t is not None and t.requires_grad]
        self.upstream: list[Tensor] | None = None

    def run(self) -> list[Tensor]:
        """Results and gradients."""
        results = self.primitive.ours("triton", *self.tensors)
        differentiable = [r for r in results if r.requires_grad]
        if not differentiable:
            return results
        if self.upstream is None:
            named = zip(self.primitive.names, results, strict=True)
            self.upstream = [upstream_of(name, r) for name, r in named if r.requires_grad]
        grads = torch.autograd.grad(differentiable, self.leaves, self.upstream, allow_unused=True)
        return [r.detach() for r in results] + [g for g in grads if g is not None]

    def wrong(self, expected: list[Tensor]) -> str | None:
        """None if the tiles in force are right, by the rule on small problems and against `expected` at this shape."""
        for sizes in self.checked:
            for name, found in margins(self.primitive, "triton", torch.bfloat16, self.device, sizes, 2).items():
                if found.broken:
                    return f"{name}: {found.broken}"
        for out, table in zip(self.run(), expected, strict=True):
            if not bool((out.double() - table.double()).norm() <= SAME * table.double().norm()):
                return "results at this shape differ from the table's tile"
        return None


def search(
    problem: Problem, timer: Timer, rounds: int = 7, progress: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Better tiles for the stages that the problem launches; the table's tile of a stage stays unless another one's
    median is below its 20th percentile."""
    with trial({}) as asked:
        expected = problem.run()
    outcome = Outcome()
    for stage in tuple(asked):
        progress(stage)
        right: list[GemmTile] = []
        for tile in candidates(stage, problem.arch.name, outcome.tiles):
            reason = _reason(problem, {**outcome.tiles, stage: tile}, stage, expected)
            if reason is None:
                right.append(tile)
            else:
                outcome.tried.append(Tried(stage, tile, None, None, reason))
        tried = _timed(problem, stage, right, outcome.tiles, timer, rounds)
        outcome.tried += tried
        best = min(tried, key=lambda one: one.p50 or 0.0, default=None)
        own = next((one for one in tried if one.tile == candidates(stage, problem.arch.name, {})[0]), None)
        if best and own and best is not own and (best.p50 or 0.0) < (own.p20 or 0.0):
            outcome.tiles[stage] = best.tile
    return outcome


def _reason(problem: Problem, tiles: dict[str, GemmTile], stage: str, expected: list[Tensor]) -> str | None:
    """Why a candidate is not timed, if it is not."""
    try:
        with trial(tiles) as asked:
            wrong = problem.wrong(expected)
    except Exception as error:  # a compiler or driver may refuse a tile in any way
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return wrong if wrong or stage in asked else "no problem launched it"


def _timed(
    problem: Problem, stage: str, tiles: list[GemmTile], beside: dict[str, GemmTile], timer: Timer, rounds: int
) -> list[Tried]:
    times: dict[GemmTile, list[float]] = {tile: [] for tile in tiles}
    for turn in range(WARMUP + rounds):
        for tile in tiles:
            with trial({**beside, stage: tile}):
                took = timer(problem.run)
            if turn >= WARMUP:
                times[tile].append(took)
    return [Tried(stage, tile, sorted(took)[len(took) // 5], statistics.median(took)) for tile, took in times.items()]


def event_timer(run: Callable[[], object]) -> float:
    """Milliseconds of one call on the current GPU."""
    before: Any = torch.cuda.Event(enable_timing=True)
    after: Any = torch.cuda.Event(enable_timing=True)
    before.record()
    run()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))
