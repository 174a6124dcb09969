"""A plan on the screen: tables, and two bars as text."""

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fusedce.plan.gpus import Gpu
from fusedce.plan.launch import commands
from fusedce.plan.layout import Layout
from fusedce.plan.reasons import reasons
from fusedce.plan.recipe import Answer
from fusedce.plan.report import MFU
from fusedce.plan.sweep import Point

GB = 1e9
COLOURS = (
    "cyan",
    "blue",
    "green",
    "magenta",
    "yellow",
    "red",
    "bright_cyan",
    "bright_magenta",
    "white",
    "bright_black",
)
WIDTH = 64


def plan(console: Console, answer: Answer, upgrade: str) -> None:
    """The answer. upgrade: one line about the next card up, or empty."""
    job, best = answer.job, answer.best
    size = f"{job.model.params / 1e9:.1f}B parameters, {job.model.active_params / 1e9:.1f}B active"
    batch = f"{job.seq_len:,} tokens a sequence, {job.sequences} sequences a step"
    head = f"[bold]{job.model.name}[/] · {size} · {batch} · {job.gpus} × {job.gpu.title}"
    console.print(head, highlight=False)
    table = Table("", "takes", "bound by · [dim]slack[/]", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for reason in reasons(answer):
        slack = f" · [dim]{reason.slack}[/]" if reason.slack else ""
        table.add_row(f"[bold]{reason.dim}[/]", reason.value, reason.bound_by + slack)
    console.print(Panel(table, title="one layout", title_align="left", border_style="grey42"))
    console.print(_memory(answer))
    console.print(_time(answer))
    if upgrade:
        console.print(upgrade, highlight=False)
    for line in commands(answer):
        console.print(line, style="dim" if line.startswith("#") else "bold", highlight=False, soft_wrap=True)
    if best.layout != answer.simplest.layout:
        cost = answer.simplest.step.total / best.step.total - 1
        console.print(f"simpler, {cost:.0%} slower: {named(answer.simplest.layout)}", highlight=False)


def sweep(console: Console, answer: Answer, points: list[Point]) -> None:
    """The grid's best, what fits, and why the others do not."""
    running = [point for point in points if point.candidate]
    title = f"{len(points)} configurations, {len(running)} fit; none of them need be tried"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("configuration", no_wrap=True)
    for name in ("peak, GB", "step, s", "against the plan"):
        table.add_column(name)
    for point in points:
        if point.candidate is None:
            table.add_row(named(point.layout), "", "", f"[dim]{point.refusal}[/]")
            continue
        found = point.candidate
        ratio = f"{point.against(answer.best) - 1:+.1%}"
        table.add_row(named(point.layout), f"{found.peak.total / GB:.1f}", f"{found.step.total:.2f}", ratio)
    console.print(table)


def comparison(console: Console, found: list[tuple[Gpu, Answer | str]]) -> None:
    """One column of numbers a card."""
    table = Table("", *(gpu.title for gpu, _ in found), box=None, padding=(0, 2), header_style="bold")
    rows: dict[str, list[str]] = {}
    for gpu, answer in found:
        for name, value in _card(gpu, answer).items():
            rows.setdefault(name, []).append(value)
    for name, values in rows.items():
        table.add_row(name, *values)
    console.print(table)


def named(layout: Layout) -> str:
    """A layout in one line."""
    dims = f"PP {layout.pp} TP {layout.tp} EP {layout.ep} CP {layout.cp} DP {layout.dp}"
    return f"{dims}, {layout.recomputed} recomputed, {layout.chunks} chunks"


def bar(parts: dict[str, float], full: float, width: int = WIDTH) -> Text:
    """Blocks of `width` cells for `full`, a colour a part; cells that no part reaches are dots. Rounding is of the
    running sum, so that the bar's length is that of the total.
    """
    text, done, cells = Text(), 0.0, 0
    for colour, value in zip(_colours(len(parts)), parts.values(), strict=True):
        done += value
        until = min(round(done / full * width), width)
        text.append("█" * (until - cells), style=colour)
        cells = max(cells, until)
    return text.append("·" * (width - cells), style="grey37")


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _legend(parts: dict[str, float], unit: str, scale: float) -> Text:
    text = Text()
    for colour, (name, value) in zip(_colours(len(parts)), parts.items(), strict=True):
        text.append("█ ", style=colour)
        text.append(f"{name} {value / scale:.2f}{unit}   ")
    return text


def _memory(answer: Answer) -> RenderableType:
    job, peak = answer.job, answer.best.peak
    parts = {name: value for name, value in peak.parts.items() if value}
    title = (
        f"memory {peak.total / GB:.1f} of {job.gpu.memory / GB:.0f} GB at the peak ({peak.name}), "
        f"{(job.gpu.memory - peak.total) / GB:.1f} free"
    )
    body = Group(bar(parts, job.gpu.memory), _legend(parts, " GB", GB))
    return Panel(body, title=title, title_align="left", border_style="grey42")


def _time(answer: Answer) -> RenderableType:
    step = answer.best.step
    rates = Table.grid(padding=(0, 2))
    for part, source in step.rates.items():
        rates.add_row(f"[dim]{part}[/]", f"[dim]{source}[/]")
    mfu = Table.grid(padding=(0, 2))
    for name, value in (
        ("model", step.model_mfu),
        ("hardware", step.hardware_mfu),
        ("not_causal", step.not_causal_mfu),
    ):
        mfu.add_row(f"MFU {name.replace('_', ' ')}", f"{value:.1%}", f"[dim]{MFU[name]}[/]")
    title = f"step {step.total:.2f} s, {step.tokens_per_second:,.0f} tokens/s, predicted"
    body = Group(bar(step.parts, step.total), _legend(step.parts, " s", 1), "", mfu, "", rates)
    return Panel(body, title=title, title_align="left", border_style="grey42")


def _card(gpu: Gpu, answer: Answer | str) -> dict[str, str]:
    names = "layout|simplest CP that fits|recompute|peak, GB|of the card|free, GB|step, s|model MFU|hardware MFU"
    if isinstance(answer, str):
        return dict.fromkeys(names.split("|"), "–") | {"layout": "nothing fits"}
    layout, best = answer.layout, answer.best
    values = (
        f"EP {layout.ep} CP {layout.cp} TP {layout.tp} PP {layout.pp} DP {layout.dp}, {layout.chunks} chunks",
        f"{answer.simplest.layout.cp}, {answer.simplest.layout.recomputed} recomputed",
        f"{layout.recomputed} of {layout.stage_layers(answer.job.model)}",
        f"{best.peak.total / GB:.1f}",
        f"{best.peak.total / gpu.memory:.1%}",
        f"{(gpu.memory - best.peak.total) / GB:.1f}",
        f"{best.step.total:.2f}",
        f"{best.step.model_mfu:.1%}",
        f"{best.step.hardware_mfu:.1%}",
    )
    return dict(zip(names.split("|"), values, strict=True))


def measured(console: Console, found: dict[str, Any]) -> None:
    """Predicted beside tracked memory of rank 0."""
    table = Table("", "predicted, GB", "tracked, GB", "ratio", box=None, padding=(0, 2))
    for name, (predicted, tracked) in found["parts"].items():
        ratio = f"{predicted / tracked:.3f}" if tracked else ""
        table.add_row(name, f"{predicted / GB:.3f}", f"{tracked / GB:.3f}", ratio)
    console.print(Panel(table, title=found["title"], title_align="left", border_style="grey42"))
