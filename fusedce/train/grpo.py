"""GRPO: sample a group of answers for each prompt, reward them, and raise the likelihood of those above their group."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fusedce.functional import LogProb
from fusedce.train import tasks
from fusedce.train.config import ConfigError, GrpoConfig, fit
from fusedce.train.loop import Trainer
from fusedce.train.losses import PolicyOptions, group_advantages, policy_loss, token_weights
from fusedce.train.model import LM, generate


class GrpoTrainer(Trainer):
    """Train on `config.task`. On-policy for one update a batch, PPO's clipped ratio for more."""

    config: GrpoConfig

    def __init__(self, config: GrpoConfig, run: Path) -> None:
        self.task = tasks.Task(config.task, config.alphabet, config.length)
        if not len(self.task.held_out(1)[0]):
            raise ConfigError(f"length is {config.length}; expected more, none of these strings is held out")
        super().__init__(fit(config, self.task.num_tokens, 2 * config.length + 1), run)
        self.options = PolicyOptions.of(config)
        # The starting model, made again from seed or `init` when a run resumes: it need not be saved.
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if config.kl_coef else None

    def describe(self) -> str:
        return f"{self.config.task} {self.config.length} {self.config.alphabet}"

    def train_step(self) -> dict[str, float]:
        config = self.config
        prompts, truth = (
            t.repeat_interleave(config.group_size, 0).to(self.device)
            for t in self.task.training(config.num_prompts, self.generator("prompts"))
        )
        with self.autocast():
            sampler = self.generator("answers", self.device)
            answers = generate(self.model, prompts, config.length, config.temperature, sampler)
        rewards = tasks.rewards(answers, truth)
        batch = Batch(
            ids=torch.cat((prompts, answers), 1),
            mask=torch.ones_like(answers, dtype=torch.bool),
            advantage=group_advantages(rewards, config.group_size, config.std_advantage),
        )
        with torch.no_grad(), self.autocast():
            if config.num_updates > 1:
                batch.old_logprob = self.over_micro_batches(self.model, batch)
            if self.reference is not None:
                batch.ref_logprob = self.over_micro_batches(self.reference, batch)
        self.load.reset()
        sums = torch.zeros(3, device=self.device)
        loss = torch.zeros((), device=self.device)
        norm = skipped = 0.0
        rows = len(answers) // config.num_updates
        for start in range(0, len(answers), rows):
            update = batch.rows(slice(start, start + rows))
            part, norm, skip = self.backward_and_step(self.losses(update, sums))
            loss, skipped = loss + part, skipped + skip
        means = (torch.cat((loss[None], sums)) / config.num_updates).tolist()
        return {
            "reward": rewards.mean().item(),
            "exact": tasks.exact(answers, truth).mean().item(),
            **dict(zip(("loss", "clipped", "kl", "entropy"), means, strict=True)),
            "grad_norm": norm,
            "skipped": skipped,
            "imbalance": self.load.imbalance(),
            "tokens": float(batch.ids.numel()),
        }

    def losses(self, update: "Batch", sums: Tensor) -> Iterator[Tensor]:
        """The loss of each micro-batch of one update; adds (clipped, kl, entropy) to `sums`."""
        config = self.config
        weights = token_weights(update.mask, config.normalize, fixed_length=config.length)
        for rows in self.micro_batches():
            part = update.rows(rows)
            with self.autocast():
                policy = self.logprobs(self.model, part)
            result = policy_loss(
                policy.logprob, part.old_logprob, part.advantage, weights[rows], self.options, entropy=policy.entropy,
                ref_logprob=part.ref_logprob,
            )  # fmt: skip
            sums += torch.stack(result[1:4])
            yield result.loss

    def logprobs(self, model: LM, batch: "Batch") -> LogProb:
        """Log-prob and entropy of the answers' tokens (B,T); the head sees only the positions that predict them."""
        num_answer = batch.mask.shape[1]
        hidden = model(batch.ids[:, :-1])[:, -num_answer:]
        target = torch.where(batch.mask, batch.ids[:, -num_answer:], -100)
        return model.head(hidden, target, self.config.temperature)

    def over_micro_batches(self, model: LM, batch: "Batch") -> Tensor:
        """The log-probs (B,T) of a whole batch, no graph."""
        size = self.micro_batches()[0].stop
        starts = range(0, len(batch.ids), size)
        return torch.cat([self.logprobs(model, batch.rows(slice(s, s + size))).logprob for s in starts])

    def evaluate(self) -> dict[str, float]:
        """The share of held-out prompts whose greedy answer is right."""
        prompts, truth = self.task.held_out(self.config.eval_prompts)
        with self.autocast():
            answers = generate(self.model, prompts.to(self.device), self.config.length, temperature=0).cpu()
        accuracy = tasks.exact(answers, truth).mean().item()
        self.headline = f"{self.describe()}: {accuracy:.1%} of {len(prompts)} held-out strings right"
        self.example = f"for example {self.task.show(prompts[0], answers[0])}"
        return {"held_out_accuracy": accuracy}


@dataclass
class Batch:
    """Rows of prompt and answer (B,S), the answer's valid tokens (B,T), advantages (B,), log-probs (B,T) or None."""

    ids: Tensor
    mask: Tensor
    advantage: Tensor
    old_logprob: Tensor | None = None
    ref_logprob: Tensor | None = None

    def rows(self, rows: slice) -> "Batch":
        """Some of the rows."""
        old, ref = (None if value is None else value[rows] for value in (self.old_logprob, self.ref_logprob))
        return Batch(self.ids[rows], self.mask[rows], self.advantage[rows], old, ref)
