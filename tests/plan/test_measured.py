"""What the planner counts with is what the rows of bench/results say."""

import csv

import pytest

from fusedce.plan.gpus import GPUS
from fusedce.plan.layout import POLICIES, Job, Layout
from fusedce.plan.measured import ASSUMED, SHAPES, rate
from fusedce.plan.memory import moments
from fusedce.plan.models import MODELS
from fusedce.plan.widths import widths
from tests.house.source import ROOT

GIB = 2**30


def rows(file: str) -> list[dict[str, str]]:
    with (ROOT / "bench" / "results" / file).open(newline="") as lines:
        return list(csv.DictReader(lines))


def peaks(file: str, case: str) -> list[float]:
    """Our backends' newest peaks of a case, forward and backward, bytes beside inputs and gradients."""
    newest = {
        row["provider"]: float(row["p50"]) * GIB
        for row in sorted(rows(file), key=lambda row: row["date"])
        if row["provider"].startswith("fusedce-")
        and row["op"] == file.removesuffix(".csv")
        and (row["case"], row["mode"], row["metric"]) == (case, "fwd_bwd", "peak")
    }
    return list(newest.values())


def test_a_measured_rate_is_flops_over_the_row_s_time() -> None:
    found = rate("loss", GPUS["h200"], 65_536)
    times = {
        row["provider"]: float(row["p50"]) * 1e-3
        for row in rows("linear_ce.csv")
        if row["case"] == "N65536_D2048_V124160_random"
        and (row["op"], row["mode"], row["metric"]) == ("linear_ce", "fwd_bwd", "time")
    }
    fastest = min(value for provider, value in times.items() if provider.startswith("fusedce-"))
    assert found.share == pytest.approx(6 * 65_536 * 2048 * 124_160 / fastest / 989.4e12, rel=1e-3)
    assert "measured: linear_ce N65536" in found.source


def test_a_measured_share_is_lent_to_the_same_die_only() -> None:
    assert "measured on H200" in rate("experts", GPUS["h100"], 16_384).source
    assert rate("experts", GPUS["h100"], 16_384).share == rate("experts", GPUS["h200"], 16_384).share
    assert "N16384" in rate("experts", GPUS["h200"], 9000).source
    assert "N65536" in rate("experts", GPUS["h200"], 131_072).source
    for gpu in ("b200", "mi300x", "mi355x"):
        found = rate("experts", GPUS[gpu], 16_384)
        assert found.share == ASSUMED["experts"] and "assumed" in found.source


def test_shapes_are_the_benchmarks() -> None:
    text = (ROOT / "bench" / "moe.py").read_text()
    for letter, sizes in SHAPES.items():
        assert f'"{letter}": {sizes}'.replace("14_336", "14336") in text


@pytest.mark.parametrize(
    ("case", "tokens", "hidden", "vocab"),
    [("N65536_D2048_V124160_random", 65_536, 2048, 124_160), ("N8192_D4096_V128256_random", 8192, 4096, 128_256)],
)
def test_the_loss_takes_no_more_inside_than_is_planned(case: str, tokens: int, hidden: int, vocab: int) -> None:
    """One-sided: kernels may come to need less; a plan may not promise what does not fit. Gradients times the upstream
    one are a second set of them, and when some rows were measured autograd made zeros as large beside it.
    """
    model = MODELS["qwen3-30b-a3b"]
    sized = type(model)("x", 1, hidden, 32, 4, 128, vocab, 8, 2, 64)
    job = Job(sized, GPUS["h200"], 1, tokens, tokens, POLICIES["fp32-shards"], 0.0)
    inside = moments(job, Layout())[0].parts["inside kernels"]
    measured = peaks("linear_ce.csv", case)
    gradients = 2 * hidden * (tokens + vocab)
    assert measured and max(inside, 2 * gradients) >= 0.98 * min(measured)


@pytest.mark.parametrize("tokens", [16_384, 65_536])
def test_the_experts_take_no_more_than_is_planned(tokens: int) -> None:
    """Kept pre-activations, the rows' gradient, and what the kernels allocate, for shape A. When the first rows were
    measured, autograd still made zeros as large as the pre-activations.
    """
    wide = widths(MODELS["qwen3-30b-a3b"], Layout())
    hidden, ffn, _, top_k = SHAPES["A"]
    planned = tokens * (2 * top_k * (2 * 2 * ffn + hidden) + wide.moe_inside)
    measured = peaks("moe_experts.csv", f"A_N{tokens}_skewed")
    assert measured and planned >= 0.98 * min(measured)
