"""The model over the ranks of a mesh: experts on their ranks and sharded over those that have the same, all else FSDP2.

Shards are fp32. On a GPU blocks compute in bf16 and gradients are summed in fp32; on a CPU everything is fp32.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from fusedce.train.config import ModelConfig
from fusedce.train.mesh import World
from fusedce.train.model import LM, Block
from fusedce.train.weights import init_weights, whole


def compute_dtype(device: torch.device) -> torch.dtype:
    """What a sharded model computes in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def build(config: ModelConfig, world: World, seed: int, dtype: torch.dtype | None = None) -> LM:
    """The model with the weights of `seed`, of which no rank holds more than its own. No collective call.

    dtype: that a sharded model computes in; `compute_dtype` for None.
    """
    with torch.device("meta"):
        model = LM(config, world.experts)
    if world.mesh is not None and world.everyone is not None:
        # Inputs are not cast: rotations and routing weights stay fp32.
        policy = MixedPrecisionPolicy(dtype or compute_dtype(world.device), torch.float32, cast_forward_inputs=False)
        _shard(model, world.mesh, world.everyone, policy)
    model.to_empty(device=world.device)
    model.tie()
    return init_weights(model, seed)


def _shard(model: LM, mesh: DeviceMesh, everyone: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    for block in model.layers:
        assert isinstance(block, Block)
        experts: nn.Module = block.moe.experts
        if mesh["ep"].size() > 1:
            for name, local in list(experts.named_parameters()):
                placed = DTensor.from_local(local, mesh["ep"], [Shard(0)], run_check=False)
                setattr(experts, name, nn.Parameter(placed))
        within = _within_experts(mesh["efsdp"].size())
        fully_shard(experts, mesh=mesh["efsdp"], mp_policy=policy, shard_placement_fn=within)
        fully_shard(block, mesh=everyone, mp_policy=policy)
    if not model.config.tied:  # else both stay with the root: a weight belongs to one group
        fully_shard(model.embed, mesh=everyone, mp_policy=policy)
        fully_shard(model.head, mesh=everyone, mp_policy=policy)
        for method in ("cross_entropy", "logits"):  # the weights are gathered for these as for a call
            register_fsdp_forward_method(model.head, method)
    fully_shard(model, mesh=everyone, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided once, by what all ranks have: gradients are sums. gloo knows no sum with a factor.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _within_experts(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """Cut (E, rows, columns) within each expert if its rows divide: by experts, FSDP2's default, ranks beyond the
    number of experts would get none.
    """
    return lambda parameter: Shard(1) if parameter.shape[1] % ranks == 0 else None


def reshard(model: LM) -> None:
    """Let go of weights that a forward without a backward has left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class Replica:
    """A whole copy of a sharded model on every rank, in the dtype that it computes in, to sample from without a
    collective a token. What takes its place is a rollout engine that gets the same tensors.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        with torch.device("meta"):
            model = LM(config)
        self.model = model.to(compute_dtype(device)).to_empty(device=device).requires_grad_(False)
        self.model.tie()

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor]) -> LM:
        """Take up the weights, gathered one by one; the copy. A collective call."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(whole(weights[name]))
        return self.model
