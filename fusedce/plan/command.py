"""`fusedce plan`: arguments, and which of the answers is shown."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console

from fusedce.plan import report, show
from fusedce.plan.gpus import GPUS, gpu_named
from fusedce.plan.hf_config import model_named
from fusedce.plan.layout import POLICIES, Job
from fusedce.plan.models import MODELS
from fusedce.plan.recipe import Answer, NothingFitsError, solve
from fusedce.plan.sweep import compare, grid, next_up

# Of a card, for the driver's context, communication buffers, fragmentation and the model's own error: a choice.
RESERVE = 0.10
EXAMPLES = f"""One layout for a model on some GPUs, why each dimension is what it is, and its memory and time.
No GPU is asked. Exit codes: 0, 1 if nothing fits, 2 for arguments that make no sense.

  models: {", ".join(MODELS)}, or a config.json
  GPUs:   {", ".join(GPUS)}

  fusedce plan --gpus 32                                          Qwen3-30B-A3B at 128K on 32 H100
  fusedce plan --model qwen3.5-35b-a3b --gpus 32 --sweep          and the 81 configurations of a grid
  fusedce plan --gpus 32 --compare h100,mi300x,mi355x             the same job on three cards
  fusedce plan --model my/model/config.json --gpu mi300x --json   another model, for programs
  fusedce plan --gpus 32 --png plan.png                           the bars as a picture
  fusedce plan --gpus 32 --run                                    rank 0 with fake tensors, predicted beside tracked"""


@dataclass(frozen=True)
class PlanConfig:
    """The command line."""

    model: str = "qwen3-30b-a3b"
    """a preset, or a config.json as transformers writes it, or its folder"""
    gpu: str = "h100"
    """the card"""
    gpus: int = 8
    """how many of them; any number"""
    seq_len: int = 131_072
    """tokens of a sequence"""
    tokens_per_step: int = 0
    """tokens of an optimizer step, all GPUs together; 0 takes a sequence for every GPU"""
    dtypes: Literal["fp32-shards", "master", "bf16-grads", "bf16"] = "fp32-shards"
    """what stays of a parameter: 16, 18, 16 or 8 bytes; docs/plan.md says of what"""
    recompute: float | None = None
    """share of the layers to recompute; left out, as few as fit"""
    reserve_gb: float | None = None
    """GB of a card to leave alone, for a rollout engine too; left out, 10 % for context, buffers and error"""
    sweep: bool = False
    """also a grid of 81 configurations, predicted by the same model"""
    compare: str = ""
    """cards in place of --gpu for the same job, with commas between them"""
    json: bool = False
    """print one JSON object instead"""
    png: str = ""
    """also draw the bars into this file"""
    run: bool = False
    """also run rank 0 with fake tensors on this machine, and show predicted beside tracked memory"""


# What `--run` adds to a plan: predicted and tracked bytes by part. It needs torch, and comes from above this room.
Measure = Callable[[Answer], dict[str, Any]]


def job_of(config: PlanConfig) -> Job:
    """The job that a command line describes. ValueError, one line, for what makes no sense."""
    gpu = gpu_named(config.gpu)
    for name in ("gpus", "seq_len"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; expected at least 1")
    tokens = config.tokens_per_step or config.gpus * config.seq_len
    if tokens < config.seq_len or tokens % config.seq_len:
        raise ValueError(f"tokens_per_step is {tokens}; expected a multiple of seq_len = {config.seq_len}")
    if config.recompute is not None and not 0 <= config.recompute <= 1:
        raise ValueError(f"recompute is {config.recompute}; expected a share from 0 to 1")
    reserve = gpu.memory * RESERVE if config.reserve_gb is None else config.reserve_gb * 1e9
    if not 0 <= reserve < gpu.memory:
        raise ValueError(f"reserve_gb is {config.reserve_gb}; expected from 0 to below {gpu.memory / 1e9:.0f}")
    model = model_named(config.model)
    return Job(model, gpu, config.gpus, config.seq_len, tokens, POLICIES[config.dtypes], reserve)


def main(arguments: Sequence[str], measure: Measure | None = None, console: Console | None = None) -> int:
    """Run the command; the exit code."""
    config = tyro.cli(PlanConfig, args=list(arguments), prog="fusedce plan", description=EXAMPLES)
    try:
        return _run(config, job_of(config), measure, console or Console())
    except NothingFitsError as error:
        print(f"fusedce plan: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"fusedce plan: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"fusedce plan: {error.filename or config.png}: {error.strerror or error}", file=sys.stderr)
        return 2


def _run(config: PlanConfig, job: Job, measure: Measure | None, console: Console) -> int:
    if config.compare:
        alone = [f"--{name}" for name in ("sweep", "png", "run") if getattr(config, name)]
        if alone:
            raise ValueError(f"--compare and {alone[0]} do not go together: the one shows several cards, the other one")
        return _compare(config, job, console)
    answer = solve(job, config.recompute)
    points = grid(answer) if config.sweep else []
    measured = measure(answer) if measure and config.run else {}
    if config.json:
        found = report.as_dict(answer)
        if points:
            found["sweep"] = report.points_as_dicts(points, answer.best)
        print(json.dumps(found | ({"run": measured} if measured else {})))
    else:
        show.plan(console, answer, _upgrade(config, job, answer))
        if points:
            show.sweep(console, answer, points)
        if measured:
            show.measured(console, measured)
    if config.png:
        from fusedce.plan import picture

        picture.draw(answer, Path(config.png))
    return 0


def _compare(config: PlanConfig, job: Job, console: Console) -> int:
    cards = [gpu_named(name.strip()) for name in config.compare.split(",")]
    found = []
    for card in cards:
        reserve = card.memory * RESERVE if config.reserve_gb is None else job.reserve
        found += compare(replace(job, reserve=reserve), [card], config.recompute)
    if config.json:
        print(json.dumps(report.comparison_as_dicts(found)))
    else:
        show.comparison(console, found)
    return 0 if any(isinstance(answer, Answer) for _, answer in found) else 1


def _upgrade(config: PlanConfig, job: Job, answer: Answer) -> str:
    """What would change with the next card up."""
    card = next_up(job.gpu)
    if card is None:
        return ""
    reserve = card.memory * RESERVE if config.reserve_gb is None else job.reserve
    try:
        other = solve(replace(job, gpu=card, reserve=reserve), config.recompute)
    except NothingFitsError:
        return ""
    faster = answer.best.step.total / other.best.step.total
    change = f"{show.named(other.layout)}, {other.best.step.total:.2f} s ({faster:.2f}× as fast)"
    return f"next card up, {card.title}: {change}"
