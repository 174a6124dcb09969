"""Predicted memory against torch's own tracker, at real widths and lengths, over models, experts, chunks, recompute."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from fusedce import cli
from fusedce.dryrun import Tracked, track
from fusedce.dryrun.compare import as_run, beside, predicted
from fusedce.plan.gpus import GPUS
from fusedce.plan.layout import POLICIES, Job, Layout
from fusedce.plan.models import MODELS, Model

TOLERANCE = 0.05
STATIC = ("weights", "gradients", "optimizer")
MODEL = {
    "qwen3": MODELS["qwen3-30b-a3b"],
    "mixtral": MODELS["mixtral-8x7b"],
    # odd widths, few tokens: weights are all there is
    "small": Model("small", 2, 320, 5, 1, 64, 10_007, 12, 3, 200),
}


@dataclass(frozen=True)
class Point:
    """A grid point: a few layers of a model on `gpus` ranks, `tokens` on each."""

    model: str
    gpus: int
    tokens: int
    ep: int
    chunks: int
    recomputed: int

    def __str__(self) -> str:
        return f"{self.model}-{self.gpus}x{self.tokens}-ep{self.ep}-chunks{self.chunks}-recomputed{self.recomputed}"

    def setting(self) -> tuple[Job, Layout]:
        # Where a layer is gathered whole, the one after it is too: that takes a third.
        model = replace(MODEL[self.model], layers=3 if self.ep == 1 else 2)
        step = 2 * self.gpus * self.tokens
        job = Job(model, GPUS["h100"], self.gpus, self.tokens, step, POLICIES["fp32-shards"], 0.0)
        return job, Layout(dp=self.gpus, ep=self.ep, chunks=self.chunks, recomputed=self.recomputed)


GRID = [
    Point("qwen3", 32, 4096, 1, 1, 3),
    Point("qwen3", 32, 32_768, 1, 1, 0),
    Point("qwen3", 32, 32_768, 8, 1, 2),
    Point("qwen3", 32, 131_072, 8, 1, 1),
    Point("qwen3", 32, 131_072, 8, 4, 2),
    Point("qwen3", 8, 16_384, 8, 2, 1),
    Point("qwen3", 64, 65_536, 4, 2, 0),
    Point("qwen3", 13, 16_384, 1, 2, 3),
    Point("mixtral", 16, 8192, 1, 1, 3),
    Point("mixtral", 16, 32_768, 8, 1, 0),
    Point("mixtral", 64, 65_536, 8, 2, 2),
    Point("mixtral", 16, 32_768, 4, 2, 1),
    Point("small", 4, 1000, 1, 1, 3),
    Point("small", 6, 5003, 3, 1, 1),
    Point("small", 1, 2048, 1, 2, 0),
]


@pytest.mark.parametrize("point", GRID, ids=str)
def test_prediction_is_what_torch_tracks(point: Point) -> None:
    job, layout = point.setting()
    tracked, expected = track(job, layout), predicted(job, layout)
    assert expected.visible == pytest.approx(tracked.total, rel=TOLERANCE), beside(expected, tracked)
    for part in STATIC:
        assert expected.parts[part] == pytest.approx(tracked.parts[part], rel=0.02), part
    assert not dist.is_initialized()


def test_the_bar_refuses_another_layout() -> None:
    """The bite: what is tracked for one setting is not what is predicted for its neighbours."""
    job, layout = GRID[2].setting()
    tracked = track(job, layout).total
    others = [replace(layout, chunks=4), replace(layout, recomputed=0), replace(layout, ep=1)]
    wrong = [predicted(job, other).visible for other in others]
    wrong.append(predicted(replace(job, policy=POLICIES["bf16"]), layout).visible)
    wrong.append(predicted(replace(job, seq_len=job.seq_len // 2), layout).visible)
    assert all(abs(value / tracked - 1) > TOLERANCE for value in wrong)


def test_a_plan_becomes_a_run_that_the_trainer_can_do() -> None:
    job = replace(GRID[0].setting()[0], model=MODELS["qwen3-30b-a3b"], seq_len=131_072, reserve=5e9)
    shorter, layout = as_run(job, Layout(cp=4, dp=8, ep=8, recomputed=1, chunks=4))
    assert (shorter.seq_len, shorter.model.layers, shorter.reserve) == (32_768, 4, 0.0)
    assert (layout.cp, layout.dp, layout.recomputed) == (1, 32, 1)
    assert as_run(job, Layout(dp=32, recomputed=47))[1].recomputed == 3
    with pytest.raises(ValueError, match="PP 2"):
        as_run(job, Layout(pp=2, dp=16))
    with pytest.raises(ValueError, match="must be 1"):
        track(job, Layout(cp=4, dp=8))


def test_the_command_shows_both(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    config = dict(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=1000, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["plan", "--model", str(tmp_path), "--gpus", "2", "--seq-len", "4096", "--run"]) == 0
    out = capsys.readouterr().out
    assert "predicted and tracked" in out and "leaving gradients" in out
    assert cli.main(["plan", "--model", "gpt-oss-20b", "--gpus", "32", "--run"]) == 2
    assert "cannot be gpt-oss-20b" in capsys.readouterr().err


def test_tracked_sums_its_parts() -> None:
    assert Tracked({"weights": 1.0, "optimizer": 2.0}).total == 3.0
