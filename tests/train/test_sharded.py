"""Checkpoints of several processes: exact, read by any number of them, and no rank on its own when one fails."""

from pathlib import Path

import pytest

from fusedce.train import checkpoint, lock
from tests.train import toy
from tests.train.forks import Server

WORLDS = {"1": (1, 1), "2": (2, 1), "2-ep2": (2, 2), "4-ep2": (4, 2)}


def launch(server: Server, function: str, *arguments: object, num_ranks: int = 2) -> list[object]:
    """The ranks' values; fails with their output if one has failed."""
    ended = server.launch(f"tests.train.{function}", *arguments, num_ranks=num_ranks)
    assert not [r for r in ended if r.status], "\n".join(f"{r.status}: {r.error[-3000:]}" for r in ended)
    return [r.value for r in ended]


def test_fs_a01_a04_parts_and_wholes_are_exact(server: Server, tmp_path: Path) -> None:
    """Four ranks, experts over two: strided shards, a table that does not divide, scalars."""
    launch(server, "sharded_cases:exact", str(tmp_path), 2, num_ranks=4)


@pytest.mark.parametrize(
    ("written", "read"), [("2-ep2", ["1", "4-ep2"]), ("1", ["2", "2-ep2"]), ("4-ep2", ["2", "1"])], ids=str
)
def test_fs_a03_another_world_goes_on(server: Server, tmp_path: Path, written: str, read: list[str]) -> None:
    """The same bits in another number of ranks and of experts' ranks; then the same samples, and losses to rounding."""
    (num_ranks, experts), run = WORLDS[written], tmp_path / "run"
    launch(server, "toy:rank", str(run), 6, experts, num_ranks=num_ranks)
    expected = launch(server, "toy:digests", str(run), experts, num_ranks=num_ranks)
    assert len(expected[0]) > 10 and all(values == expected[0] for values in expected)
    whole = tmp_path / "whole"
    launch(server, "toy:rank", str(whole), 8, experts, num_ranks=num_ranks)
    for world in read:
        num_ranks, experts = WORLDS[world]
        assert launch(server, "toy:digests", str(run), experts, num_ranks=num_ranks) == expected[:1] * num_ranks
    (first,) = {value["first"] for value in launch(server, "toy:rank", str(run), 8, experts, num_ranks=num_ranks)}
    assert first == 6
    rows, wanted = toy.history(run), toy.history(whole)
    for step in (7, 8):
        assert rows[step]["samples"] == wanted[step]["samples"]
        assert float.fromhex(rows[step]["loss"]) == pytest.approx(float.fromhex(wanted[step]["loss"]), rel=1e-5)


def test_experts_that_are_no_dtensors_are_refused(server: Server, tmp_path: Path) -> None:
    launch(server, "sharded_cases:plain_parts_are_refused", str(tmp_path))


def test_folders_that_ranks_do_not_share(server: Server, tmp_path: Path) -> None:
    launch(server, "sharded_cases:folders_that_are_not_shared", str(tmp_path))
    assert not list(tmp_path.rglob("*.damaged")) and not list(tmp_path.rglob("*.tmp"))


def test_an_error_on_one_rank_is_one_on_all(server: Server, tmp_path: Path) -> None:
    launch(server, "sharded_cases:errors_cross", str(tmp_path))


def test_two_trainers_on_one_folder(server: Server, tmp_path: Path) -> None:
    """A second one is refused on each of its ranks, also from its own process; the lock goes with its holder."""
    (tmp_path / lock.NAME).write_text("an old one's words\n")
    with lock.held(tmp_path), pytest.raises(ValueError, match="is in use by process"), lock.held(tmp_path):
        raise AssertionError("held twice")
    with lock.held(tmp_path):
        ended = server.launch("tests.train.toy:rank", str(tmp_path), 3, 1, num_ranks=2)
    assert [r.status for r in ended] == [1, 1]
    assert all("ConfigError: out: " in r.error and "is in use by process" in r.error for r in ended)
    assert not checkpoint.published(tmp_path)
    with lock.held(tmp_path):
        assert (tmp_path / lock.NAME).read_text().startswith("process ")
