"""Kills, full disks, damage, signals, NaN, hangs: after each, a resume is the uninterrupted run to the last digit.

CI takes a handful of each; `make soak` the numbers of SOAK. What a number gives is drawn from it alone.
"""

import errno
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedce.train import checkpoint, track
from tests.train import faults, single, toy
from tests.train.forks import Rank, Server

STEPS, EXPERT_RANKS = 8, 2
OPERATIONS, NUM_BYTES = 14, 9000  # of a checkpoint of the toy's, a little more than it has on one rank


def counts(ci: int, soak: int) -> list[Any]:
    """Seeds: the first few in CI, the others marked soak."""
    return [*range(ci), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(ci, soak))]


def launch(server: Server, run: Path, fault: toy.Fault | None = None, steps: int = STEPS, **rest: Any) -> list[Rank]:
    return server.launch("tests.train.toy:rank", str(run), steps, EXPERT_RANKS, fault, num_ranks=2, **rest)


def ended_well(ended: list[Rank]) -> dict[str, Any]:
    """What the ranks returned, all the same but for whose file it is that a message names."""
    assert [r.status for r in ended] == [0] * len(ended), "\n".join(r.error[-3000:] for r in ended)
    values = [{**r.value, "said": [re.sub(r" \(on rank \d\)", "", text) for text in r.value["said"]]} for r in ended]
    assert all(value == values[0] for value in values)
    return values[0]


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run of two ranks."""
    run = tmp_path_factory.mktemp("faults") / "whole"
    assert ended_well(launch(server, run)) == {"first": 0, "said": [], "stopped": 0}
    assert toy.history(run).keys() == set(range(1, STEPS + 1))
    return run


def same_run(run: Path, whole: Path) -> None:
    """Losses, samples and all that was saved in the end."""
    assert toy.history(run) == toy.history(whole)
    (_, mine), (_, theirs) = (checkpoint.load(folder / "latest") for folder in (run, whole))
    for kind, tensors in theirs.items():
        assert tensors.keys() == mine[kind].keys() and tensors
        assert all(torch.equal(value, mine[kind][name]) for name, value in tensors.items())


def resumes(server: Server, run: Path, whole: Path, reached: int) -> dict[str, Any]:
    """Go on after a fault that came when `reached` steps were done: at most SAVE_EVERY of them are done again."""
    result = ended_well(launch(server, run))
    assert reached - toy.SAVE_EVERY <= result["first"] <= reached
    same_run(run, whole)
    return result


@pytest.mark.parametrize("seed", counts(3, 20))
def test_a_rank_is_killed_in_a_step(server: Server, whole: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    fault = {"step": draw.randint(1, STEPS), "rank": draw.randrange(2), "kind": "kill"}
    ended = launch(server, tmp_path, fault)
    assert ended[fault["rank"]].status == -signal.SIGKILL and ended[1 - fault["rank"]].status == 1
    assert resumes(server, tmp_path, whole, fault["step"] - 1)["said"] == []


@pytest.mark.parametrize("seed", counts(6, 40))
def test_a_rank_is_killed_in_a_checkpoint(server: Server, whole: Path, tmp_path: Path, seed: int) -> None:
    """At a random byte or between two operations: what was published stays good, and nothing half comes to light."""
    draw = random.Random(seed)
    rank, step = draw.randrange(2), draw.choice([3, 6, 8])
    where = (-1, draw.randrange(NUM_BYTES)) if draw.random() < 0.5 else (draw.randrange(OPERATIONS), -1)
    fault = {"step": step, "rank": rank, "kind": "", "operations": where[0], "num_bytes": where[1], "action": "kill"}
    ended = launch(server, tmp_path, fault)
    if ended[rank].status == 0:  # it has fewer operations, or bytes, than that
        ended_well(ended)
        step = STEPS
    else:
        assert ended[rank].status == -signal.SIGKILL
    for folder in checkpoint.published(tmp_path):
        checkpoint.load(folder)
    assert resumes(server, tmp_path, whole, step)["said"] == []
    assert step == STEPS or not list(tmp_path.glob("*.tmp")), "the next checkpoint clears up"


@pytest.mark.parametrize("seed", counts(4, 40))
def test_the_real_trainer_is_killed(server: Server, real: Path, tmp_path: Path, seed: int) -> None:
    draw, run = random.Random(seed), tmp_path / "run"
    if seed % 4 == 0:
        fault = {"kill_in_step": draw.randint(1, single.STEPS)}
    else:
        at = (-1, draw.randrange(110_000)) if seed % 4 == 1 else (draw.randrange(9), -1)
        fault = {"save": draw.choice([2, 4, 6]), "operations": at[0], "num_bytes": at[1], "action": "kill"}
    (ended,) = server.launch("tests.train.single:train", str(run), False, fault)
    assert ended.status == -signal.SIGKILL
    resume = bool(checkpoint.published(run))
    assert resume or fault.get("kill_in_step", fault.get("save")) <= single.SAVE_EVERY
    (ended,) = server.launch("tests.train.single:train", str(run), resume)
    assert (ended.status, ended.value, ended.error) == (0, 0, "")
    same_metrics_and_weights(run, real)


@pytest.fixture(scope="module")
def real(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run of `fusedce train`."""
    run = tmp_path_factory.mktemp("real") / "run"
    (ended,) = server.launch("tests.train.single:train", str(run))
    assert (ended.status, ended.value) == (0, 0), ended.error
    return run


def same_metrics_and_weights(run: Path, other: Path) -> None:
    mine, theirs = (
        [{k: v for k, v in row.items() if k not in ("tok_per_s", "seconds")} for row in track.read_metrics(folder)]
        for folder in (run, other)
    )
    assert mine == theirs and len(mine) == single.STEPS
    (_, mine), (_, theirs) = (checkpoint.load(folder / "latest") for folder in (run, other))
    assert all(torch.equal(value, mine[kind][k]) for kind, tensors in theirs.items() for k, value in tensors.items())


@pytest.mark.parametrize("seed", counts(3, 12))
def test_a_disk_that_is_full_for_one_rank(server: Server, whole: Path, tmp_path: Path, seed: int) -> None:
    """Both end with the system's error; what was there is there."""
    draw = random.Random(seed)
    rank, step = draw.randrange(2), draw.choice([6, 8])
    where = (-1, draw.randrange(2000)) if seed % 2 else (draw.randrange(2), -1)
    fault = {"step": step, "rank": rank, "kind": "", "operations": where[0], "num_bytes": where[1], "action": "full"}
    ended = launch(server, tmp_path, fault)
    assert [r.status for r in ended] == [1, 1]
    assert all(f"OSError: [Errno {errno.ENOSPC}]" in r.error for r in ended)
    assert [checkpoint.load(p)[0].step for p in checkpoint.published(tmp_path)] == ([3] if step == 6 else [6, 3])
    assert not list(tmp_path.glob("*.tmp"))
    resumes(server, tmp_path, whole, step)


@pytest.mark.parametrize(
    "number", [0, 2, 4, 6, 7, 8, 9, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 3, 5, 10))]
)
def test_the_real_trainer_s_disk_is_full(server: Server, real: Path, tmp_path: Path, number: int) -> None:
    """At every operation of a checkpoint in turn: one line, exit code 1, and the run goes on from the one before."""
    run = tmp_path / "run"
    fault = {"save": 4, "operations": number, "num_bytes": -1, "action": "full"}
    (ended,) = server.launch("tests.train.single:train", str(run), False, fault)
    assert (ended.status, ended.value) == (0, 1)
    assert ended.error.startswith("fusedce train: ") and ended.error.endswith(": No space left on device\n")
    assert ended.error.count("\n") == 1
    steps = [checkpoint.load(p)[0].step for p in checkpoint.published(run)]
    # After the rename it is published, whatever becomes of the link.
    assert steps == ([4, 2] if number > 6 else [2]) and (run / "latest").exists()
    (ended,) = server.launch("tests.train.single:train", str(run), True)
    assert (ended.status, ended.value, ended.error) == (0, 0, "")
    same_metrics_and_weights(run, real)


def test_the_system_cuts_a_file_short(server: Server, tmp_path: Path) -> None:
    """No injected error: the kernel takes so many bytes of a file, and no more."""
    run = tmp_path / "run"
    (ended,) = server.launch("tests.train.single:train", str(run), False, {"file_limit": 30_000})
    assert (ended.status, ended.value) == (0, 1)
    assert ended.error.startswith("fusedce train: ") and ended.error.endswith("File too large\n")
    assert not checkpoint.published(run) and not list(run.glob("*.tmp"))


def damage(draw: random.Random, folder: Path, other: Path) -> str:
    """One file of a checkpoint flipped in a bit, cut, gone, or another save's; its name."""
    path = draw.choice(sorted(p for p in folder.iterdir()))
    data, kind = bytearray(path.read_bytes()), draw.choice(["flip", "cut", "gone", "mixed"])
    if kind == "flip":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    if kind == "cut":
        del data[draw.randrange(len(data)) :]
    if kind == "mixed":
        data = bytearray((other / path.name).read_bytes())
    path.write_bytes(data)
    if kind == "gone":
        path.unlink()
    return path.name


@pytest.mark.parametrize("seed", counts(5, 60))
def test_a_damaged_checkpoint(server: Server, whole: Path, tmp_path: Path, seed: int) -> None:
    """Every rank says so and takes the one before, whoever's file it was; the damaged one is kept aside."""
    draw, run = random.Random(seed), tmp_path / "run"
    shutil.copytree(whole, run, symlinks=True)
    newest, before = checkpoint.published(run)
    name = damage(draw, newest, before)
    result = ended_well(launch(server, run))
    assert result["first"] == 6
    assert len(result["said"]) == 1 and "damaged checkpoint" in result["said"][0] and name in result["said"][0]
    assert newest.with_suffix(".damaged").is_dir()
    same_run(run, whole)


@pytest.mark.parametrize("seed", counts(3, 12))
def test_fs_a11_sigterm(server: Server, whole: Path, tmp_path: Path, seed: int) -> None:
    """To one rank or to both: all stop after the same step, with one checkpoint, and say which signal it was."""
    draw = random.Random(seed)
    fault = {"step": draw.randint(1, STEPS - 1), "rank": [0, 1, None][seed % 3], "kind": "term"}
    result = ended_well(launch(server, tmp_path, fault))
    assert result["stopped"] == signal.SIGTERM
    assert checkpoint.load(tmp_path / "latest")[0].step == fault["step"]
    assert ended_well(launch(server, tmp_path))["first"] == fault["step"]
    same_run(tmp_path, whole)


@pytest.mark.parametrize("seed", counts(2, 10))
def test_fs_a02_nan_on_one_rank(server: Server, whole: Path, tmp_path: Path, seed: int) -> None:
    """All ranks leave the step out: weights and moments are, to the bit, those of the step before."""
    step = random.Random(seed).randint(2, STEPS)
    ended_well(launch(server, tmp_path / "nan", {"step": step, "rank": seed % 2, "kind": "nan"}, steps=step))
    ended_well(launch(server, tmp_path / "before", steps=step - 1))
    rows = toy.history(tmp_path / "nan")
    assert [row["skipped"] for _, row in sorted(rows.items())] == [False] * (step - 1) + [True]
    after, before = (checkpoint.load(tmp_path / name / "latest") for name in ("nan", "before"))
    assert (after[0].step, before[0].step) == (step, step - 1)
    for kind, tensors in before[1].items():
        assert all(torch.equal(value, after[1][kind][name]) for name, value in tensors.items()) and tensors


@pytest.mark.parametrize("seed", counts(1, 5))
def test_a_rank_hangs(server: Server, whole: Path, tmp_path: Path, seed: int) -> None:
    """The others give up after the group's timeout, and are not in doubt what was saved."""
    draw = random.Random(seed)
    fault = {"step": draw.randint(2, STEPS), "rank": draw.randrange(2), "kind": "hang"}
    ended = server.launch(
        "tests.train.toy:rank", str(tmp_path), STEPS, EXPERT_RANKS, fault, 2.0, num_ranks=2, grace=0.5
    )
    assert ended[fault["rank"]].status == -signal.SIGKILL and ended[1 - fault["rank"]].status == 1
    resumes(server, tmp_path, whole, fault["step"] - 1)


def test_two_trainers_start_at_once(server: Server, real: Path, tmp_path: Path) -> None:
    """One trains; the other ends with one line and exit code 2."""
    ended = server.launch("tests.train.single:train", str(tmp_path / "run"), num_ranks=2)
    assert [r.status for r in ended] == [0, 0] and sorted(r.value for r in ended) == [0, 2]
    (refused,) = (r for r in ended if r.value == 2)
    assert refused.error.startswith("fusedce train: out: ") and refused.error.count("\n") == 1
    assert "is in use by process" in refused.error or "holds a run already" in refused.error
    same_metrics_and_weights(tmp_path / "run", real)


def test_the_faults_strike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`faults.arm` reaches every place of a checkpoint: the tests above would pass over what it misses."""
    seen: list[str] = []
    for owner, name in faults.OPERATIONS:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, _n=name, _f=real, **k: (seen.append(_n), _f(*a, **k))[1])
    state = {"model": {"w": torch.ones(3)}, "optimizer": {"m": torch.ones(3)}}
    for step in (1, 2):
        seen.clear()
        checkpoint.save(tmp_path, step, {}, state, keep=1)
    assert seen == [
        "mkdir",
        *["fsync"] * 4,
        "fsync",
        "rename",
        "fsync",
        "symlink_to",
        "replace",
        "fsync",
        "rename",
        "rmtree",
    ]
