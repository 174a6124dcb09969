"""The loop that both modes share: learning rate, clipping, skipped steps, evaluation, checkpoints, signals, resume.

A step draws from generators seeded by (seed, step); learning rate and data order are functions of the step. So the
whole state of a run is: weights, optimizer, step. On a CPU a resumed run is bitwise the uninterrupted one.
"""

import hashlib
import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fusedce import check_flags
from fusedce.train import checkpoint
from fusedce.train.config import ConfigError, TrainConfig, to_dict, update_size
from fusedce.train.model import LM, ExpertLoad
from fusedce.train.track import Tracker


def pick_device(name: str) -> torch.device:
    """The device of a run: for "auto" the GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', and torch sees no GPU here; expected cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of step number `step` from 0."""
    optim = config.optim
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    done = (step - optim.warmup_steps) / max(config.steps - optim.warmup_steps, 1)
    return optim.lr * (1 - (1 - optim.final_lr) * min(done, 1.0))


class Stop:
    """While entered, SIGTERM and Ctrl-C only leave a note; the loop then ends after its step. A second one kills."""

    def __init__(self) -> None:
        self.signal = 0

    def __enter__(self) -> "Stop":
        self.before: dict[int, Any] = {
            number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, self.before[number])

    def __exit__(self, *exc: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


class Trainer(ABC):
    """One run. A mode says what a step and an evaluation are."""

    def __init__(self, config: TrainConfig, run: Path) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        self.config, self.run_folder, self.step = config, run, 0
        self.device = pick_device(config.device)
        torch.manual_seed(config.seed)
        self.model = LM(config.model)
        if config.init:
            load_weights(self.model, checkpoint.load_alone(Path(config.init), ("model",))[1]["model"])
        self.model.to(self.device)
        self.load = ExpertLoad(self.model)
        self.headline = self.example = ""
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            weight_decay=optim.weight_decay,
            fused=True,
        )

    @abstractmethod
    def train_step(self) -> dict[str, float]:
        """One step, number `self.step` from 0; its metrics."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Metrics of the held-out data, their names starting with held_out; sets `headline` and `example`."""

    @abstractmethod
    def describe(self) -> str:
        """The run in a few words, for titles."""

    def loop(self, tracker: Tracker) -> int:
        """Train to the last step, or to a signal; the number of the signal, or 0."""
        config = self.config
        saved = self.step
        with Stop() as stop:
            while self.step < config.steps and not stop.signal:
                start = time.perf_counter()
                for group in self.optimizer.param_groups:
                    group["lr"] = learning_rate(self.step, config)
                metrics = self.train_step()
                check_flags()  # the metrics were read: the GPU has nothing left to do
                seconds = time.perf_counter() - start
                self.step += 1
                metrics |= {"lr": group["lr"], "tok_per_s": metrics["tokens"] / seconds, "seconds": seconds}
                if self.device.type == "cuda":
                    metrics["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                if self.step % config.eval_every == 0 or self.step == config.steps:
                    metrics |= self.evaluate()
                tracker.log(self.step, metrics)
                if self.step % config.save_every == 0 or self.step == config.steps or stop.signal:
                    self.save()
                    saved = self.step
            if saved != self.step:  # the signal came while a checkpoint was written
                self.save()
        return stop.signal

    def backward_and_step(self, losses: Iterator[Tensor]) -> tuple[Tensor, float, float]:
        """Sum the losses' gradients, clip, step: the loss, the gradient's norm, and 1.0 if the step was skipped.

        A norm that is not finite leaves weights and optimizer as they were.
        """
        total = torch.zeros((), device=self.device)
        for loss in losses:
            loss.backward()
            total += loss.detach()
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip_norm))
        skipped = not math.isfinite(norm)
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm, float(skipped)

    def micro_batches(self) -> list[slice]:
        """The rows of one update, `micro_batch` at a time."""
        rows = update_size(self.config)
        size = self.config.micro_batch or rows
        return [slice(start, start + size) for start in range(0, rows, size)]

    def autocast(self) -> torch.autocast:
        """bf16 over fp32 parameters on a GPU; fp32 on a CPU, where bf16 products are slow."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def generator(self, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
        """Random numbers for one purpose in this step, whatever came before it."""
        digest = hashlib.sha256(f"{self.config.seed} {self.step} {purpose}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:4], "big"))

    def save(self) -> Path:
        """Publish a checkpoint of this moment."""
        names = [name for name, _ in self.model.named_parameters()]
        moments = {
            f"{names[index]}/{key}": value
            for index, values in self.optimizer.state_dict()["state"].items()
            for key, value in values.items()
        }
        state = {"model": dict(self.model.named_parameters()), "optimizer": moments}
        return checkpoint.save(self.run_folder, self.step, to_dict(self.config), state, self.config.keep)

    def restore(self, manifest: checkpoint.Manifest, state: checkpoint.State) -> None:
        """Take up weights, optimizer and step of a checkpoint."""
        load_weights(self.model, state["model"])
        indices = {name: index for index, (name, _) in enumerate(self.model.named_parameters())}
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in state["optimizer"].items():
            parameter, key = name.rsplit("/", 1)
            moments.setdefault(indices[parameter], {})[key] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.step = manifest.step


@torch.no_grad()
def load_weights(model: LM, tensors: dict[str, Tensor]) -> None:
    """Copy a checkpoint's weights; ConfigError where a name or shape is not the model's."""
    parameters = dict(model.named_parameters())
    for name in sorted(parameters.keys() ^ tensors.keys()):
        where = "the checkpoint" if name in parameters else "the model"
        raise ConfigError(
            f"model: {where} has no {name}; pass the --model options that the checkpoint was trained with"
        )
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            here, there = tuple(parameter.shape), tuple(tensors[name].shape)
            raise ConfigError(f"model: {name} is {here} here and {there} in the checkpoint; pass its --model options")
        parameter.copy_(tensors[name])
