"""What one sees of a run: metrics.jsonl, a live panel on a terminal or plain lines elsewhere, metrics.csv if asked."""

import csv
import itertools
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fusedce.train.config import TrainConfig, mode_of

Metrics = dict[str, float]
EIGHTHS = " ▏▎▍▌▋▊▉█"
LEVELS = "▁▂▃▄▅▆▇█"


class Bar:
    """A metric of the panel: its name on the screen and in the metrics, and where a full bar lies.

    from_zero False: the bar shrinks towards 0 as a loss does, and `full` is what an untrained model has.
    """

    def __init__(self, title: str, key: str, colour: str, full: float = 1.0) -> None:
        self.title, self.key, self.colour, self.full = title, key, colour, full


BARS = {
    "grpo": [
        Bar("reward", "reward", "green"),
        Bar("exact", "exact", "cyan"),
        Bar("held-out", "held_out_accuracy", "magenta"),
    ],
    "sft": [
        Bar("loss", "loss", "green", full=math.log(256)),
        Bar("held-out", "held_out_loss", "magenta", full=math.log(256)),
    ],
}


def bar(fraction: float, width: int) -> str:
    """`fraction` of `width` cells, in eighths of a cell."""
    eighths = round(max(0.0, min(fraction, 1.0)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (EIGHTHS[rest] if rest else "")).ljust(width)


def sparkline(values: list[float], top: float, width: int) -> str:
    """The course of `values` in `width` cells, 0 at the foot and `top` at the head."""
    if not values:
        return " " * width
    picked = values
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        picked = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    return "".join(LEVELS[max(0, min(7, int(v / top * 8)))] if math.isfinite(v) else "!" for v in picked).ljust(width)


def clock(seconds: float) -> str:
    """1:05 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Tracker:
    """Writes and shows the metrics of a run; use it as a context manager.

    A resumed run cuts metrics.jsonl back to the step `first` that it starts from, so that every step stands there once.
    """

    def __init__(self, run: Path, config: TrainConfig, title: str, first: int, console: Console) -> None:
        self.run, self.config, self.title, self.first, self.console = run, config, title, first, console
        self.last, self.bars = config.steps, BARS[mode_of(config)]
        self.rows = [row for row in read_metrics(run) if row["step"] <= first]
        self.started = time.perf_counter()
        self.live: Live | None = None

    def __enter__(self) -> "Tracker":
        self.file = _rewritten(self.run / "metrics.jsonl", self.rows)
        if self.console.is_terminal:
            self.live = Live(console=self.console, refresh_per_second=8, get_renderable=self.panel)
            self.live.start()
        else:
            self.console.print(self.title, highlight=False, soft_wrap=True)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.live:
            self.live.stop()
        self.file.close()
        if self.config.csv:
            self._export_csv()

    def log(self, step: int, metrics: Metrics) -> None:
        """One step's metrics: a line of JSON at once, and the screen."""
        row = {"step": step, **metrics}
        self.rows.append(row)
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        looked = any(key.startswith("held_out") for key in metrics)
        if not self.live and (step % self.config.log_every == 0 or looked or step == self.last):
            self.console.print(self.line(), highlight=False, soft_wrap=True)

    def value(self, key: str) -> float | None:
        """The newest value of a metric."""
        return next((row[key] for row in reversed(self.rows) if key in row), None)

    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.started

    def times(self) -> str:
        """Time gone and, from the pace so far, time to go."""
        gone = self.seconds()
        done = len(self.rows) and self.rows[-1]["step"] - self.first
        left = clock(gone / done * (self.last - self.first - done)) if done else "?"
        return f"{clock(gone)} gone, {left} to go"

    def details(self) -> str:
        """The small numbers, as far as they are known."""
        shown: list[tuple[str, Callable[[float], str]]] = [
            ("loss", lambda v: f"loss {v:+.4f}"),
            ("entropy", lambda v: f"entropy {v:.2f}"),
            ("grad_norm", lambda v: f"grad norm {v:.2f}"),
            ("imbalance", lambda v: f"expert load {v:.2f}× even"),
            ("tok_per_s", lambda v: f"{v:,.0f} tok/s"),
            ("peak_gib", lambda v: f"{v:.2f} GiB"),
        ]
        known = [(self.value(key), form) for key, form in shown]
        texts = [form(value) for value, form in known if value is not None]
        skipped = sum(row.get("skipped", 0) for row in self.rows)
        return " · ".join(texts + ([f"{skipped:.0f} steps skipped"] if skipped else []))

    def line(self) -> str:
        """One line for a log file."""
        known = [(b.title, self.value(b.key)) for b in self.bars if b.key != "loss"]
        main = "  ".join(f"{title} {value:.3f}" for title, value in known if value is not None)
        step = f"{self.rows[-1]['step']:.0f}".rjust(len(str(self.last)))
        return f"step {step}/{self.last}  {main}  {self.details()}  {self.times()}"

    def panel(self) -> RenderableType:
        """The live display."""
        width = max(10, min(40, (self.console.width - 30) // 2))
        grid = Table.grid(padding=(0, 2))
        step = self.rows[-1]["step"] if self.rows else self.first
        grid.add_row("step", f"{step:.0f}/{self.last}", ProgressBar(self.last, step, width=width), self.times())
        for entry in self.bars:
            value = self.value(entry.key)
            course = sparkline([row[entry.key] for row in self.rows if entry.key in row], entry.full, width)
            grid.add_row(
                Text(entry.title, style="bold"),
                "–" if value is None else f"{value:.3f}",
                Text(bar((value or 0) / entry.full, width), style=f"{entry.colour} on grey19"),
                Text(course, style=entry.colour),
            )
        body = Group(grid, Text(self.details(), style="dim"))
        return Panel(body, title=f"[bold]{self.title}", title_align="left", border_style="grey42", expand=False)

    def _export_csv(self) -> None:
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        with open(self.run / "metrics.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.rows)


class Silent:
    """The tracker of the ranks that show nothing."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def log(self, step: int, metrics: Metrics) -> None:
        """Nothing."""


def read_metrics(run: Path) -> list[Metrics]:
    """The rows of metrics.jsonl; a last line that was cut off by a kill is left out."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _rewritten(path: Path, rows: list[Metrics]) -> TextIO:
    """The file with exactly `rows`, replaced in one step and open for more."""
    fresh = path.with_suffix(".tmp")
    fresh.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(fresh, path)
    return open(path, "a")
