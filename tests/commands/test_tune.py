"""`fusedce tune` as a command: what it refuses, and what it shows. tests/interpret/test_tune.py is about its search."""

from dataclasses import replace

import pytest
import torch

from fusedce import cli
from fusedce.commands.tune import TuneConfig, finish
from fusedce.configs.tables import TABLES
from fusedce.tune.search import Outcome, Tried

STAGE = "linear_ce_fwd"
TABLE = TABLES["sm_90"][STAGE]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["linear_ce_sum"], "tiles are for GPUs, and torch sees none here"),
        (["linear_ce_sum", "--device", "cpu"], "tiles are for GPUs"),
        (["linear_ce_sum", "--device", "cuda"], "device is 'cuda', and torch sees 0 GPUs"),
        (["linear_ce_sum", "--tokens", "0"], "tokens is 0; expected at least 1"),
        (["moe_experts", "--experts", "4", "--top-k", "5"], "top_k is 5; expected at most experts = 4"),
    ],
)
def test_what_cannot_be_asked_for(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["tune", *arguments]) == 2
    error = capsys.readouterr().err
    assert error == f"fusedce tune: {message}\n"


def test_what_was_tried_is_shown_fastest_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    better = replace(TABLE, block_n=128)
    refused = replace(TABLE, block_m=64)
    tried = [
        Tried(STAGE, refused, None, None, "loss: 3 NaN"),
        Tried(STAGE, TABLE, 1.9, 2.0),
        Tried(STAGE, better, 1.0, 1.1),
    ]
    assert finish(TuneConfig("linear_logprob", dry_run=True), "sm_90", Outcome({STAGE: better}, tried)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:4]] == ["128×128×64", "128×256×64", "64×256×64"]
    assert lines[1].rstrip().endswith("better") and "loss: 3 NaN" in lines[3]
    assert lines[-1] == "better: linear_ce_fwd; not kept (--dry-run)"
    assert finish(TuneConfig("linear_logprob"), "sm_90", Outcome({}, tried[1:2])) == 0
    assert "the table's tiles are the best of these" in capsys.readouterr().out
