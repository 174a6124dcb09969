"""SFT: the next token of packed text, through the fused linear cross-entropy."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fusedce.train import data
from fusedce.train.config import SftConfig, fit
from fusedce.train.loop import Trainer


class SftTrainer(Trainer):
    """Train on text. The loss is the mean over all tokens of the step."""

    config: SftConfig

    def __init__(self, config: SftConfig, run: Path) -> None:
        training, held_out = data.read(config.data)
        self.training = data.Packed(training, config, "training")
        self.held_out = data.Packed(held_out, config, "held-out")
        super().__init__(fit(config, data.NUM_TOKENS, config.seq_len), run)

    def describe(self) -> str:
        return f"text, {self.config.seq_len} bytes a sequence"

    def train_step(self) -> dict[str, float]:
        ids, target = (t.to(self.device) for t in self.training.batch(self.step))
        self.load.reset()
        loss, norm, skipped = self.backward_and_step(self.losses(ids, target))
        return {
            "loss": loss.item(),
            "grad_norm": norm,
            "skipped": skipped,
            "imbalance": self.load.imbalance(),
            "tokens": float(ids.numel()),
        }

    def losses(self, ids: Tensor, target: Tensor) -> Iterator[Tensor]:
        """Each micro-batch's share of the step's mean loss."""
        for rows in self.micro_batches():
            with self.autocast():
                yield self.model.head.cross_entropy(self.model(ids[rows]), target[rows]) / target.numel()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The mean loss on held-out files, also as bits a byte."""
        total = 0.0
        for number in range(self.config.eval_batches):
            ids, target = (t.to(self.device) for t in self.held_out.batch(number))
            total += sum(float(loss) for loss in self.losses(ids, target))
        loss = total / self.config.eval_batches
        bits = loss / math.log(2)
        self.headline = f"{self.describe()}: {bits:.3f} bits a byte on held-out files"
        self.example = "an untrained model has 8.006, log2 of 257"
        return {"held_out_loss": loss, "held_out_bits_per_byte": bits}
