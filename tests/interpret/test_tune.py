"""`fusedce tune`'s search by Triton's interpreter, with a timer that says what it is told to."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedce.commands.tune import TuneConfig, finish
from fusedce.configs import choice, tuned
from fusedce.configs.tables import TABLES
from fusedce.tune import candidates as listed
from fusedce.tune.search import Outcome, Problem, Tried, search
from fusedce.verify.primitives import Sizes
from fusedce.verify.tolerance import Margin

pytestmark = pytest.mark.interpret
CPU, ARCH = torch.device("cpu"), "generic"
TINY = Sizes(16, 70, 32, 2, 16, 2, has_bias=False)
FORWARD = "linear_ce_fwd"
OWN = TABLES[ARCH][FORWARD]


def problem(op: str = "linear_argmax") -> Problem:
    return Problem(op, TINY, CPU, checked=(TINY,))


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Three candidates only: the table's and two others."""
    few = [OWN, replace(OWN, block_n=32), replace(OWN, block_m=32)]
    monkeypatch.setattr("fusedce.tune.search.candidates", lambda *_: few)
    return few


def timer(milliseconds: Callable[[Any, int], float]) -> Callable[[Callable[[], object]], float]:
    """Asks `milliseconds` of the tile in force and of the number of the call, and runs nothing."""
    calls = iter(range(10_000))

    def told(_: Callable[[], object]) -> float:
        return milliseconds(choice._changed(FORWARD, problem().arch), next(calls))

    return told


def test_the_fastest_is_found_in_turns(tiles: list[Any]) -> None:
    order = []

    def milliseconds(tile: Any, call: int) -> float:
        order.append(tile)
        return {tiles[0]: 3.0, tiles[1]: 1.0, tiles[2]: 2.0}[tile] + call * 1e-3

    outcome = search(problem(), timer(milliseconds), rounds=3)
    assert outcome.tiles == {FORWARD: tiles[1]}
    assert order == tiles * 5  # two turns to warm up
    assert [one.tile for one in outcome.tried] == tiles and all(one.reason == "" for one in outcome.tried)


def test_the_table_s_stays_unless_another_is_clearly_faster(tiles: list[Any]) -> None:
    """Its own 20th percentile is 1.0; a median of 1.5 is within what it scatters."""
    outcome = search(problem(), timer(lambda t, call: (1.0, 3.0)[call // 3 % 2] if t == OWN else 1.5), rounds=5)
    assert outcome.tiles == {}


def test_a_wrong_candidate_is_never_timed(tiles: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that only tiles of 32 columns show."""
    right = Problem.run

    def wrong(self: Problem) -> list[Any]:
        tile = choice._changed(FORWARD, self.arch)
        return [out + (tile is not None and tile.block_n == 32) for out in right(self)]

    monkeypatch.setattr(Problem, "run", wrong)
    outcome = search(problem(), timer(lambda tile, _: 0.1 if tile == tiles[1] else 1.0), rounds=1)
    assert outcome.tiles == {}
    (refused,) = [one for one in outcome.tried if one.reason]
    assert refused.tile == tiles[1] and refused.p50 is None and "differ from the table's" in refused.reason


def test_a_candidate_that_fails_the_rule_or_to_launch_is_told(
    tiles: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(*arguments: Any) -> Any:
        tile = choice._changed(FORWARD, problem().arch)
        if tile.block_m == 32:
            raise RuntimeError("out of resource: shared memory\nmore")
        return {"word": Margin(2.0, "3 of 16 differ") if tile.block_n == 32 else Margin(0.0, None)}

    monkeypatch.setattr("fusedce.tune.search.margins", checked)
    outcome = search(problem(), timer(lambda *_: 1.0), rounds=1)
    assert {one.reason for one in outcome.tried} == {
        "",
        "word: 3 of 16 differ",
        "RuntimeError: out of resource: shared memory",
    }


def test_every_stage_of_an_op_is_searched_and_its_candidates_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's tiles for the stages of the experts and the next one's, by the interpreter and the rule."""
    monkeypatch.setattr("fusedce.tune.search.candidates", lambda *given: listed.candidates(*given)[:2])
    outcome = search(problem("moe_experts"), lambda run: 1.0, rounds=1)
    assert {one.stage for one in outcome.tried} == {"moe_gate_up_few", "moe_rows_few", "moe_wgrad_few"}
    assert len(outcome.tried) == 6 and not [one for one in outcome.tried if one.reason] and outcome.tiles == {}


def test_candidates_fit_and_keep_what_a_kernel_needs() -> None:
    for arch, table in TABLES.items():
        for stage in table:
            found = listed.candidates(stage, arch, {})
            assert found[0] == table[stage] and len(set(found)) == len(found)
            assert all(tuned.fault({stage: tile}, arch) is None for tile in found)
            assert {tile.staged_bytes for tile in found} == {table[stage].staged_bytes}
            assert {tile.tma for tile in found} == {table[stage].tma}
    assert len(listed.candidates("linear_ce_fwd", "sm_90", {})) > 3
    rows = {tile.block_m for tile in listed.candidates("moe_rows", "sm_90", {})}
    assert rows == {128}


def test_the_winner_is_kept_and_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("FUSEDCE_TUNED", "1")
    tuned.kept.cache_clear()
    better = replace(OWN, block_n=32)
    outcome = Outcome({FORWARD: better}, [])
    assert finish(TuneConfig("linear_argmax", dry_run=True), ARCH, outcome) == 0
    assert "not kept (--dry-run)" in capsys.readouterr().out and not list(tmp_path.iterdir())
    assert finish(TuneConfig("linear_argmax", json=True), ARCH, outcome) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["kept"] == str(tuned.path_of(ARCH)) and said["better"][FORWARD]["block_n"] == 32
    assert json.loads(tuned.path_of(ARCH).read_text())["measured"]["config"]["op"] == "linear_argmax"
    assert choice.tile_for(FORWARD, problem().arch, 2) == better
    tuned.kept.cache_clear()


def test_a_table_s_tile_that_is_wrong_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Outcome({}, [Tried(FORWARD, OWN, None, None, "word: 3 of 16 differ")])
    assert finish(TuneConfig("linear_argmax"), ARCH, outcome) == 1
    assert "the table's own tile is wrong here: linear_ce_fwd" in capsys.readouterr().out
