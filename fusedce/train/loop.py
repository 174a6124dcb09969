"""The loop that both modes share: learning rate, clipping, skipped steps, evaluation, checkpoints, signals, resume.

A step draws from generators seeded by (seed, step); learning rate and data order are functions of the step. So the
whole state of a run is: weights, optimizer, step. On a CPU a resumed run is bitwise the uninterrupted one.

Every rank of the world runs this loop; ranks differ in their share of each update's sequences and in what they draw.
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
from torch import Tensor

from fusedce import check_flags, checks
from fusedce.distributed import clip_grad_norm_
from fusedce.distributed.collectives import local_part
from fusedce.train import checkpoint, hf
from fusedce.train.config import TrainConfig, to_dict, update_units
from fusedce.train.mesh import World, alone, pick_device
from fusedce.train.model import LM, ExpertLoad
from fusedce.train.sharding import build
from fusedce.train.track import Silent, Tracker
from fusedce.train.weights import load_weights, part


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

    def __init__(self, config: TrainConfig, run: Path, world: World | None = None) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        self.config, self.run_folder, self.step = config, run, 0
        self.world = world or alone(pick_device(config.device))
        self.device = self.world.device
        self.model = self.start_model()
        # As they are now: while FSDP has gathered a module, its attributes are others.
        self.weights = dict(self.model.named_parameters())
        self.load = ExpertLoad(self.model)
        self.headline = self.example = ""
        optim = config.optim
        experts = {name: p for name, p in self.weights.items() if ".experts." in name}
        common = [p for name, p in self.weights.items() if name not in experts]
        self.optimizer = torch.optim.AdamW(
            # One group for each mesh: the fused kernel takes no two in one call.
            [{"params": common}, {"params": list(experts.values())}],
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            weight_decay=optim.weight_decay,
            fused=True,
        )

    def start_model(self) -> LM:
        """The model that the run starts from, by its seed, `init` or `hf`."""
        config = self.config
        model = build(config.model, self.world, config.seed)
        if config.init:
            load_weights(model, checkpoint.load_alone(Path(config.init), ("model",))[1]["model"])
        elif config.hf and not config.hf.endswith(".json"):
            hf.load(model, Path(config.hf))
        return model

    @abstractmethod
    def train_step(self) -> dict[str, float]:
        """One step, number `self.step` from 0; its metrics."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Metrics of the held-out data, their names starting with held_out; sets `headline` and `example`."""

    @abstractmethod
    def describe(self) -> str:
        """The run in a few words, for titles."""

    def loop(self, tracker: Tracker | Silent) -> int:
        """Train to the last step, or to a signal; the number of the signal, or 0."""
        config, stopped = self.config, 0
        with Stop() as stop:
            while self.step < config.steps and not stopped:
                start = time.perf_counter()
                for group in self.optimizer.param_groups:
                    group["lr"] = learning_rate(self.step, config)
                metrics = self.train_step()
                check_flags()  # the metrics were read: the GPU has nothing left to do
                seconds = time.perf_counter() - start
                self.step += 1
                metrics |= {"lr": group["lr"], "tok_per_s": metrics["tokens"] / seconds, "seconds": seconds}
                if self.device.type == "cuda":
                    metrics["peak_gib"] = self.world.largest(torch.cuda.max_memory_allocated() / 2**30)
                # A signal may have reached one rank alone; all end after the same step.
                stopped = int(self.world.largest(stop.signal))
                if self.step % config.eval_every == 0 or self.step == config.steps:
                    metrics |= self.evaluate()
                tracker.log(self.step, metrics)
                if self.step % config.save_every == 0 or self.step == config.steps or stopped:
                    self.save()
        return stopped

    def backward_and_step(self, losses: Iterator[Tensor]) -> tuple[Tensor, float, float]:
        """Sum the losses' gradients over micro-batches and ranks, clip, step: the loss of all ranks, the gradient's
        norm, and 1.0 if the step was skipped.

        A norm that is not finite leaves weights and optimizer as they were, on every rank: all have the same norm.
        """
        total = torch.zeros((), device=self.device)
        for loss in losses:
            loss.backward()
            total += loss.detach()
        norm = float(clip_grad_norm_(self.weights.values(), self.config.optim.clip_norm))
        skipped = not math.isfinite(norm)
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.world.sum(total), norm, float(skipped)

    def micro_batches(self) -> Iterator[slice]:
        """The rows of this rank's share of an update, `micro_batch` at a time, as many slices on every rank.

        A rank that has no rows left for one gets the slice of the row after its last, which `spare` adds, and whose
        tokens are not counted as load.
        """
        units, of_unit = update_units(self.config)
        mine = self.world.share(units)
        rows, most = (mine.stop - mine.start) * of_unit, self.world.largest_share(units) * of_unit
        size = self.config.micro_batch or most
        for start in range(0, most, size):
            self.load.paused = start >= rows
            yield slice(rows, rows + 1) if self.load.paused else slice(start, min(start + size, rows))
        self.load.paused = False

    def autocast(self) -> torch.autocast:
        """bf16 over fp32 parameters on a GPU; fp32 on a CPU, where bf16 products are slow. FSDP has its own policy."""
        on = self.device.type == "cuda" and not self.world.sharded
        return torch.autocast(self.device.type, torch.bfloat16, enabled=on)

    def generator(self, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
        """Random numbers for one purpose in this step, whatever came before it."""
        # Answers are each rank's own; prompts are drawn by all alike, who then take their share.
        who = f" {self.world.rank}" if purpose == "answers" and self.world.rank else ""
        digest = hashlib.sha256(f"{self.config.seed} {self.step} {purpose}{who}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:4], "big"))

    def save(self) -> Path:
        """Publish a checkpoint of this moment. A collective call; each rank writes its part."""
        names = {id(parameter): name for name, parameter in self.weights.items()}
        moments = {
            f"{names[id(parameter)]}/{key}": value
            for parameter, values in self.optimizer.state.items()
            for key, value in values.items()
        }
        state = {"model": self.weights, "optimizer": moments}
        return checkpoint.save(self.run_folder, self.step, to_dict(self.config), state, self.config.keep)

    def place(self, kind: str, name: str) -> Tensor | None:
        """What a tensor of a checkpoint is to lie like: a weight's moments like the weight."""
        return self.weights.get(name.rsplit("/", 1)[0])

    def restore(self, manifest: checkpoint.Manifest, state: checkpoint.State) -> None:
        """Take up weights, optimizer and step of a checkpoint: whole tensors, or laid out by `place`."""
        load_weights(self.model, state["model"])
        for name, value in state["optimizer"].items():
            weight, key = name.rsplit("/", 1)
            parameter, held = self.weights[weight], value.to(self.device)
            if value.dim() and not checks.is_distributed(value):
                held = torch.zeros_like(parameter)
                local_part(held).copy_(value[part(parameter)])
            self.optimizer.state[parameter][key] = held
        self.step = manifest.step


def spare(rows: Tensor, fill: float = 0) -> Tensor:
    """`rows` and one more of `fill`: the micro-batch of a rank that has none, which every collective needs to run."""
    return torch.cat((rows, rows.new_full((1, *rows.shape[1:]), fill)))
