"""The family's losses are those of TRL: the same numbers through its GRPOTrainer._compute_loss, loss and gradient."""

from dataclasses import replace

import pytest
import torch
from trl import GRPOTrainer

from examples.trl_grpo import build_trainer
from fusedce.train.losses import PolicyOptions, policy_loss, token_weights

LENGTH = 8
CLIP = PolicyOptions(clip_low=0.2, clip_high=0.28)
# ours, our normalisation, TRL's loss_type and what else is set on its trainer
MEMBERS = {
    "grpo": (CLIP, "sequence", "grpo", {}),
    "bnpo": (CLIP, "token", "bnpo", {}),
    "dapo": (CLIP, "token", "dapo", {}),
    "dr-grpo": (CLIP, "fixed", "dr_grpo", {}),
    "dual-clip": (replace(CLIP, dual_clip=1.6), "sequence", "grpo", {"delta": 1.6}),
    "cispo": (PolicyOptions(variant="cispo", clip_high=0.28), "token", "cispo", {"epsilon_high": 1.28}),
    "gspo": (replace(CLIP, variant="gspo"), "sequence", "grpo", {"importance_sampling_level": "sequence"}),
    "kl": (replace(CLIP, kl_coef=0.3, kl_corrected=False), "sequence", "grpo", {"beta": 0.3}),
    "kl-corrected": (replace(CLIP, kl_coef=0.3), "token", "dapo", {"beta": 0.3, "use_bias_correction_kl": True}),
    "rollout": (replace(CLIP, rollout_cap=1.2), "token", "dapo", {"use_vllm": True}),
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    return build_trainer(str(tmp_path_factory.mktemp("trl")))


@pytest.mark.parametrize("member", MEMBERS)
def test_losses_are_trls(trainer: GRPOTrainer, member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, normalize, kind, settings = MEMBERS[member]
    rows = trainer.args.per_device_train_batch_size
    lp = (torch.randn(rows, LENGTH) - 1).requires_grad_()
    entropy = torch.rand(rows, LENGTH)
    old, ref, rollout = (lp.detach() + 0.3 * torch.randn(rows, LENGTH) for _ in range(3))
    mask = (torch.rand(rows, LENGTH) < 0.8).long()
    mask[:, 0] = 1  # TRL counts an empty row in its mean over sequences, ours does not
    advantage = torch.randn(rows)
    defaults = dict(epsilon_low=0.2, epsilon_high=0.28, beta=0.0, importance_sampling_level="token", use_vllm=False)
    of_args = {"delta": None, "use_bias_correction_kl": False}
    for name, value in {**defaults, **of_args, **settings}.items():
        monkeypatch.setattr(trainer.args if name in of_args else trainer, name, value)
    monkeypatch.setattr(trainer, "loss_type", kind)
    monkeypatch.setattr(trainer, "max_completion_length", LENGTH)
    monkeypatch.setattr(trainer, "current_gradient_accumulation_steps", 1, raising=False)
    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (lp, entropy, None))
    inputs = {
        "prompt_ids": torch.zeros(rows, 2, dtype=torch.int64), "prompt_mask": torch.ones(rows, 2, dtype=torch.int64),
        "completion_ids": torch.zeros(rows, LENGTH, dtype=torch.int64), "completion_mask": mask,
        "advantages": advantage, "old_per_token_logps": old, "ref_per_token_logps": ref,
        "importance_sampling_ratio": (old - rollout).exp().clamp(max=1.2),
        "num_items_in_batch": mask.sum() * trainer.args.steps_per_generation,
    }  # fmt: skip
    trainer.model.train()
    theirs = trainer._compute_loss(trainer.model, inputs)
    weights = token_weights(mask.bool(), normalize, fixed_length=LENGTH)
    ours = policy_loss(
        lp, old, advantage, weights, options, entropy=entropy, ref_logprob=ref, rollout_logprob=rollout
    )  # fmt: skip
    torch.testing.assert_close(ours.loss, theirs, rtol=1e-5, atol=1e-6)
    grads = [torch.autograd.grad(loss, lp)[0] for loss in (ours.loss, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)
    assert grads[0].any() and ours.clipped > 0
