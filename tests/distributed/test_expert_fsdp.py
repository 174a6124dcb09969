"""Experts over two ranks and FSDP2 over the others: gradients, their norm and a step of SGD as one rank makes them."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from fusedce.distributed import ExpertParallelMoE, clip_grad_norm_, keep_plans
from fusedce.nn import MoE
from tests.distributed.processes import run

DEPTH, FFN, EXPERTS, TOP_K, TOKENS = 12, 10, 8, 3, 26


class Block(nn.Module):
    """A linear layer and experts, with or without recompute."""

    def __init__(self, moe: nn.Module, recompute: bool) -> None:
        super().__init__()
        self.linear, self.moe, self.recompute = nn.Linear(DEPTH, DEPTH), moe, recompute

    def forward(self, hidden: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self._run, hidden, use_reentrant=False, context_fn=keep_plans)  # type: ignore[return-value]
        return self._run(hidden)

    def _run(self, hidden: Tensor) -> Tensor:
        return hidden + self.moe(self.linear(hidden))


def check_rank(device: str) -> None:
    """EP 2 × FSDP 2 with a rank without tokens; the loss is a sum over all tokens, so gradients are summed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "experts"))
    everyone = mesh["fsdp", "experts"]._flatten("everyone")
    group = mesh["experts"].get_group()
    bounds, rank = (0, 9, 9, 20, TOKENS), dist.get_rank()
    hidden = torch.randn(TOKENS, DEPTH, generator=torch.Generator().manual_seed(1))
    for recompute in (False, True):
        torch.manual_seed(2)
        one = Block(MoE(DEPTH, FFN, EXPERTS, TOP_K), False)
        many = Block(ExpertParallelMoE(DEPTH, FFN, EXPERTS, TOP_K, group=group, num_chunks=2), recompute)
        many.linear.load_state_dict(one.linear.state_dict())
        many.moe.router.load_state_dict(one.moe.router.state_dict())
        many.moe.load_experts(one.moe.gate_up_proj, one.moe.down_proj)
        local = many.moe.local_experts
        fully_shard(many.moe.experts, mesh=mesh["fsdp"])
        fully_shard(many, mesh=everyone)
        for module in many.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        one(hidden).square().sum().backward()
        many(hidden[bounds[rank] : bounds[rank + 1]]).square().sum().backward()
        experts = list(many.moe.experts.parameters())
        common = [p for p in many.parameters() if all(p is not e for e in experts)]
        expected = nn.utils.clip_grad_norm_(one.parameters(), 0.5)
        norm = clip_grad_norm_(common, 0.5, experts=experts, group=group, error_if_nonfinite=True)
        assert abs(float(norm) / float(expected) - 1) <= 1e-6
        assert_same_bits(norm)
        pairs = [
            (many.linear.weight, one.linear.weight.grad),
            (many.linear.bias, one.linear.bias.grad),
            (many.moe.router.weight, one.moe.router.weight.grad),
            (experts[0], one.moe.gate_up_proj.grad[local]),
            (experts[1], one.moe.down_proj.grad[local]),
        ]
        for parameter, grad in pairs:
            torch.testing.assert_close(parameter.grad.full_tensor(), grad, rtol=1e-5, atol=1e-6)
        check_nonfinite(common, experts, group)


def check_nonfinite(common: list[nn.Parameter], experts: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """One infinite element on one rank: all ranks refuse, before any gradient has changed."""
    if dist.get_rank() == 3:
        experts[0].grad.to_local()[0, 0, 0] = math.inf  # type: ignore[union-attr]
    before = [p.grad.to_local().clone() for p in (*common, *experts)]  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="the gradients' norm is inf"):
        clip_grad_norm_(common, 0.5, experts=experts, group=group, error_if_nonfinite=True)
    assert all(torch.equal(b, p.grad.to_local()) for b, p in zip(before, (*common, *experts), strict=True))  # type: ignore[union-attr]


def assert_same_bits(value: Tensor) -> None:
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    assert all(torch.equal(value, other) for other in values)


def test_mo_a06_a14_fs_a01_a02_four_ranks_as_one() -> None:
    run(__name__, "check_rank", 4)
