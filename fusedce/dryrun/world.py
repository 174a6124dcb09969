"""A world of ranks that are not there, and rank 0's sharded model in it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fusedce.dryrun.expert_parallel import ExpertParallelMoE
from fusedce.plan.layout import Layout
from fusedce.plan.models import Model
from fusedce.train.config import ModelConfig
from fusedce.train.model import LM, Block


@dataclass(frozen=True)
class Ranks:
    """The meshes of a world: all ranks, those that hold the same experts, and the group that shares the experts."""

    all: DeviceMesh
    same_experts: DeviceMesh
    exchange: dist.ProcessGroup


@contextmanager
def fake_world(layout: Layout) -> Iterator[Ranks]:
    """Rank 0 of the layout's ranks; collectives do nothing. To be entered before FakeTensorMode, which would make fakes
    of the meshes' tables of ranks. RuntimeError where a process group is there already.
    """
    if dist.is_initialized():
        raise RuntimeError("fusedce.dryrun: a process group is there already; run this in a process of its own")
    dist.init_process_group("fake", rank=0, world_size=layout.world, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (layout.world // layout.ep, layout.ep), mesh_dim_names=("edp", "ep"))
        yield Ranks(mesh._flatten("ranks"), mesh["edp"], mesh["ep"].get_group())
    finally:
        dist.destroy_process_group()


def build(model: Model, layout: Layout, ranks: Ranks) -> LM:
    """The trainer's model, sharded: each block, its experts, the embedding and the head are gathered by themselves.

    fp32 shards, bf16 compute, fp32 reduce. Call under FakeTensorMode.
    """
    config = ModelConfig(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        num_layers=model.layers,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        ffn_size=model.ffn,
        num_experts=model.experts,
        top_k=model.top_k,
        recompute=layout.recomputed / model.layers,
    )
    lm = LM(config)
    _as_on_a_gpu(lm)
    # Inputs are not cast: the table of rotations must stay fp32.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in lm.layers:
        assert isinstance(block, Block)
        moe = ExpertParallelMoE(model.hidden, model.ffn, model.experts, model.top_k, layout.chunks, ranks.exchange)
        block.moe = moe  # type: ignore[assignment]
        if layout.ep > 1:
            cut = _cut_of(ranks.same_experts.size())
            fully_shard(moe.experts, mesh=ranks.same_experts, mp_policy=policy, shard_placement_fn=cut)
        fully_shard(block, mesh=ranks.all, mp_policy=policy, shard_placement_fn=_cut_of(ranks.all.size()))
    # FSDP gathers a module's weights where its forward is called.
    lm.head.forward = lm.head.cross_entropy  # type: ignore[method-assign,assignment]
    for part in (lm.embed, lm.head, lm):
        fully_shard(part, mesh=ranks.all, mp_policy=policy)
    return lm


def _cut_of(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """Where a parameter is cut for `ranks`: experts (E, rows, columns) within each, if rows divide. By experts, FSDP2's
    default, ranks beyond the number of experts would get none, and the first ones a whole one.
    """
    return lambda parameter: Shard(1) if parameter.dim() == 3 and parameter.shape[1] % ranks == 0 else None


def _as_on_a_gpu(lm: LM) -> None:
    """Norms that keep what the GPU's one kernel keeps; on a CPU torch takes them apart and keeps fp32 copies."""
    for module in list(lm.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.RMSNorm):
                setattr(module, name, HeldNorm(child.weight))


class HeldNorm(nn.Module):
    """RMSNorm by what it keeps: its input, weight and a root mean square (fp32) a row. Its values are not computed."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> the same shape."""
        out: Tensor = _Held.apply(x, self.weight)
        return out


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def,override]
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def,override]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
