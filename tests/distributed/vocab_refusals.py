"""What the functions of the sharded head refuse: by the arguments' names, on both ranks, and the next call works."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fusedce import distributed as ours
from fusedce.distributed import VocabShard
from tests.linear_ce_cases import Case

SIZE = 12


@dataclass(frozen=True)
class Given:
    """Good arguments of two ranks, and the weight as DTensors of three placements."""

    hidden: Tensor
    target: Tensor
    bias: Tensor
    part: Tensor
    cut: Tensor
    copied: Tensor
    across: Tensor
    cut_bias: Tensor

    @classmethod
    def on(cls, device: str) -> "Given":
        mesh = init_device_mesh(device, (2,))
        hidden, weight, target, bias = Case(8, SIZE, 4, has_bias=True).inputs(device)
        assert bias is not None
        spread = (distribute_tensor(weight, mesh, [p]) for p in (Shard(0), Replicate(), Shard(1)))
        part = weight.chunk(2)[dist.get_rank()]
        return cls(hidden, target, bias, part, *spread, distribute_tensor(bias, mesh, [Shard(0)]))

    def loss(self, **change: object) -> Tensor:
        arguments = {
            "hidden": self.hidden,
            "weight": self.part,
            "target": self.target,
            "shard": VocabShard.even(6, SIZE),
        }
        return ours.vocab_parallel_cross_entropy(**{**arguments, **change})

    def heads(self, **change: object) -> Tensor:
        arguments = {"hidden": self.hidden[None], "weight": self.part, "target": self.target[None]}
        arguments |= {"shard": VocabShard.even(6, SIZE)}
        return ours.vocab_parallel_cross_entropy_heads(**{**arguments, **change}).loss

    def policy(self, loss_fn: Callable[..., Tensor], *per_token: Tensor) -> Tensor:
        shard = VocabShard.even(6, SIZE)
        return ours.vocab_parallel_policy_loss(self.hidden, self.part, self.target, loss_fn, *per_token, shard=shard)

    def words(self, ids: Tensor) -> Tensor:
        return ours.vocab_parallel_logprob_of(self.hidden, self.part, ids, VocabShard.even(6, SIZE))

    def greedy(self, backend: str) -> Tensor:
        """Of a rank that has all words and one that has none, which runs no op."""
        words = SIZE if dist.get_rank() == 0 else 0
        part = self.cut.full_tensor()[:words]
        return ours.vocab_parallel_argmax(self.hidden, part, VocabShard(SIZE - words, SIZE), backend=backend)


# the error, what it says, the call
REFUSALS = (
    (ValueError, "'label_smoothing' and 'softcap'", lambda g: g.loss(label_smoothing=0.1, softcap=2.0)),
    (ValueError, "'label_smoothing' and 'softcap'", lambda g: g.heads(label_smoothing=0.1, softcap=2.0)),
    (ValueError, "'shift' and 'sequence_parallel'", lambda g: g.loss(shift=True, sequence_parallel=True)),
    (ValueError, "'shift' and 'sequence_parallel'", lambda g: g.heads(shift=True, sequence_parallel=True)),
    (ValueError, "'hidden'.*'sequence_parallel'", lambda g: g.loss(hidden=g.hidden[None], sequence_parallel=True)),
    (ValueError, r"'target'.*\(8,\).*of all tokens", lambda g: g.loss(sequence_parallel=True)),
    (ValueError, "'shard' is None", lambda g: g.loss(shard=None)),
    (ValueError, r"'class_weight'.*\(shard.size,\)", lambda g: g.loss(class_weight=torch.ones(6))),
    (ValueError, "'shard' and 'weight'", lambda g: g.loss(weight=g.cut, shard=VocabShard(1, SIZE))),
    (ValueError, "'shard' and 'weight'", lambda g: g.loss(weight=g.copied, shard=VocabShard(6, SIZE))),
    (
        TypeError,
        r"'weight' is a DTensor with placements.*Shard\(dim=1\)",
        lambda g: g.loss(weight=g.across, shard=None),
    ),
    (TypeError, "'bias' is no DTensor", lambda g: g.loss(weight=g.copied, shard=None, bias=g.bias)),
    (TypeError, "'bias' is a DTensor", lambda g: g.loss(bias=g.cut_bias)),
    (TypeError, "'bias' is a DTensor with", lambda g: g.loss(weight=g.copied, shard=None, bias=g.cut_bias)),
    (ValueError, "'target' has shape", lambda g: g.heads(target=g.target)),
    (ValueError, r"'per_token\[0\]'", lambda g: g.policy(lambda x, y: x, g.target[:3])),
    (ValueError, "loss_fn's result", lambda g: g.policy(lambda x: x.sum())),
    (ValueError, "'ids' has the value 12", lambda g: g.words(torch.full((8, 2), SIZE))),
    (ValueError, "K is 0", lambda g: g.words(g.target[:, None][:, :0])),
    (TypeError, "'hidden' has type NoneType", lambda g: g.loss(hidden=None)),
    (TypeError, "'weight' has type NoneType", lambda g: g.loss(weight=None)),
    (TypeError, "'shard' has type int", lambda g: g.loss(shard=6)),
    (ValueError, "'backend' is 'tritonn'", lambda g: g.greedy("tritonn")),
    (ValueError, "'check' is", lambda g: g.loss(check="never")),
    (ValueError, "'reduction' is", lambda g: g.heads(reduction="none")),
)


def check_refusals(device: str) -> None:
    """Of two ranks. PK-A13: where one rank came late, or raised what the others did not, all hung. One that comes late
    is waited for, and what is refused is refused on every rank, before any number crosses."""
    given = Given.on(device)
    if dist.get_rank() == 1:
        time.sleep(2)
    expected = F.cross_entropy(F.linear(given.hidden, given.cut.full_tensor()), given.target)
    for error, message, call in REFUSALS:
        with pytest.raises(error, match=message):
            call(given)
        torch.testing.assert_close(given.loss(), expected, rtol=1e-5, atol=1e-5)
