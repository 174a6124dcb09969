"""One run from config to curve: check, build, resume, loop, picture, summary."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import tyro
from rich.console import Console

from fusedce import env
from fusedce.train import checkpoint, hf, lock, plot, ranks
from fusedce.train.config import MODES, ConfigError, TrainConfig, check, free_folder, from_dict, mode_of, unknown_key
from fusedce.train.grpo import GrpoTrainer
from fusedce.train.loop import Trainer
from fusedce.train.mesh import World, joined
from fusedce.train.sft import SftTrainer
from fusedce.train.track import Silent, Tracker, clock

TRAINERS: dict[str, type[Trainer]] = {"grpo": GrpoTrainer, "sft": SftTrainer}


def run(config: TrainConfig, console: Console | None = None) -> int:
    """Train as `config` says, as one of the processes that torchrun started or alone. Rank 0 shows and writes.

    Returns 0, or 128 + the signal that ended the run after its checkpoint. Raises ConfigError before the first step for
    everything that cannot work, on all ranks.
    """
    if config.hf:
        config = hf.with_model(config)
    check(config)
    with joined(config) as world:
        return _run(config, world, (console or Console()) if world.first else Console(quiet=True))


def _run(config: TrainConfig, world: World, console: Console) -> int:
    # One rank looks for a free name, before any makes it.
    folder, mode = Path(ranks.gather(str(free_folder(config)))[0]), mode_of(config)
    made: list[Trainer] = []

    def make() -> None:
        _check_folder(folder, config)
        if config.export and Path(config.export).exists():
            raise ConfigError(f"export: {config.export} is there already; name another")
        made.append(TRAINERS[mode](config, folder, world))

    ranks.together(make)
    (trainer,) = made
    with lock.held(folder):
        ranks.together(lambda: _check_folder(folder, config))  # again: another trainer may have come and gone
        if config.resume:
            say = partial(console.print, style="yellow")
            trainer.restore(*checkpoint.load_newest(folder, say, trainer.place))
        stopped = _train(trainer, folder, mode, console)
    return 128 + stopped if stopped else 0


def _check_folder(folder: Path, config: TrainConfig) -> None:
    found = bool(checkpoint.published(folder))
    if found and not config.resume:
        raise ConfigError(f"out: {folder} holds a run already; add --resume to go on with it, or name another --out")
    if config.resume and not found:
        raise checkpoint.nothing_in(folder)


def _train(trainer: Trainer, folder: Path, mode: str, console: Console) -> int:
    """The steps that are left, then the picture and the summary; the number of the signal that ended it, or 0."""
    config, world = trainer.config, trainer.world
    model = trainer.config.model
    size = sum(p.numel() for p in trainer.weights.values())
    experts = f"{model.num_experts} experts, top {model.top_k}"
    number = "bf16" if trainer.device.type == "cuda" else "fp32"
    title = f"{mode} · {trainer.describe()} · {size:,} parameters, {experts} · {trainer.device.type} {number}"
    if world.sharded:
        title += f" × {world.size}"
        console.print(f"mesh: {world.layout.reason}", style="dim", highlight=False, soft_wrap=True)
    tracker = Tracker(folder, trainer.config, title, trainer.step, console) if world.first else Silent()
    with tracker:
        stopped = trainer.loop(tracker)
    trainer.evaluate()  # once more: a signal may have come between two looks
    if config.export and not stopped:  # a run that goes on later has its weights to export then
        hf.save(trainer.weights, model, Path(config.export), world)
    if isinstance(tracker, Tracker):
        _report(trainer, tracker, title, folder, console)
    if stopped:
        console.print(f"stopped by signal {stopped}; go on with: fusedce train --resume --out {folder}", style="yellow")
    return stopped


def _report(trainer: Trainer, tracker: Tracker, title: str, folder: Path, console: Console) -> None:
    gone = clock(tracker.seconds())
    subtitle = f"{trainer.step} steps in {gone} · {title}"
    plot.draw(tracker.rows, mode_of(trainer.config), trainer.headline, subtitle, folder / "curve.png")
    console.print(f"\n{trainer.headline}", style="bold", highlight=False)
    console.print(f"{trainer.example}; {trainer.step} steps, {gone}", highlight=False)
    for name in ("curve.png", "metrics.jsonl", "latest"):
        console.print(f"  {folder / name}", highlight=False, soft_wrap=True)


def parse(arguments: Sequence[str]) -> TrainConfig:
    """The config of a command line. With --resume, its defaults are the config of the run in --out."""
    arguments = list(arguments)
    mode = arguments.pop(0) if arguments and arguments[0] in MODES else "grpo"
    default = MODES[mode]()
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--out")
    peek.add_argument("--resume", action="store_true")
    early, _ = peek.parse_known_args(arguments)
    if early.resume and early.out:
        found = checkpoint.published(Path(early.out))
        default = next((c for c in map(_config_of, found) if c), default)
    config, unknown = tyro.cli(
        type(default), default=default, args=arguments, prog=f"fusedce train {mode}", return_unknown_args=True
    )
    if unknown:
        flags = [f"--{prefix}{f}" for prefix, part in _parts(config) for f in vars(part)]
        raise ConfigError(unknown_key(unknown[0], [flag.replace("_", "-") for flag in flags]))
    return config


def _parts(config: TrainConfig) -> list[tuple[str, object]]:
    return [("", config), ("model.", config.model), ("optim.", config.optim)]


def _config_of(folder: Path) -> TrainConfig | None:
    try:
        return from_dict(checkpoint.read(folder).config)
    except checkpoint.CheckpointError:
        return None  # restoring will say so, and put it aside


def main(arguments: Sequence[str]) -> int:
    """`fusedce train`: one line on stderr and exit code 2 for a run that cannot start, 1 for a disk that fails."""
    try:
        return run(parse(arguments))
    except (ConfigError, checkpoint.CheckpointError) as error:
        return _fail(str(error), 2)
    except OSError as error:
        return _fail(f"{error.filename or 'checkpoint'}: {error.strerror or error}", 1)


def _fail(text: str, code: int) -> int:
    """Say it, each of several processes with its rank: it may be the only one that knows."""
    rank, size, *_ = env.launched()
    print(f"fusedce train: {f'rank {rank}: ' * (size > 1)}{text}", file=sys.stderr)
    return code
