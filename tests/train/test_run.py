"""Whole runs: they learn, stop, resume bitwise, refuse bad configs, and leave a curve and metrics."""

import csv
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fusedce import cli
from fusedce.train import checkpoint, run, track
from fusedce.train.config import ConfigError, GrpoConfig, ModelConfig, OptimConfig, SftConfig, TrainConfig
from fusedce.train.grpo import GrpoTrainer
from fusedce.train.loop import Trainer, learning_rate
from fusedce.train.sft import SftTrainer
from tests.train.forks import Server

TIMES = ("tok_per_s", "seconds")


def metrics(config: TrainConfig) -> list[dict[str, float]]:
    """Every step's metrics but the times."""
    return [{k: v for k, v in row.items() if k not in TIMES} for row in track.read_metrics(Path(config.out))]


def final(config: TrainConfig) -> checkpoint.State:
    return checkpoint.load(Path(config.out) / "latest")[1]


@pytest.fixture(params=["grpo", "grpo-updates", "sft"])
def config(request: pytest.FixtureRequest) -> TrainConfig:
    if request.param == "sft":
        return replace(request.getfixturevalue("sft"), micro_batch=2)
    grpo = request.getfixturevalue("grpo")
    if request.param == "grpo":
        return grpo
    return replace(grpo, num_updates=2, micro_batch=4, kl_coef=0.1, normalize="sequence", std_advantage=True)


def test_resume_is_bitwise_the_uninterrupted_run(config: TrainConfig, tmp_path: Path, console: Console) -> None:
    whole, parts = (replace(config, out=str(tmp_path / name)) for name in ("whole", "parts"))
    assert run.run(whole, console) == 0
    # The first part dies after step 5, its last checkpoint is of step 4; step 5 must be done again.
    log, stopped = track.Tracker.log, []

    def die(tracker: track.Tracker, step: int, values: track.Metrics) -> None:
        log(tracker, step, values)
        if step == 5 and not stopped:
            stopped.append(step)
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(track.Tracker, "log", die)
        with pytest.raises(KeyboardInterrupt):
            run.run(parts, console)
    torch.manual_seed(99)
    assert run.run(replace(parts, resume=True), console) == 0
    assert metrics(parts) == metrics(whole)
    assert [row["step"] for row in metrics(parts)] == [1, 2, 3, 4, 5, 6]
    a, b = final(whole), final(parts)
    for file, tensors in a.items():
        assert tensors.keys() == b[file].keys() and tensors
        for name, value in tensors.items():
            assert torch.equal(value, b[file][name]), name


def test_resume_passes_over_a_damaged_checkpoint(grpo: GrpoConfig, console: Console) -> None:
    run.run(grpo, console)
    before, good = metrics(grpo), final(grpo)["model"]
    path = Path(grpo.out) / "step-000006" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3] + b"abc")
    assert run.run(replace(grpo, resume=True), console) == 0
    assert "damaged checkpoint, taking the one before" in console.file.getvalue()
    assert metrics(grpo) == before
    assert all(torch.equal(value, good[name]) for name, value in final(grpo)["model"].items())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends(
    grpo: GrpoConfig, console: Console, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    config = replace(grpo, save_every=100)
    step = GrpoTrainer.train_step

    def interrupted(trainer: GrpoTrainer) -> dict[str, float]:
        if trainer.step == 2:
            os.kill(os.getpid(), number)
        return step(trainer)

    before = signal.getsignal(number)
    monkeypatch.setattr(GrpoTrainer, "train_step", interrupted)
    assert run.run(config, console) == 128 + number
    assert signal.getsignal(number) is before
    assert checkpoint.load(Path(config.out) / "latest")[0].step == 3
    assert f"--resume --out {config.out}" in console.file.getvalue()


def test_a_run_that_a_signal_ended_exports_when_it_has_gone_on(
    sft: SftConfig, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, step = replace(sft, export=str(tmp_path / "model")), SftTrainer.train_step

    def interrupted(trainer: SftTrainer) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer)

    with monkeypatch.context() as patched:
        patched.setattr(SftTrainer, "train_step", interrupted)
        assert run.run(config, console) == 128 + signal.SIGTERM
    assert not Path(config.export).exists()
    assert run.run(replace(config, resume=True), console) == 0
    assert (Path(config.export) / "model.safetensors").exists()


def test_micro_batches_add_up_to_the_batch(grpo: GrpoConfig, sft: SftConfig, tmp_path: Path, console: Console) -> None:
    for config in (replace(grpo, steps=1), replace(sft, steps=1)):
        results = []
        for micro_batch in (0, 2):
            part = replace(config, micro_batch=micro_batch, out=f"{config.out}-{type(config).__name__}-{micro_batch}")
            run.run(part, console)
            results.append(metrics(part)[0])
        for key in ("loss", "grad_norm"):
            assert results[0][key] == pytest.approx(results[1][key], rel=1e-4, abs=1e-7)


def test_a_gradient_that_is_not_finite_changes_nothing(grpo: GrpoConfig, console: Console) -> None:
    trainer = GrpoTrainer(grpo, Path(grpo.out))
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    loss = sum(p.sum() for p in trainer.model.parameters()) * torch.inf
    _, norm, skipped = trainer.backward_and_step(iter([loss]))
    assert skipped == 1.0 and not torch.isfinite(torch.tensor(norm))
    assert all(torch.equal(p, weights[name]) and p.grad is None for name, p in trainer.model.named_parameters())
    assert not trainer.optimizer.state_dict()["state"]


def test_learning_rate() -> None:
    config = GrpoConfig(steps=10, optim=OptimConfig(lr=1.0, warmup_steps=4, final_lr=0.4))
    rates = [learning_rate(step, config) for step in range(10)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[-1] == pytest.approx(0.5) and rates == sorted(rates[:4]) + sorted(rates[4:], reverse=True)


def test_what_a_run_leaves(config: TrainConfig, console: Console, picture: None) -> None:
    config = replace(config, csv=True)
    run.run(config, console)
    folder = Path(config.out)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert {"loss", "grad_norm", "lr", "imbalance", "tok_per_s"} <= rows[0].keys()
    assert [("held_out_loss" in row or "held_out_accuracy" in row) for row in rows] == [False, False, True] * 2
    with open(folder / "metrics.csv") as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == [row["loss"] for row in rows]
    picture = (folder / "curve.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and len(picture) > 20_000
    printed = console.file.getvalue()
    assert "step 3/6" in printed and "step 6/6" in printed and "held-out" in printed
    assert str(folder / "curve.png") in printed


def test_the_panel(config: TrainConfig) -> None:
    with open(os.devnull, "w") as nowhere:
        terminal = Console(file=nowhere, force_terminal=True, width=120, record=True)
        run.run(config, terminal)
        tracker = track.Tracker(Path(config.out), config, "a title", 6, terminal)
        terminal.print(tracker.panel())
        text = terminal.export_text()
    for word in ("a title", "6/6", "held-out", "loss", "expert load", "tok/s", "gone"):
        assert word in text


def test_bars_and_sparklines() -> None:
    assert track.bar(0.5, 4) == "██  " and track.bar(0.28125, 4) == "█▏  " and track.bar(2.0, 3) == "███"
    assert track.sparkline([0.0, 0.5, 1.0], 1.0, 5) == "▁▅█  "
    assert len(track.sparkline([0.3] * 1000, 1.0, 7)) == 7
    assert track.clock(3725) == "1:02:05" and track.clock(59.6) == "1:00"


QWEN = {
    "model_type": "qwen3_moe", "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "moe_intermediate_size": 12, "num_local_experts": 4,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
}  # fmt: skip
BAD = {
    "optim.lr is -0.1": ["--optim.lr", "-0.1"],
    "unknown key --lenght; did you mean --length?": ["--lenght", "3"],
    "unknown key --model.hiden-size; did you mean --model.hidden-size?": ["--model.hiden-size", "3"],
    "micro_batch is 3": ["--micro-batch", "3"],
    "num_updates is 5": ["--num-updates", "5"],
    "model.vocab_size is 11": ["--model.vocab-size", "11"],
    "model.num_kv_heads is 3": ["--model.num-kv-heads", "3"],
    "model.top_k is 9": ["--model.top-k", "9"],
    "model.recompute is 1.5": ["--model.recompute", "1.5"],
    "model.backend is 'cuda'": ["--model.backend", "cuda"],
    "temperature is nan": ["--temperature", "nan"],
    "dual_clip is 0.5; expected 0 or above 1": ["--dual-clip", "0.5"],
    "kl_corrected is False; expected True with k1": ["--kl", "k1", "--kl-coef", "0.1", "--no-kl-corrected"],
    "group_size is 1": ["--group-size", "1"],
    "model.learned_positions is 16; expected 0 or at least 17": ["--length", "8"],
    "steps is 0": ["--steps", "0"],
    "ep is 3; expected 0 or a divisor of the 1 ranks and of the 8 experts: 1": ["--ep", "3"],
    "model.moe_chunks is 65": ["--model.moe-chunks", "65"],
    "learned_positions is 16; expected 0 with --export": ["--export", "x"],
    "export: . is there already": ["sft", "--export", "."],
    "init is 'x'; expected empty beside hf": ["--init", "x", "--hf", "CONFIG"],
    "nothing/config.json: No such file": ["--hf", "OUT/nothing"],
    "out is ''": ["--resume"],
    "no checkpoint that can be read": ["--resume", "--out", "OUT"],
    "nothing/manifest.json: No such file": ["--init", "OUT/nothing"],
    "data: no .py": ["sft", "--data", "OUT"],
    "a batch takes 8 × 99999": ["sft", "--seq-len", "99999"],
    "batch_size is -8": ["sft", "--batch-size", "-8"],
}


@pytest.mark.parametrize("message", BAD)
def test_a_run_that_cannot_start_says_why_in_one_line(
    message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    places = {"OUT": str(tmp_path / "run"), "CONFIG": str(tmp_path / "config.json")}

    def placed(text: str) -> str:
        for word, place in places.items():
            text = text.replace(word, place)
        return text

    assert cli.main(["train", *map(placed, BAD[message])]) == 2
    err = capsys.readouterr().err
    assert placed(message) in err and err.count("\n") == 1
    assert not any(tmp_path.rglob("metrics.jsonl"))


def test_an_out_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["train", "--device", "cpu", "--out", str(tmp_path / "file" / "run")]) == 1
    assert capsys.readouterr().err == f"fusedce train: {tmp_path}/file/run: Not a directory\n"


def test_a_home_that_is_not_there(server: Server, tmp_path: Path) -> None:
    """Nothing is kept in it; the picture is drawn all the same."""
    (ended,) = server.launch("tests.train.single:without_home", str(tmp_path / "run"), str(tmp_path / "file" / "home"))
    assert (ended.status, ended.value) == (0, 0), ended.error
    assert (tmp_path / "run" / "curve.png").stat().st_size > 20_000


def test_a_device_that_is_not_there(grpo: GrpoConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device is 'cuda'"):
        run.run(replace(grpo, device="cuda"))


def test_a_used_folder_is_not_written_over(grpo: GrpoConfig, console: Console) -> None:
    run.run(grpo, console)
    with pytest.raises(ConfigError, match="holds a run already; add --resume"):
        run.run(grpo, console)


def test_another_models_weights(grpo: GrpoConfig, tmp_path: Path, console: Console) -> None:
    run.run(grpo, console)
    start = str(Path(grpo.out) / "latest")
    other = replace(grpo, out=str(tmp_path / "other"), init=start)
    wider = replace(other, model=replace(grpo.model, hidden_size=32))
    with pytest.raises(ConfigError, match="model: embed.weight is .* in the checkpoint"):
        run.run(wider, console)
    with pytest.raises(ConfigError, match="model: the checkpoint has no layers.2"):
        run.run(replace(other, model=replace(grpo.model, num_layers=3)), console)
    trainer = GrpoTrainer(other, tmp_path / "other")
    weights = final(grpo)["model"]
    assert all(torch.equal(p, weights[name]) for name, p in trainer.model.named_parameters())


def test_from_transformers_config_to_its_files_and_on(sft: SftConfig, tmp_path: Path, console: Console) -> None:
    """Sizes from config.json alone, weights out, and a run that starts with them: at the loss where the first ended."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    first = replace(sft, hf=str(tmp_path / "config.json"), export=str(tmp_path / "model"), out=str(tmp_path / "first"))
    assert run.run(first, console) == 0
    second = replace(sft, hf=first.export, out=str(tmp_path / "second"), eval_every=1, optim=OptimConfig(lr=1e-12))
    assert run.run(second, console) == 0
    config = run.parse(["--resume", "--out", second.out]).model
    assert (config.rope_theta, config.num_experts, config.tied) == (7.0, 4, False) and config.renormalize
    ended, began = metrics(first)[-1]["held_out_loss"], metrics(second)[0]["held_out_loss"]
    assert began == pytest.approx(ended, rel=1e-6) and ended < metrics(first)[2]["held_out_loss"]


def test_another_activation_or_a_damaged_file_is_refused(sft: SftConfig, tmp_path: Path, console: Console) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, "hidden_act": "gelu"}))
    with pytest.raises(ConfigError, match="hidden_act is 'gelu'; the trainer's model has no such thing"):
        run.run(replace(sft, hf=str(tmp_path)), console)
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(ConfigError, match="has a damaged .safetensors file"):
        run.run(replace(sft, hf=str(tmp_path)), console)


def test_resume_takes_the_runs_own_config(grpo: GrpoConfig, console: Console) -> None:
    run.run(grpo, console)
    config = run.parse(["--resume", f"--out={grpo.out}", "--steps", "8"])
    assert isinstance(config, GrpoConfig) and config.model.hidden_size == 16
    assert run.run(config, console) == 0
    assert [row["step"] for row in metrics(config)] == list(range(1, 9))


def test_explain_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "moe_plan", "--device", "cpu"]) == 0
    assert "moe_plan on cpu" in capsys.readouterr().out
    assert cli.main(["explain", "nonsense"]) == 2
    assert cli.main(["nonsense"]) == 2
    assert cli.main(["--help"]) == 0 and "fusedce" in capsys.readouterr().out


def learns(config: TrainConfig, console: Console) -> list[dict[str, float]]:
    assert run.run(config, console) == 0
    return track.read_metrics(Path(config.out))


def test_rewards_rise(tmp_path: Path, console: Console) -> None:
    config = GrpoConfig(steps=40, length=2, threads=1, out=str(tmp_path / "r"), model=ModelConfig(num_layers=1))
    rows = learns(replace(config, device="cpu", num_prompts=16), console)
    first, last = (sum(row["reward"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert last > first + 0.15


def test_losses_fall(sft: SftConfig, console: Console) -> None:
    rows = learns(replace(sft, steps=40, optim=OptimConfig(lr=1e-2)), console)
    assert rows[-1]["held_out_loss"] < 3.0 < 5.0 < rows[0]["loss"]


@pytest.mark.slow
def test_the_default_run_learns_to_reverse(tmp_path: Path, console: Console) -> None:
    rows = learns(GrpoConfig(device="cpu", out=str(tmp_path / "run")), console)
    assert rows[-1]["held_out_accuracy"] >= 0.95


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_on_a_gpu(grpo: GrpoConfig, sft: SftConfig, console: Console, backend: str) -> None:
    for config in (grpo, sft):
        model = replace(config.model, backend=backend)
        out = f"{config.out}-{type(config).__name__}"
        rows = learns(replace(config, device="cuda", model=model, steps=20, out=out), console)
        assert all(row["skipped"] == 0 for row in rows) and rows[-1]["peak_gib"] > 0


def test_every_mode_is_a_trainer() -> None:
    assert all(issubclass(kind, Trainer) for kind in run.TRAINERS.values())
