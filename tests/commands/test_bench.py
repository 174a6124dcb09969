"""`fusedce bench` and the pictures: what is listed, run, appended, shown and drawn; outside a checkout it says so."""

import csv
import json
import re
import subprocess
import warnings
import xml.etree.ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fusedce
from bench import picture, series
from fusedce import cli
from fusedce.commands import bench
from tests.house.source import ROOT
from tests.house.test_tools import load

COLUMNS = "op,provider,case,mode,metric,unit,p20,p50,p80,n,gpu,torch,triton,commit,date".split(",")


def row(provider: str, tokens: int, p50: float, metric: str = "time", date: str = "2026-01-01", **more: str) -> Any:
    found = {"op": "linear_ce", "provider": provider, "case": f"N{tokens}_D8_V9_random", "mode": "fwd_bwd"}
    found |= {"metric": metric, "unit": "ms", "p20": str(p50 * 0.9), "p50": str(p50), "p80": str(p50 * 1.1), "n": "7"}
    return found | {"gpu": "H200", "torch": "2", "triton": "3", "commit": "c", "date": date} | more


ROWS = [
    row("floor3", 1024, 10.0),
    row("floor3", 4096, 40.0),
    row("fusedce-triton", 1024, 99.0),
    row("fusedce-triton", 4096, 50.0),
    row("fusedce-triton", 1024, 12.0, date="2026-01-02"),
    row("floor3", 1024, 8.0, date="2026-01-02"),
    row("<peer> & co", 1024, 20.0),
    row("fusedce-triton", 1024, 1.5, metric="peak", unit="GiB"),
]


def write(path: Path, rows: list[Any]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_rows_become_curves_and_ratios() -> None:
    (group,) = series.groups(ROWS)
    assert (group.shape, group.title()) == ("D8_V9_random", "linear_ce, D8 V9 random, forward and backward, H200")
    panels = {panel.metric: panel for panel in group.panels}
    assert panels["time"].tokens() == [1024, 4096]
    assert [point.p50 for point in panels["time"].series["fusedce-triton"]] == [12.0, 50.0]  # the later row of 1024
    # Each to the floor of its own run.
    assert [point.p50 for point in panels["ratio"].series["fusedce-triton"]] == [1.5, 1.25]
    assert [point.p50 for point in panels["ratio"].series["<peer> & co"]] == [2.0]
    assert panels["peak"].unit == "GiB"
    with pytest.raises(ValueError, match="does not name its tokens once"):
        series.split("smoke")
    assert series.groups([row("a", 8, float("nan")), row("a", 8, 1.0) | {"case": "smoke"}]) == []


def test_the_headline_has_most_numbers_of_tokens() -> None:
    alone = [row("fusedce-triton", 65536, 1.0) | {"case": "N65536_D1_V1_random"} for _ in range(9)]
    found = series.headline([*alone, *ROWS], "linear_ce")
    assert found is not None and found.shape == "D8_V9_random"
    assert series.headline(ROWS, "moe_experts") is None and series.headline([], "linear_ce") is None


def texts(drawn: str) -> list[str]:
    root = xml.etree.ElementTree.fromstring(drawn)
    return [element.text or "" for element in root if element.tag.endswith("text")]


def test_the_readme_s_picture_shows_every_provider_and_picks_up_rows() -> None:
    svg = load("svg")
    drawn = svg.picture(ROWS)
    said = texts(drawn)
    assert {"fusedce-triton", "<peer> & co", "bare GEMMs", "1K", "4K", "tokens", "at 1K tokens"} <= set(said)
    assert drawn.count("<circle") == 2 + 2 + 1 + 2 + 1  # time: floor, ours, peer; ratio: ours, peer. The peak is a bar.
    more = svg.picture([*ROWS, row("fusedce-triton", 16384, 180.0)])
    assert "16K" in texts(more) and drawn == svg.picture(ROWS)
    both = svg.picture([*ROWS, *(r | {"op": "moe_experts", "case": r["case"].replace("D8_V9", "A")} for r in ROWS)])
    assert sum("forward and backward" in words for words in texts(both)) == 2
    many = [row(f"deduplicated_{i}", 1024 * i, 1.0 * i, op="expert_parallel") for i in range(1, 25)]
    tall = xml.etree.ElementTree.fromstring(svg.picture(many))
    lowest = max(float(element.get("y", 0)) for element in tall if element.tag.endswith("text"))
    assert lowest < float(tall.get("height", 0)) and len(texts(svg.picture(many))) > 24
    assert texts(svg.picture([])) == ["No row in bench/results yet."]


def test_the_readme_s_picture_is_of_today_s_rows() -> None:
    """`tools/figures.py --check` compares every byte; here, that it shows the newest medians' providers."""
    said = texts((ROOT / "docs" / "images" / "measured.svg").read_text())
    group = series.headline(series.read(sorted((ROOT / "bench" / "results").glob("*.csv"))), "linear_ce")
    assert group is not None and group.title() in said
    shown = {name for panel in group.panels for name in panel.series if not name.startswith("floor")}
    assert shown <= set(said)


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (0.03, 0.04), (5.1, 226.0), (1e-3, 1e5), (40.0, 60.0)])
def test_an_axis_has_a_few_ticks_inside(low: float, high: float) -> None:
    found = load("svg").ticks(low, high)
    assert len(found) <= 10 and all(low * 0.97 <= tick <= high * 1.03 for tick in found) and found == sorted(found)


def test_a_png_is_drawn(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture.draw(ROWS, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ValueError, match="no row has a time"):
        picture.draw([row("a", 8, 1.0, metric="rate")], tmp_path / "y.png")


def test_it_lists_cases_and_providers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == set(bench.NAMES) and all(one["cases"] and one["providers"] for one in found.values())
    assert "fusedce-eager" in found["linear_ce"]["providers"] and "naive_1" in found["expert_parallel"]["providers"]
    scripts = {path.stem for path in (ROOT / "bench").glob("*.py") if "\nif __name__" in path.read_text()}
    assert scripts == set(bench.NAMES)


def test_it_runs_one_and_appends_its_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, png = tmp_path / "rows.csv", tmp_path / "moe.png"
    options = ["--device", "cpu", "--rounds", "1", "--providers", "fusedce-eager", "--commit", "abc"]
    assert cli.main(["bench", "moe", *options, "--out", str(out), "--png", str(png), "--json"]) == 0
    printed, on_the_way = capfd.readouterr()
    rows = json.loads(printed)
    assert {r["provider"] for r in rows} == {"floor", "fusedce-eager"} and {r["commit"] for r in rows} == {"abc"}
    assert series.read([out]) == rows and png.exists() and "smoke_64" in on_the_way


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that would have been run, each of which writes one row."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        write(Path(command[command.index("--out") + 1]), ROWS[:1])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_options_are_passed_on(ran: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.csv"
    for _ in range(2):
        assert cli.main(["bench", "linear_ce", "--device", "cpu", "--cases", "llama", "--out", str(out)]) == 0
    command = " ".join(ran[0])
    assert "-m bench.linear_ce --device cpu --cases llama --rounds 7 --out " in command
    assert out.read_text().count("linear_ce,") == 2 and out.read_text().count("provider") == 1
    assert "floor3" in capsys.readouterr().out
    assert cli.main(["bench", "expert_parallel", "--device", "cpu", "--ranks", "4"]) == 0
    assert re.search(
        r"-m torch.distributed.run --standalone --nproc-per-node 4 -m bench.expert_parallel", " ".join(ran[-1])
    )


def test_rows_are_shown_and_drawn_without_a_run(
    ran: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = write(tmp_path / "rows.csv", ROWS)
    assert cli.main(["bench", "--rows", str(path), "--png", str(tmp_path / "x.png")]) == 0
    printed = capsys.readouterr().out
    assert not ran and (tmp_path / "x.png").exists() and "H200" in printed
    assert re.search(r"N4096_D8_V9_random +fwd_bwd +time, ms +fusedce-triton +50 +45–55 +1\.25", printed)


def test_a_benchmark_that_fails_or_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for code, message in ((3, ""), (0, "fusedce bench: moe gave no row")):
        monkeypatch.setattr(subprocess, "run", lambda *_, code=code, **__: SimpleNamespace(returncode=code))
        assert cli.main(["bench", "moe", "--device", "cpu"]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["linear"], "name is 'linear'; expected one of linear_ce, "),
        (["moe", "--rounds", "0"], "rounds is 0"),
        (["moe", "--rows", "x.csv"], "--rows runs nothing"),
        (["moe", "--device", "cuda:1"], "expected cpu or cuda: CUDA_VISIBLE_DEVICES says which"),
        (["--rows", "nowhere.csv"], "nowhere.csv: No such file"),
        (["--rows", "pyproject.toml"], "has no column case, "),
    ],
)
def test_what_cannot_be_asked_for(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("fusedce bench: ") and error.count("\n") == 1


def test_outside_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fusedce, "__file__", str(tmp_path / "site-packages" / "fusedce" / "__init__.py"))
    assert cli.main(["bench"]) == 2
    assert "bench/ is not in the wheel: run this from a checkout" in capsys.readouterr().err
