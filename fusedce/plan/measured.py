"""How fast an op is: from a row that was measured, where there is one for the same kind of die; else a stated share of
the datasheet's peak. `measured.csv` is written from bench/results by `make figures`.
"""

import csv
import functools
import math
import re
from dataclasses import dataclass
from importlib import resources

from fusedce.plan.gpus import GPUS, Gpu

# Shares of the dense peak that are assumed where nothing was measured: choices, not measurements.
ASSUMED = {"projections": 0.60, "attention": 0.50, "experts": 0.40, "loss": 0.55}
# Of a link's datasheet rate, for collectives of large messages; of HBM's, for passes over activations.
LINK_SHARE = 0.60
HBM_SHARE = 0.75
# Which op of bench/results measures which part of a step.
OPS = {"loss": "linear_ce", "experts": "moe_experts"}
# The letters of bench/moe.py: hidden, ffn, experts, top_k.
SHAPES = {"A": (2048, 768, 128, 8), "B": (2048, 512, 256, 8), "C": (4096, 14_336, 8, 2)}


@dataclass(frozen=True)
class Rate:
    """FLOP/s of a part of the step, as a share of the card's dense bf16 peak, and where the share comes from."""

    share: float
    source: str


def rate(part: str, gpu: Gpu, tokens: int) -> Rate:
    """The rate of "projections", "attention", "experts" or "loss" on a card, for about `tokens` tokens at once: of the
    measured cases the one nearest in tokens, of its providers the fastest.
    """
    found = [row for row in _rows() if row["op"] == OPS.get(part) and _card(row["gpu"]).die == gpu.die]
    if not found:
        return Rate(ASSUMED[part], f"{ASSUMED[part]:.0%} of the datasheet's peak, assumed")
    nearest = min(found, key=lambda row: (abs(math.log(tokens / _tokens(row["case"]))), float(row["p50"])))
    card = _card(nearest["gpu"])
    share = _flops(part, nearest["case"]) / (float(nearest["p50"]) * 1e-3) / card.peak
    where = "measured" if card.name == gpu.name else f"the share of peak measured on {card.title}"
    row = f"{nearest['op']} {nearest['case']}, {nearest['provider']}, commit {nearest['commit']}"
    return Rate(share, f"{share:.0%} of peak, {where}: {row}")


@functools.cache
def _rows() -> list[dict[str, str]]:
    """Forward with backward, times in ms, our own backends, of the cards in the table."""
    text = resources.files("fusedce.plan").joinpath("measured.csv").read_text(encoding="utf-8")
    known = {gpu.title.split()[0] for gpu in GPUS.values()}
    rows = csv.DictReader(text.splitlines())
    return [row for row in rows if row["gpu"].split()[-1] in known and row["mode"] == "fwd_bwd"]


def _card(title: str) -> Gpu:
    return next(gpu for gpu in GPUS.values() if gpu.title.split()[0] == title.split()[-1])


def _tokens(case: str) -> int:
    found = re.search(r"N(\d+)", case)
    if found is None:
        raise ValueError(f"measured.csv: case {case!r} names no tokens")
    return int(found[1])


def _flops(part: str, case: str) -> float:
    """Of a case's forward and backward: three times the products of the forward."""
    tokens = _tokens(case)
    if part == "experts":
        hidden, ffn, _, top_k = SHAPES[case.split("_")[0]]
        return 18.0 * tokens * top_k * hidden * ffn
    sizes = re.search(r"D(\d+)_V(\d+)", case)
    if sizes is None:
        raise ValueError(f"measured.csv: case {case!r} names no sizes")
    return 6.0 * tokens * int(sizes[1]) * int(sizes[2])
