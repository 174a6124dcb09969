"""GRPO: sample a group of answers for each prompt, reward them, and raise the likelihood of those above their group."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fusedce.functional import LogProb
from fusedce.train import tasks
from fusedce.train.config import ConfigError, GrpoConfig, fit
from fusedce.train.loop import Trainer, spare
from fusedce.train.losses import PolicyOptions, group_advantages, policy_loss, token_weights, weight_total
from fusedce.train.mesh import World
from fusedce.train.model import LM, generate
from fusedce.train.sharding import Replica, reshard


class GrpoTrainer(Trainer):
    """Train on `config.task`. On-policy for one update a batch, PPO's clipped ratio for more."""

    config: GrpoConfig

    def __init__(self, config: GrpoConfig, run: Path, world: World | None = None) -> None:
        self.task = tasks.Task(config.task, config.alphabet, config.length)
        if not len(self.task.held_out(1)[0]):
            raise ConfigError(f"length is {config.length}; expected more, none of these strings is held out")
        super().__init__(fit(config, self.task.num_tokens, 2 * config.length + 1), run, world)
        self.options = PolicyOptions.of(config)
        # The starting model, made again from seed, `init` or `hf` when a run resumes: it need not be saved.
        self.reference = self.start_model().requires_grad_(False) if config.kl_coef else None
        self.replica = Replica(self.config.model, self.device) if self.world.sharded else None

    def describe(self) -> str:
        return f"{self.config.task} {self.config.length} {self.config.alphabet}"

    def sampler(self) -> LM:
        """The model to sample from, with the weights of now."""
        return self.model if self.replica is None else self.replica.update(self.weights)

    def train_step(self) -> dict[str, float]:
        config = self.config
        prompts, truth = self.my_prompts()
        with self.autocast():
            answers = generate(
                self.sampler(), prompts, config.length, config.temperature, self.generator("answers", self.device)
            )
        rewards = tasks.rewards(answers, truth)
        batch = Batch(
            ids=torch.cat((prompts, answers), 1),
            mask=torch.ones_like(answers, dtype=torch.bool),
            advantage=group_advantages(rewards, config.group_size, config.std_advantage) if len(rewards) else rewards,
        )
        rows = len(answers) // config.num_updates
        updates = [batch.rows(slice(at * rows, (at + 1) * rows)) for at in range(config.num_updates)]
        with torch.no_grad(), self.autocast():
            for update in updates:
                if config.num_updates > 1:
                    update.old_logprob = self.over_micro_batches(self.model, update)
                if self.reference is not None:
                    update.ref_logprob = self.over_micro_batches(self.reference, update)
        self.load.reset()
        sums = torch.zeros(3, device=self.device)
        loss = torch.zeros((), device=self.device)
        norm = skipped = 0.0
        for update in updates:
            total, norm, skip = self.backward_and_step(self.losses(update, sums))
            loss, skipped = loss + total, skipped + skip
        counts = rewards.sum(), tasks.exact(answers, truth).sum(), batch.ids.numel(), len(answers)
        seen = self.world.sum(torch.cat((sums, torch.tensor(counts, device=self.device, dtype=torch.float64)))).tolist()
        *means, reward, exact, tokens, num_answers = seen
        return {
            "reward": reward / num_answers,
            "exact": exact / num_answers,
            "loss": loss.item() / config.num_updates,
            **{key: mean / config.num_updates for key, mean in zip(("clipped", "kl", "entropy"), means, strict=True)},
            "grad_norm": norm,
            "skipped": skipped,
            "imbalance": self.load.imbalance(self.world),
            "tokens": tokens,
        }

    def my_prompts(self) -> tuple[Tensor, Tensor]:
        """This rank's share of each update's prompts, and their answers, group_size times each."""
        config, drawn = self.config, self.task.training(self.config.num_prompts, self.generator("prompts"))
        mine = self.world.share(config.num_prompts // config.num_updates)
        return tuple(  # type: ignore[return-value]
            t.unflatten(0, (config.num_updates, -1))[:, mine]
            .flatten(0, 1)
            .repeat_interleave(config.group_size, 0)
            .to(self.device)
            for t in drawn
        )

    def losses(self, update: "Batch", sums: Tensor) -> Iterator[Tensor]:
        """The loss of each micro-batch of one update; adds (clipped, kl, entropy) to `sums`."""
        config = self.config
        total = self.world.sum(weight_total(update.mask, config.normalize, config.length))
        weights = spare(token_weights(update.mask, config.normalize, fixed_length=config.length, total=total))
        update = update.with_spare()
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

    def over_micro_batches(self, model: LM, update: "Batch") -> Tensor:
        """The log-probs (B,T) of an update, no graph."""
        rows = update.with_spare()
        parts = [self.logprobs(model, rows.rows(part)).logprob for part in self.micro_batches()]
        reshard(model)
        return torch.cat(parts)[: len(update.ids)]

    def evaluate(self) -> dict[str, float]:
        """The share of held-out prompts whose greedy answer is right."""
        prompts, truth = self.task.held_out(self.config.eval_prompts)
        mine = self.world.share(len(prompts))
        with self.autocast():
            answers = generate(self.sampler(), prompts[mine].to(self.device), self.config.length, temperature=0)
        right = tasks.exact(answers, truth[mine].to(self.device)).sum()
        accuracy = self.world.sum(right).item() / len(prompts)
        self.headline = f"{self.describe()}: {accuracy:.1%} of {len(prompts)} held-out strings right"
        if len(answers):
            self.example = f"for example {self.task.show(prompts[mine][0], answers[0].cpu())}"
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

    def with_spare(self) -> "Batch":
        """And a row without a valid token, for micro-batches that this rank has not."""
        values = {name: spare(value) for name, value in vars(self).items() if value is not None}
        return replace(self, **values)
