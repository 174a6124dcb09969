"""The README's picture from rows of bench/results: a row of panels an op, as SVG. Standard library only, so that the
same rows make the same bytes everywhere and a test can compare them.

A panel whose rows have one number of tokens is bars, one whose rows have more is curves, both axes logarithmic.
"""

import math
from collections.abc import Iterator
from html import escape

from bench.series import FLOOR, METRICS, Group, Panel, Row, headline

OPS = ("linear_ce", "linear_logprob", "moe_experts", "expert_parallel")
WIDTH, HEIGHT, LEGEND, GAP = 292, 216, 130, 20
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 30, 34  # inside a panel
INK, GREY, LINE = "#22303c", "#7b8794", "#e4e7eb"
OURS = ("#1f6fb2", "#2a9d5c", "#0f4c81")
PEERS = ("#c2418f", "#d98324", "#7b5ea7", "#b5482a", "#8a9a5b", "#5c6f82", "#c9b037", "#4fb3bf")


def picture(rows: list[Row]) -> str:
    """The whole file."""
    found = [group for op in OPS if (group := headline(rows, op))]
    width = 3 * WIDTH + LEGEND + 2 * GAP
    height = sum(map(height_of, found)) + GAP + (0 if found else HEIGHT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="11" fill="{INK}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    if not found:
        parts.append(text(GAP, 30, "No row in bench/results yet."))
    colours = colours_of(sorted({name for group in found for name in names_of(group)}, key=order))
    top = GAP
    for group in found:
        parts += row_of(group, top, colours)
        top += height_of(group)
    return "\n".join([*parts, "</svg>"]) + "\n"


def names_of(group: Group) -> list[str]:
    """The providers of a group's panels, in the legend's order."""
    return sorted({name for panel in group.panels if panel.metric in METRICS for name in panel.series}, key=order)


def height_of(group: Group) -> int:
    """Of a row: its panels', or its legend's where that is longer."""
    return max(HEIGHT + 34, TOP + 34 + 17 * len(names_of(group)))


def row_of(group: Group, top: float, colours: dict[str, str]) -> Iterator[str]:
    """Title, panels and legend of one op."""
    yield text(GAP, top + 8, group.title(), size=13, weight="bold")
    panels = [panel for metric in METRICS for panel in group.panels if panel.metric == metric]
    for index, panel in enumerate(panels):
        left = GAP + index * WIDTH
        yield text(left + LEFT, top + 30, f"{METRICS[panel.metric]}, {panel.unit}", colour=GREY)
        draw = curves if len(panel.tokens()) > 1 else bars
        yield from draw(panel, left, top + 10, colours)
    for index, name in enumerate(names_of(group)):
        x, y = GAP + 3 * WIDTH + 6, top + TOP + 16 + 17 * index
        yield f'<path d="M{x} {y - 4}h18" stroke="{colours[name]}" stroke-width="3"{dash(name)}/>'
        yield text(x + 24, y, shown(name), weight="bold" if is_ours(name) else "normal")


def order(name: str) -> tuple[int, str]:
    """Ours first, the floor last."""
    return (0 if is_ours(name) else 2 if name.startswith(FLOOR) else 1), name


def is_ours(name: str) -> bool:
    """Whether a provider is a backend of fusedce."""
    return name.startswith("fusedce-")


def shown(name: str) -> str:
    """A provider's name in the legend."""
    return "bare GEMMs" if name.startswith(FLOOR) else name


def dash(name: str) -> str:
    """The floor's line is dashed."""
    return ' stroke-dasharray="4 3"' if name.startswith(FLOOR) else ""


def colours_of(names: list[str]) -> dict[str, str]:
    """A colour a provider, the same in the whole picture."""
    ours, peers = [n for n in names if is_ours(n)], [n for n in names if not is_ours(n) and not n.startswith(FLOOR)]
    found = {name: OURS[i % len(OURS)] for i, name in enumerate(ours)}
    found |= {name: PEERS[i % len(PEERS)] for i, name in enumerate(peers)}
    return found | {name: INK for name in names if name.startswith(FLOOR)}


def curves(panel: Panel, left: float, top: float, colours: dict[str, str]) -> Iterator[str]:
    """A line a provider through its medians, ours on top."""
    points = [point for series in panel.series.values() for point in series]
    x = scale([float(point.tokens) for point in points], left + LEFT, left + WIDTH - RIGHT - GAP)
    low, high = top + HEIGHT - BOTTOM, top + TOP
    y = scale([point.p50 for point in points], low, high)
    for tokens in panel.tokens():
        yield text(x(tokens), low + 16, thousands(tokens), anchor="middle", colour=GREY)
    yield text((left + LEFT + left + WIDTH - RIGHT - GAP) / 2, low + 30, "tokens", anchor="middle", colour=GREY)
    for tick in ticks(min(p.p50 for p in points), max(p.p50 for p in points)):
        yield f'<path d="M{left + LEFT:.1f} {y(tick):.1f}H{left + WIDTH - RIGHT - GAP:.1f}" stroke="{LINE}"/>'
        yield text(left + LEFT - 6, y(tick) + 4, f"{tick:g}", anchor="end", colour=GREY)
    for name in sorted(panel.series, key=order, reverse=True):
        series = panel.series[name]
        path = " ".join(f"{'L' if i else 'M'}{x(p.tokens):.1f} {y(p.p50):.1f}" for i, p in enumerate(series))
        wide = 2.6 if is_ours(name) else 1.5
        yield f'<path d="{path}" fill="none" stroke="{colours[name]}" stroke-width="{wide}"{dash(name)}/>'
        for p in series:
            yield f'<circle cx="{x(p.tokens):.1f}" cy="{y(p.p50):.1f}" r="{wide + 0.6:.1f}" fill="{colours[name]}"/>'


def bars(panel: Panel, left: float, top: float, colours: dict[str, str]) -> Iterator[str]:
    """One number of tokens: the smallest first."""
    (tokens,) = panel.tokens()
    values = sorted((series[0].p50, name) for name, series in panel.series.items())
    room, longest = WIDTH - LEFT - RIGHT - 56, max(value for value, _ in values)
    step = min((HEIGHT - TOP - BOTTOM) / len(values), 26.0)
    for index, (value, name) in enumerate(values):
        y, long = top + TOP + index * step, room * value / longest if longest > 0 else 0.0
        yield (
            f'<rect x="{left + LEFT:.1f}" y="{y:.1f}" width="{long:.1f}" height="{step * 0.72:.1f}" '
            f'fill="{colours[name]}"/>'
        )
        weight = "bold" if is_ours(name) else "normal"
        yield text(left + LEFT + long + 5, y + step * 0.36 + 4, f"{value:.4g}", weight=weight)
    yield text(left + LEFT, top + HEIGHT - BOTTOM + 16, f"at {thousands(tokens)} tokens", colour=GREY)


def scale(values: list[float], start: float, end: float):  # type: ignore[no-untyped-def]
    """A function from a value to its place, logarithmic, with a margin."""
    low, high = math.log(max(min(values), 1e-9)), math.log(max(*values, 1e-9))
    margin = 0.06 * (high - low) or 0.5
    span = high - low + 2 * margin
    return lambda value: start + (end - start) * (math.log(max(value, 1e-9)) - low + margin) / span


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from low to high; fewer where that is many."""
    low = max(low, 1e-9)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**decade for decade in decades for step in steps]
        inside = [round(tick, 9) for tick in found if low * 0.97 <= tick <= high * 1.03]
        if len(inside) <= 6:
            break
    return inside


def thousands(tokens: int) -> str:
    """16384 is 16K."""
    return f"{tokens >> 10}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def text(
    x: float, y: float, words: str, *, anchor: str = "start", colour: str = INK, size: int = 11, weight: str = "normal"
) -> str:
    """One line of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )
