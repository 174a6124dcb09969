"""Rows as a PNG: for each group a line of panels, time, memory and the ratio to the bare GEMMs, against tokens."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file, on a machine without a display
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench.series import FLOOR, METRICS, Group, Panel, Row, groups


def draw(rows: list[Row], path: Path) -> None:
    """Write the picture; ValueError where no row can be drawn, OSError where the file cannot be written."""
    found = [group for group in groups(rows) if shown(group)]
    if not found:
        raise ValueError("no row has a time, a peak or a ratio")
    columns = max(len(shown(group)) for group in found)
    size = (4.6 * columns + 1.6, 3.0 * len(found))
    figure, grid = plt.subplots(len(found), columns, figsize=size, squeeze=False, layout="constrained")
    for group, line in zip(found, grid, strict=True):
        for axes in line[len(shown(group)) :]:
            axes.axis("off")
        for panel, axes in zip(shown(group), line, strict=False):
            _panel(axes, panel, group)
        line[0].legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def shown(group: Group) -> list[Panel]:
    """The panels that are drawn, in a fixed order."""
    return [panel for metric in METRICS for panel in group.panels if panel.metric == metric]


def _panel(axes: Axes, panel: Panel, group: Group) -> None:
    for name, points in sorted(panel.series.items(), key=lambda item: not item[0].startswith("fusedce")):
        tokens, p50 = [p.tokens for p in points], [p.p50 for p in points]
        style: Any = {"linestyle": "--", "color": "black"} if name.startswith(FLOOR) else {"linestyle": "-"}
        ours = name.startswith("fusedce")
        axes.plot(tokens, p50, marker="o", label=name, linewidth=2.2 if ours else 1.2, markersize=4, **style)
        axes.fill_between(tokens, [p.p20 for p in points], [p.p80 for p in points], alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log" if all(p.p50 > 0 for points in panel.series.values() for p in points) else "linear")
    axes.set_xticks(panel.tokens(), [str(n) for n in panel.tokens()])
    axes.set_xlabel("tokens", fontsize=8)
    axes.set_title(f"{group.title()}\n{METRICS[panel.metric]}, {panel.unit}", loc="left", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
