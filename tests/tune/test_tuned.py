"""The kept tiles: what is written is read, launches take it; a file with a fault is ignored, with a warning."""

import json
import os
import stat
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusedce.arch import ARCHS
from fusedce.configs import choice, table_tile, tile_for, tuned
from fusedce.configs.tables import TABLES

ARCH, STAGE = "sm_90", "linear_ce_fwd"
TABLE = TABLES[ARCH][STAGE]
OTHER = replace(TABLE, block_n=128)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A cache of the test's own, looked at, and read anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("FUSEDCE_TUNED", "1")
    tuned.kept.cache_clear()
    yield tmp_path
    tuned.kept.cache_clear()


def taken() -> Any:
    """The tile that a launch takes now, in a process that has read nothing yet."""
    tuned.kept.cache_clear()
    return tile_for(STAGE, ARCHS[ARCH], 2)


def test_what_is_kept_is_taken(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken() == TABLE and "looks for better ones" in tuned.state(ARCH).text
    path = tuned.keep(ARCH, {STAGE: OTHER}, {"why": "a test"})
    assert taken() == OTHER and tile_for(STAGE, ARCHS[ARCH], 2, by_tma=False) == replace(OTHER, tma=False)
    assert table_tile(STAGE, ARCHS[ARCH], 2) == TABLE
    # Neither another stage, nor fp32, nor another architecture, nor with the switch.
    assert tile_for("linear_ce_dlogits", ARCHS[ARCH], 2) == TABLES[ARCH]["linear_ce_dlogits"]
    assert tile_for(STAGE, ARCHS[ARCH], 4) == table_tile(STAGE, ARCHS[ARCH], 4)
    assert tile_for(STAGE, ARCHS["sm_100"], 2) == TABLES["sm_100"][STAGE]
    monkeypatch.setenv("FUSEDCE_TUNED", "0")
    assert taken() == TABLE and "FUSEDCE_TUNED=0" in tuned.state(ARCH).text
    assert path.is_relative_to(cache / "fusedce" / "tiles")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700 and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_a_second_stage_joins_the_first() -> None:
    tuned.keep(ARCH, {STAGE: OTHER}, {})
    wide = replace(TABLES[ARCH]["linear_ce_dlogits"], num_stages=2)
    tuned.keep(ARCH, {"linear_ce_dlogits": wide}, {})
    assert tuned.state(ARCH).tiles == {STAGE: OTHER, "linear_ce_dlogits": wide}


def test_what_is_kept_while_the_switch_is_off_joins_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.keep(ARCH, {STAGE: OTHER}, {})
    wide = replace(TABLES[ARCH]["linear_ce_dlogits"], num_stages=2)
    monkeypatch.setenv("FUSEDCE_TUNED", "0")
    tuned.keep(ARCH, {"linear_ce_dlogits": wide}, {})
    monkeypatch.setenv("FUSEDCE_TUNED", "1")
    assert tuned.state(ARCH).tiles == {STAGE: OTHER, "linear_ce_dlogits": wide}


def spoil(text: str) -> None:
    path = tuned.path_of(ARCH)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)


def contents(**tiles: Any) -> dict[str, Any]:
    return {"key": tuned.key(ARCH), "tiles": {name: asdict(tile) for name, tile in tiles.items()}, "measured": {}}


def check_ignored(reason: str) -> None:
    """The table's tile, and one warning however many launches there are."""
    tuned.kept.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert tile_for(STAGE, ARCHS[ARCH], 2) == TABLE
        assert tile_for(STAGE, ARCHS[ARCH], 2) == TABLE
    assert len(said) == 1 and reason in str(said[0].message) and "ignored" in str(said[0].message)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ('{"key": ', "not JSON"),
        ("[]", "TypeError"),
        ("{}", "KeyError"),
        ("[" * 50_000, "RecursionError"),
        (" " * (tuned.MOST_BYTES + 1), "longer than"),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1") * 3, "not JSON"),
    ],
    ids=["empty", "cut", "a list", "no key", "deep", "long", "binary"],
)
def test_text_that_is_no_such_file(text: str, reason: str) -> None:
    spoil(text)
    check_ignored(reason)


@pytest.mark.parametrize(
    ("tiles", "reason"),
    [
        ({"linear_ce_forward": OTHER}, "there is no stage"),
        ({STAGE: replace(TABLE, num_stages=2, num_warps=4)}, "accumulators"),
        ({STAGE: replace(TABLE, num_stages=8)}, "shared memory"),
        ({STAGE: replace(OTHER, block_n=96)}, "blocks are one of"),
        ({STAGE: replace(OTHER, block_n=8, num_warps=1)}, "blocks are one of"),
        ({STAGE: replace(OTHER, num_warps=12)}, "out of range"),
        ({STAGE: replace(OTHER, num_stages=0)}, "out of range"),
        ({STAGE: replace(OTHER, matrix_instr=16)}, "matrix_instr is 16"),
        ({STAGE: replace(OTHER, staged_bytes=2)}, "not as the table has them"),
        ({"linear_ce_pairs": replace(TABLES[ARCH]["linear_ce_pairs"], tma=True)}, "not as the table has them"),
        ({"moe_rows": replace(TABLES[ARCH]["moe_rows"], block_m=64)}, "have not the same block_m"),
        ({"moe_wgrad": replace(TABLES[ARCH]["moe_wgrad"], block_m=64, block_n=64, block_k=256)}, "does not divide"),
    ],
)  # fmt: skip
def test_tiles_that_do_not_run_or_do_not_go_together(tiles: dict[str, Any], reason: str) -> None:
    spoil(json.dumps(contents(**tiles)))
    check_ignored(reason)
    with pytest.raises(ValueError, match=f"not kept: .*{reason}"):
        tuned.keep(ARCH, tiles, {})


@pytest.mark.parametrize("value", [128.0, "128", True, None])
def test_a_field_of_another_type(value: Any) -> None:
    found = contents(**{STAGE: OTHER})
    found["tiles"][STAGE]["block_n"] = value
    spoil(json.dumps(found))
    check_ignored("fields are not a tile's")


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.keep(ARCH, {STAGE: OTHER}, {})
    monkeypatch.setattr(tuned, "__version__", "99.0")
    check_ignored("of another version or table of fusedce")
    # One that bears this version's name and says another.
    found = contents(**{STAGE: OTHER})
    found["key"]["fusedce"] = "0.0.1"
    spoil(json.dumps(found))
    check_ignored("it is of {")


def test_a_changed_table_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tuned.path_of(ARCH)
    monkeypatch.setitem(TABLES, ARCH, {**TABLES[ARCH], STAGE: OTHER})
    assert tuned.path_of(ARCH) != before


def test_a_file_of_someone_else(monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuned.keep(ARCH, {STAGE: OTHER}, {})
    path.chmod(0o622)
    check_ignored("others may write the file (mode 0622)")
    path.chmod(0o600)
    path.parent.chmod(0o777)
    check_ignored("others may write the folder (mode 0777)")
    path.parent.chmod(0o700)
    assert taken() == OTHER
    mine = os.getuid()
    monkeypatch.setattr(tuned.os, "getuid", lambda: mine + 1)
    check_ignored(f"the folder belongs to user {mine}, not {mine + 1}")
    with pytest.raises(ValueError, match="belongs to user"):
        tuned.keep(ARCH, {STAGE: OTHER}, {})


def test_the_file_s_own_owner_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tuned.keep(ARCH, {STAGE: OTHER}, {}), os.fstat
    spoiled = lambda fd: SimpleNamespace(st_mode=real(fd).st_mode, st_uid=real(fd).st_uid + 1)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(tuned.os, "fstat", spoiled)
        with pytest.raises(ValueError, match="the file belongs to user"):
            tuned._read(path)


def test_links_and_folders_in_the_way(cache: Path) -> None:
    path = tuned.keep(ARCH, {STAGE: OTHER}, {})
    elsewhere = cache / "elsewhere.json"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    check_ignored("ignored")
    path.unlink()
    path.mkdir()
    check_ignored("ignored")
    path.rmdir()
    path.parent.rename(cache / "tiles")
    path.parent.symlink_to(cache / "tiles")
    check_ignored("it is no folder")


def test_a_write_that_fails_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuned.keep(ARCH, {STAGE: OTHER}, {})
    before = path.read_text()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuned.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        tuned.keep(ARCH, {"linear_ce_dlogits": TABLES[ARCH]["linear_ce_dlogits"]}, {})
    assert path.read_text() == before and os.listdir(path.parent) == [path.name]


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative XDG_CACHE_HOME is to be ignored, as its specification says."""
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/nowhere/at/all")
    assert str(tuned.path_of(ARCH)).startswith("/nowhere/at/all/.cache/fusedce/tiles/")
    assert taken() == TABLE


def test_a_trial_takes_the_place_of_both() -> None:
    tuned.keep(ARCH, {STAGE: OTHER}, {})
    third = replace(TABLE, num_stages=2)
    with choice.trial({STAGE: third}) as asked:
        assert tile_for(STAGE, ARCHS[ARCH], 2) == third
        assert tile_for("moe_rows", ARCHS[ARCH], 2) == TABLES[ARCH]["moe_rows"]
        with choice.trial({}) as inner:
            assert tile_for(STAGE, ARCHS[ARCH], 2) == TABLE
        assert list(inner) == [STAGE] and list(asked) == [STAGE, "moe_rows"]
    assert taken() == OTHER
