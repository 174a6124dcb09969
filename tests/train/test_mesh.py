"""Which mesh follows from the ranks and the model, what a rank gets of a batch, and what all ranks refuse together."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fusedce import env
from fusedce.train import hf, track
from fusedce.train import run as run_module
from fusedce.train.config import ConfigError, GrpoConfig, TrainConfig
from fusedce.train.grpo import GrpoTrainer
from fusedce.train.mesh import choose_layout, pick_device
from fusedce.train.packing import Packing
from fusedce.train.sharding import build
from fusedce.train.weights import whole
from tests.distributed.processes import ROOT, run
from tests.train.rank_cases import grpo, one, world

QWEN3_30B = 128  # experts


@pytest.mark.parametrize(
    ("ranks", "per_node", "experts", "ep", "efsdp"),
    [
        (1, 1, QWEN3_30B, 1, 1),
        (2, 2, QWEN3_30B, 2, 1),
        (8, 8, QWEN3_30B, 8, 1),
        (32, 8, QWEN3_30B, 8, 4),  # the article's: a group of experts stays in its node
        (32, 4, QWEN3_30B, 4, 8),
        (6, 6, QWEN3_30B, 2, 3),
        (7, 7, QWEN3_30B, 1, 7),
        (8, 8, 8, 4, 2),  # two experts a rank at least
        (4, 4, 60, 4, 1),
        (12, 6, 48, 6, 2),
        (3, 3, 1, 1, 3),
    ],
)
def test_the_mesh_follows(ranks: int, per_node: int, experts: int, ep: int, efsdp: int) -> None:
    layout = choose_layout(ranks, per_node, experts)
    assert (layout.ep, layout.efsdp, layout.world) == (ep, efsdp, ranks)
    assert f"experts over EP {ep} × FSDP {efsdp}, all else over FSDP {ranks}" in layout.reason
    assert f"stay in a node of {per_node}" in layout.reason


def test_an_ep_that_is_asked_for() -> None:
    assert choose_layout(8, 8, 8, ep=8).ep == 8 and "as asked for" in choose_layout(8, 8, 8, ep=8).reason
    assert choose_layout(16, 8, QWEN3_30B, ep=16).efsdp == 1  # across nodes, but someone said so
    with pytest.raises(ConfigError, match="ep is 3; expected 0 or a divisor of the 8 ranks and of the 8 experts: 1, 2"):
        choose_layout(8, 8, 8, ep=3)


def test_each_process_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [pick_device("auto", n) for n in (0, 1)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert pick_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(ConfigError, match="process 2 of this node has no GPU, there are 2"):
        pick_device("cuda", 2)


def test_what_a_launcher_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert env.launched() == (0, 1, 0, 1)
    monkeypatch.setenv("RANK", "11")
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert env.launched() == (11, 16, 11, 16)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert env.launched() == (11, 16, 3, 8)


def test_half_a_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert run_module.main(["--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fusedce train: rank 1: cannot join the 2 processes: ") and said.count("\n") == 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("updates", [1, 2])
def test_fs_a13_each_prompt_is_one_ranks(ranks: int, updates: int, tmp_path: Path) -> None:
    """In every step and update the ranks' prompts are those of one rank, once each, also where they do not divide."""
    config = grpo(num_prompts=6, num_updates=updates, group_size=2)
    trainers = []
    for rank in range(ranks):
        where = one()
        where.rank, where.size = rank, ranks
        trainers.append(GrpoTrainer(config, tmp_path, where))
    for step in (0, 7):
        for each in trainers:
            each.step = step
        drawn = config.num_prompts * config.group_size
        expected = trainers[0].task.training(config.num_prompts, trainers[0].generator("prompts"))[0]
        shares = [t.my_prompts()[0].unflatten(0, (updates, -1)) for t in trainers]
        together = torch.cat(shares, 1).flatten(0, 1)
        assert len(together) == drawn and torch.equal(together[::2], expected) and torch.equal(together[1::2], expected)
        sizes = [share.shape[1] for share in shares]
        assert max(sizes) == trainers[0].world.largest_share(6 // updates) * 2 and max(sizes) - min(sizes) <= 2
        assert len({len(list(t.micro_batches())) for t in trainers}) == 1


# ── run on every rank ───────────────────────────────────────────────────────────────────────────────────────────────


def check_world(device: str) -> None:
    ranks = world(2)
    assert ranks.first == (dist.get_rank() == 0) and ranks.largest(dist.get_rank()) == 1
    mine = torch.tensor([1.0, dist.get_rank()])
    assert ranks.sum(mine).tolist() == [2.0, 1.0] and mine[0] == 1
    folder = Path(os.environ["RUN"])
    check_weights()
    check_bf16()
    check_hf(folder / "hf")
    check_run(folder / "run")


def check_weights() -> None:
    """The same weights on one rank and on two, by any mesh, before any collective."""
    for config in (grpo(), grpo(ep=1)):
        alone = GrpoTrainer(config, Path(), one())
        ranks = GrpoTrainer(config, Path(), world(config.ep or 2))
        for name, weight in ranks.weights.items():
            assert torch.equal(whole(weight), alone.weights[name]), name
            assert weight.to_local().numel() < weight.numel() or weight.numel() < 16  # type: ignore[attr-defined]


def check_bf16() -> None:
    """What FSDP does on a GPU: bf16 weights and stream, rotations and routing weights in fp32, gradients fp32."""
    ids = torch.randint(13, (3, 8), generator=torch.Generator().manual_seed(1))
    packing = Packing.of(ids == 5)
    seen: list[object] = []
    for ep, recompute in ((1, 1.0), (2, 0.5)):
        config = replace(grpo().model, recompute=recompute, moe_chunks=2)
        losses = []
        for dtype in (torch.float32, torch.bfloat16):
            model = build(config, world(ep), 5, dtype)
            block = model.layers[0]
            block.register_forward_pre_hook(lambda _, args: seen.append((args[0].dtype, args[1][0].dtype)))
            block.moe.experts.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
            result = model.head(model(ids, packing=packing), ids)
            assert result.logprob.dtype == torch.float32
            loss = model.head.cross_entropy(model(ids, packing=packing), ids) + result.entropy.sum()
            loss.backward()
            losses.append(loss.item())
            assert {p.grad.dtype for p in model.parameters()} == {torch.float32}  # type: ignore[union-attr]
            assert seen[0] == (dtype, torch.float32) and seen[1] == dtype
            seen.clear()
        assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)


def check_hf(folder: Path) -> None:
    """Each rank reads its part of transformers' files, rank 0 writes the whole: the same bits by any mesh."""
    config = replace(grpo().model, learned_positions=0)
    for ep in (1, 2):
        ranks = world(ep)
        model, other = build(config, ranks, 5), build(config, ranks, 6)
        expected = {name: whole(weight).clone() for name, weight in model.named_parameters()}
        hf.save(dict(model.named_parameters()), config, folder, ranks)
        ranks.sum(torch.zeros(1))  # the file is there
        hf.load(other, folder)
        for name, weight in other.named_parameters():
            assert torch.equal(whole(weight), expected[name]), name


def check_run(folder: Path) -> None:
    """FS-A11: a whole run in which the second rank alone is told to end."""
    config = GrpoConfig(**{**vars(grpo()), "out": str(folder), "steps": 6, "save_every": 2, "eval_every": 2})
    step = GrpoTrainer.train_step

    def interrupted(trainer: GrpoTrainer) -> dict[str, float]:
        if trainer.step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), 15)
        return step(trainer)

    patch = pytest.MonkeyPatch()
    patch.setattr(GrpoTrainer, "train_step", interrupted)
    assert run_module.run(config) == 128 + 15
    patch.undo()
    with pytest.raises(ConfigError, match="holds a run already"):
        run_module.run(config)


# ── the tests ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_fs_a11_two_ranks_and_then_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What two ranks left is a run that one rank goes on with."""
    monkeypatch.setenv("RUN", str(tmp_path))
    run(__name__, "check_world", 2)
    rows = track.read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[1]["tokens"] == 3 * 4 * 8
    assert sorted(p.name for p in (tmp_path / "run").glob("step-*")) == ["step-000002", "step-000003"]
    config: TrainConfig = run_module.parse(["--resume", "--out", str(tmp_path / "run"), "--steps", "4"])
    assert run_module.run(config) == 0
    assert [row["step"] for row in track.read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 -m fusedce.train --device cpu"
SMALL = "--steps 2 --num-prompts 4 --eval-prompts 8 --model.hidden-size 16 --out run"


def torchrun(folder: Path, options: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *TORCHRUN.split(), *options.split()]
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=300)


def test_torchrun(tmp_path: Path) -> None:
    """The documentation's command: one table, from rank 0, and the mesh with its reason; all ranks refuse."""
    done = torchrun(tmp_path, SMALL)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step 2/2") == 1 and "cpu fp32 × 2" in done.stdout
    assert "mesh: experts over EP 2 × FSDP 1, all else over FSDP 2; EP 2: the most of 2 ranks" in done.stdout
    assert [row["step"] for row in track.read_metrics(tmp_path / "run")] == [1, 2]
    assert (tmp_path / "run" / "curve.png").exists()
    done = torchrun(tmp_path, "--ep 3")
    said = [line for line in done.stderr.splitlines() if line.startswith("fusedce train: ")]
    assert done.returncode and said and all("ep is 3; expected 0 or a divisor of the 2 ranks" in line for line in said)


def test_one_process_may_shard_too(tmp_path: Path) -> None:
    """FSDP2 over one rank: the same run to rounding."""
    rows = []
    for shard in ("auto", "always"):
        config = grpo(steps=2, shard=shard, out=str(tmp_path / shard), eval_prompts=8)
        assert run_module.run(config) == 0
        rows.append(track.read_metrics(tmp_path / shard))
    assert not dist.is_initialized()
    for plain, sharded in zip(*rows, strict=True):
        for key in ("loss", "reward", "grad_norm", "entropy"):
            assert sharded[key] == pytest.approx(plain[key], rel=1e-4, abs=1e-6)
