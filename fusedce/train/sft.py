"""SFT: the next token of packed text, through the fused linear cross-entropy."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fusedce.train import data
from fusedce.train.config import SftConfig, fit
from fusedce.train.loop import Trainer, spare
from fusedce.train.mesh import World
from fusedce.train.packing import Packing
from fusedce.train.sharding import reshard

IGNORED = -100  # as a target: no loss


class SftTrainer(Trainer):
    """Train on text. The loss is the mean over all tokens of the step that have one.

    Files lie back to back in a row. Each is trained on as if it were alone: positions start anew, attention stays
    within, and no file's last token is asked for the next one's first.
    """

    config: SftConfig

    def __init__(self, config: SftConfig, run: Path, world: World | None = None) -> None:
        training, held_out = data.read(config.data)
        self.training = data.Packed(training, config, "training")
        self.held_out = data.Packed(held_out, config, "held-out")
        super().__init__(fit(config, data.NUM_TOKENS, config.seq_len), run, world)

    def describe(self) -> str:
        return f"text, {self.config.seq_len} bytes a sequence"

    def train_step(self) -> dict[str, float]:
        ids, target = self.training.batch(self.step)
        self.load.reset()
        loss, norm, skipped = self.backward_and_step(self.losses(ids, target))
        return {
            "loss": loss.item(),
            "grad_norm": norm,
            "skipped": skipped,
            "imbalance": self.load.imbalance(self.world),
            "tokens": float(ids.numel()),
        }

    def losses(self, ids: Tensor, target: Tensor) -> Iterator[Tensor]:
        """What each of this rank's micro-batches adds to the mean loss of a batch (B, S) that all ranks have."""
        target = torch.where(target == data.END, IGNORED, target)
        count = (target != IGNORED).sum().clamp(min=1)
        mine = self.world.share(len(ids))
        ids, target = spare(ids[mine]), spare(target[mine], IGNORED)
        for rows in self.micro_batches():
            packing = Packing.of(ids[rows] == data.END).to(self.device)
            with self.autocast():
                hidden = self.model(ids[rows].to(self.device), packing=packing)
                yield self.model.head.cross_entropy(hidden, target[rows].to(self.device)) / count

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The mean loss on held-out files, also as bits a byte."""
        total = torch.zeros((), device=self.device)
        for number in range(self.config.eval_batches):
            total += sum(self.losses(*self.held_out.batch(number)))
        reshard(self.model)
        loss = self.world.sum(total).item() / self.config.eval_batches
        bits = loss / math.log(2)
        self.headline = f"{self.describe()}: {bits:.3f} bits a byte on held-out files"
        self.example = "an untrained model has 8.006, log2 of 257"
        return {"held_out_loss": loss, "held_out_bits_per_byte": bits}
