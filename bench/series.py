"""Rows of bench/results as curves over tokens: which cases differ in nothing else. Standard library only."""

import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

Row = dict[str, str]
FLOOR = "floor"  # providers whose name begins so are the bare GEMMs
METRICS = {"time": "time", "peak": "memory beside inputs and gradients", "ratio": "time over the bare GEMMs'"}


class Point(NamedTuple):
    """One provider at one number of tokens: percentiles in the panel's unit."""

    tokens: int
    p20: float
    p50: float
    p80: float


class Panel(NamedTuple):
    """One metric of a group: a list of points a provider, by tokens."""

    metric: str
    unit: str
    series: dict[str, list[Point]]

    def tokens(self) -> list[int]:
        """Every number of tokens that a provider has."""
        return sorted({point.tokens for points in self.series.values() for point in points})


class Group(NamedTuple):
    """What was measured of one op in one shape and mode on one GPU."""

    op: str
    shape: str
    mode: str
    gpu: str
    panels: list[Panel]

    def title(self) -> str:
        """One line."""
        mode = {"fwd": "forward", "fwd_bwd": "forward and backward"}.get(self.mode, self.mode)
        return f"{self.op}, {self.shape.replace('_', ' ')}, {mode}, {self.gpu}"


def read(paths: Iterable[Path]) -> list[Row]:
    """All rows of some files, by date."""
    rows = []
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            rows += list(csv.DictReader(file))
    return sorted(rows, key=lambda row: row["date"])


def split(case: str) -> tuple[str, int]:
    """A case as its shape and its tokens: "A_N16384_skewed" is ("A_skewed", 16384). ValueError where it names none."""
    parts = case.split("_")
    named = [part for part in parts if re.fullmatch(r"N\d+", part)]
    if len(named) != 1:
        raise ValueError(f"case {case!r} does not name its tokens once, as N16384 does")
    return "_".join(part for part in parts if part != named[0]), int(named[0][1:])


def run_of(row: Row) -> tuple[str, ...]:
    """What the rows of one run of one case share: only they are fit to be divided by each other."""
    return tuple(row[name] for name in ("op", "case", "mode", "metric", "gpu", "commit", "date"))


def floors(rows: list[Row]) -> dict[tuple[str, ...], float]:
    """The median of the bare GEMMs of every run that has them."""
    return {run_of(row): float(row["p50"]) for row in rows if row["provider"].startswith(FLOOR)}


def groups(rows: list[Row]) -> list[Group]:
    """Every group in the rows' order; where a case was measured more than once, the latest row counts, and its ratio is
    to the floor of its own run. Rows of cases that name no tokens, and figures that are no number (memory on a CPU),
    are left out."""
    floor = floors(rows)
    found: dict[tuple[str, ...], dict[str, dict[str, dict[int, Point]]]] = {}
    ratios: dict[tuple[str, ...], dict[str, dict[int, Point | None]]] = {}
    units: dict[str, str] = {}
    for row in rows:
        if not math.isfinite(float(row["p50"])) or not re.search(r"(?:^|_)N\d+(?:_|$)", row["case"]):
            continue
        shape, tokens = split(row["case"])
        key = (row["op"], shape, row["mode"], row["gpu"])
        metrics = found.setdefault(key, defaultdict(lambda: defaultdict(dict)))
        point = Point(tokens, *(float(row[name]) for name in ("p20", "p50", "p80")))
        metrics[row["metric"]][row["provider"]][tokens] = point
        units[row["metric"]] = row["unit"]
        if row["metric"] == "time" and not row["provider"].startswith(FLOOR):
            own = floor.get(run_of(row))
            over = Point(tokens, *(x / own for x in point[1:])) if own else None
            ratios.setdefault(key, defaultdict(dict))[row["provider"]][tokens] = over
    made = []
    for (op, shape, mode, gpu), metrics in found.items():
        panels = [
            Panel(metric, units[metric], {name: [by[n] for n in sorted(by)] for name, by in providers.items()})
            for metric, providers in metrics.items()
        ]
        over = {
            name: [point for _, point in sorted(by.items()) if point]
            for name, by in ratios.get((op, shape, mode, gpu), {}).items()
        }
        series = {name: points for name, points in over.items() if points}
        made.append(Group(op, shape, mode, gpu, [*panels, *([Panel("ratio", "×", series)] if series else [])]))
    return made


def headline(rows: list[Row], op: str, mode: str = "fwd_bwd") -> Group | None:
    """The group of an op with most numbers of tokens, then most points; None where there is none."""
    mine = [group for group in groups(rows) if (group.op, group.mode) == (op, mode) and group.panels]

    def rank(group: Group) -> tuple[int, int, int]:
        tokens = [n for panel in group.panels for n in panel.tokens()]
        points = sum(len(points) for panel in group.panels for points in panel.series.values())
        return len(set(tokens)), points, max(tokens)

    return max(mine, key=rank, default=None)
