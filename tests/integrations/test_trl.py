"""The examples for TRL run, learn, and agree with TRL's own log-probs."""

import os
import subprocess
import sys

import pytest
import torch
from trl import GRPOTrainer

from examples.trl_grpo import build_trainer
from tests.house.source import ROOT

pytestmark = pytest.mark.slow


def run(script: str) -> list[float]:
    """The figures in the last line that an example prints."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(word) for word in done.stdout.splitlines()[-1].split()[1:]]


def test_sft_learns() -> None:
    losses = run("trl_sft.py")
    assert len(losses) == 6 and losses[-1] < 0.5 * losses[0]


def test_grpo_learns() -> None:
    rewards = run("trl_grpo.py")
    assert len(rewards) == 6 and rewards[0] < 0.5 and rewards[-1] > 0.9


def test_grpo_log_probs_are_those_of_trl(tmp_path) -> None:  # type: ignore[no-untyped-def]
    trainer = build_trainer(str(tmp_path))
    ids = torch.randint(3, 9, (5, 9))
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, 7:] = 0, 0
    arguments = dict(input_ids=ids, attention_mask=mask, logits_to_keep=5, batch_size=2, compute_entropy=True)
    ours = trainer._get_per_token_logps_and_entropies(trainer.model, **arguments)
    theirs = GRPOTrainer._get_per_token_logps_and_entropies(trainer, trainer.model, **arguments)
    for mine, trls in zip(ours[:2], theirs[:2], strict=True):
        assert mine.shape == (5, 5) and torch.allclose(mine * mask[:, 4:], trls * mask[:, 4:], atol=1e-5)
    assert ours[2] is None
