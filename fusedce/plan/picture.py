"""The two bars of a plan as a PNG: memory of a rank by part, time of a step by part."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file, on a machine without a display
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from fusedce.plan.recipe import Answer
from fusedce.plan.show import named

INK, GREY = "#22303c", "#7b8794"
COLOURS = ("#2878b5", "#2a9d5c", "#c2418f", "#d98324", "#7b5ea7", "#4fb3bf", "#b5482a", "#8a9a5b", "#5c6f82", "#c9b037")


def draw(answer: Answer, path: Path) -> None:
    """Write the picture; OSError where the file cannot be written."""
    job, best = answer.job, answer.best
    style: Any = {"font.size": 10, "axes.edgecolor": GREY, "text.color": INK, "xtick.color": GREY}
    with plt.rc_context(style):
        figure, (memory, time) = plt.subplots(2, 1, figsize=(10, 4.6), layout="constrained")
        title = f"{job.model.name} on {job.gpus} × {job.gpu.title}, {job.seq_len:,} tokens a sequence"
        figure.suptitle(f"{title}\n{named(best.layout)}", x=0.015, ha="left", fontsize=12)
        parts = {name: value / 1e9 for name, value in best.peak.parts.items() if value}
        _bar(memory, parts, " GB")
        memory.axvline(job.gpu.memory / 1e9, color=INK, linewidth=2)
        memory.set_title(f"memory at the peak: {best.peak.name}; the line is the card", loc="left", fontsize=10)
        _bar(time, best.step.parts, " s")
        utilization = f"MFU {best.step.model_mfu:.1%} model, {best.step.hardware_mfu:.1%} hardware"
        time.set_title(f"a step, predicted: {best.step.total:.2f} s, {utilization}", loc="left", fontsize=10)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _bar(axes: Axes, parts: dict[str, float], unit: str) -> None:
    left = 0.0
    for index, (name, value) in enumerate(parts.items()):
        colour = COLOURS[index % len(COLOURS)]
        axes.barh(0, value, left=left, color=colour, height=0.6, label=f"{name} {value:.2f}{unit}")
        left += value
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(frameon=False, ncols=4, fontsize=8.5, loc="upper left", bbox_to_anchor=(0, -0.18))
