"""One optimizer step of a trainer, on one rank and on the ranks of a world: its loss, norm, and every gradient."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusedce.train import grpo as grpo_module
from fusedce.train.config import GrpoConfig, ModelConfig, OptimConfig, SftConfig, TrainConfig, mode_of
from fusedce.train.loop import Trainer
from fusedce.train.mesh import Layout, World, alone
from fusedce.train.run import TRAINERS
from fusedce.train.weights import whole

# Sizes that no number of ranks divides: 13 words, 5 sequences, 15 rows of an expert's second matrix, of which FSDP
# therefore cuts a part of a part.
MODEL = ModelConfig(hidden_size=15, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, ffn_size=12, num_experts=4)
RATE = 0.1


def world(ep: int) -> World:
    """All ranks of this process's group, `ep` of them sharing the experts."""
    return World(torch.device("cpu"), Layout(ep, dist.get_world_size() // ep, ""), sharded=True)


def one() -> World:
    return alone(torch.device("cpu"))


@dataclass
class Step:
    """What a step of SGD saw and left. skipped: whether it left the weights alone."""

    metrics: dict[str, float]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]


def trainer(config: TrainConfig, ranks: World) -> Trainer:
    made = TRAINERS[mode_of(config)](config, None, ranks)  # type: ignore[arg-type]
    made.optimizer = torch.optim.SGD(made.weights.values(), lr=RATE)  # type: ignore[assignment]
    return made


def step(config: TrainConfig, ranks: World) -> Step:
    """One train_step; gradients as they are when the optimizer gets them."""
    made, grads = trainer(config, ranks), {}

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        grads.update({name: whole(p.grad).clone() for name, p in made.weights.items()})  # type: ignore[arg-type]

    made.optimizer.register_step_pre_hook(keep)
    metrics = made.train_step()
    return Step(metrics, grads, {name: whole(p).clone() for name, p in made.weights.items()})


def assert_same(ours: Step, expected: Step, what: str) -> None:
    """Every metric; every gradient, in value and in scale (ratio 1 ± 1e-5); every weight."""
    for key, value in expected.metrics.items():
        assert ours.metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-7), f"{what}: {key}"
    assert ours.grads.keys() == expected.grads.keys() and ours.grads, what
    for name, grad in expected.grads.items():
        assert grad.any(), f"{what}: {name} gets no gradient"
        ratio = float((ours.grads[name] * grad).sum() / grad.square().sum())
        assert abs(ratio - 1) <= 1e-5, f"{what}: {name} has {ratio} times the gradient"
        torch.testing.assert_close(
            ours.grads[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{what} {n} {m}"
        )
        torch.testing.assert_close(ours.weights[name], expected.weights[name], rtol=1e-5, atol=1e-6)


def sft(text: str, **changes: object) -> SftConfig:
    model = replace(MODEL, vocab_size=261, recompute=0.0)
    values: dict[str, object] = dict(
        device="cpu", data=text, seq_len=24, batch_size=5, eval_batches=1, model=model, optim=OptimConfig(clip_norm=0.5)
    )
    return SftConfig(**{**values, **changes})  # type: ignore[arg-type]


def grpo(**changes: object) -> GrpoConfig:
    model = replace(MODEL, vocab_size=13, recompute=0.0, learned_positions=11)
    values: dict[str, object] = dict(
        device="cpu", num_prompts=3, group_size=4, length=3, model=model, optim=OptimConfig(clip_norm=0.5)
    )
    return GrpoConfig(**{**values, **changes})  # type: ignore[arg-type]


def same_answers(group_size: int) -> Callable[..., Tensor]:
    """In place of sampling: answers that depend on the prompt and the place in its group, so on no number of ranks."""

    def generate(model: object, prompts: Tensor, num_new: int, *_: object, **__: object) -> Tensor:
        place = torch.arange(len(prompts))[:, None] % group_size
        return (prompts[:, 1 : 1 + num_new].flip(1) + place * torch.arange(num_new)) % 10

    return generate


def patch_answers(group_size: int) -> pytest.MonkeyPatch:
    patch = pytest.MonkeyPatch()
    patch.setattr(grpo_module, "generate", same_answers(group_size))
    return patch
