"""The curves of a run as one picture."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file, on a machine without a display
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from fusedce.train.track import Metrics

INK, GREY = "#22303c", "#7b8794"
COLOURS = {"reward": "#2a9d5c", "exact": "#2878b5", "held_out": "#c2418f", "entropy": "#d98324", "imbalance": "#7b5ea7"}


def draw(rows: list[Metrics], mode: str, headline: str, subtitle: str, path: Path) -> None:
    """Write a PNG: the mode's main curves above, entropy or gradient norm and the expert load below."""
    style: Any = {"font.size": 10, "axes.edgecolor": GREY, "text.color": INK, "axes.labelcolor": INK}
    with plt.rc_context(style | {"xtick.color": GREY, "ytick.color": GREY}):
        figure = plt.figure(figsize=(9, 6), layout="constrained")
        grid = figure.add_gridspec(2, 2, height_ratios=(2.4, 1))
        figure.suptitle(f"{headline}\n", x=0.015, ha="left", fontsize=14, fontweight="bold")
        figure.text(0.015, 0.925, subtitle, color=GREY, fontsize=9.5)
        main = _axes(figure.add_subplot(grid[0, :]), rows)
        if mode == "grpo":
            main.set_ylim(0, 1.04)
            _curve(main, rows, "reward", "training reward", COLOURS["reward"])
            _curve(main, rows, "exact", "training answers all right", COLOURS["exact"])
            _points(main, rows, "held_out_accuracy", "held-out, greedy")
            left = "entropy"
        else:
            _curve(main, rows, "loss", "training loss (nats a byte)", COLOURS["reward"])
            _points(main, rows, "held_out_loss", "held-out files")
            main.set_ylim(bottom=0)
            left = "grad_norm"
        main.legend(frameon=False, loc="best")
        small = _axes(figure.add_subplot(grid[1, 0]), rows)
        _curve(small, rows, left, "", COLOURS["entropy"])
        small.set_title("entropy (nats)" if left == "entropy" else "gradient norm", loc="left", fontsize=10)
        small.set_ylim(bottom=0)
        load = _axes(figure.add_subplot(grid[1, 1]), rows)
        _curve(load, rows, "imbalance", "", COLOURS["imbalance"])
        load.set_title("busiest expert, times an even load", loc="left", fontsize=10)
        load.set_ylim(bottom=1)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _axes(axes: Axes, rows: list[Metrics]) -> Axes:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(0, max(rows[-1]["step"], 1))
    axes.set_xlabel("step")
    return axes


def _curve(axes: Axes, rows: list[Metrics], key: str, label: str, colour: str) -> None:
    """Every step faintly, and the mean of the last steps (a fiftieth of the run) on top."""
    steps, values = [r["step"] for r in rows if key in r], [r[key] for r in rows if key in r]
    width = max(1, len(values) // 50)
    tails = [values[max(0, i - width + 1) : i + 1] for i in range(len(values))]
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
    axes.plot(steps, [sum(tail) / len(tail) for tail in tails], color=colour, linewidth=2, label=label)


def _points(axes: Axes, rows: list[Metrics], key: str, label: str) -> None:
    known = [(r["step"], r[key]) for r in rows if key in r]
    if known:
        steps, values = zip(*known, strict=True)
        axes.plot(
            steps, values, "o-", color=COLOURS["held_out"], markersize=5, linewidth=1.2, label=label, clip_on=False
        )
        last = f"{values[-1]:.3f}"
        axes.annotate(last, known[-1], (-4, -16), textcoords="offset points", ha="right", color=COLOURS["held_out"])
