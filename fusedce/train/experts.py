"""The expert layer of a block: `fusedce.distributed.ExpertParallelMoE`, or where one rank has all experts, `LocalMoE`.

Both have the modules `router` and `experts` with parameters of the same names, so that a checkpoint fits any EP.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusedce.distributed import ExpertParallelMoE
from fusedce.distributed.kept_plans import kept_plans
from fusedce.functional import Routing, moe_experts, moe_plan
from fusedce.nn import Router
from fusedce.options import ExpertOptions
from fusedce.train.config import ModelConfig


def expert_layer(config: ModelConfig, group: dist.ProcessGroup | None) -> "ExpertParallelMoE | LocalMoE":
    """The layer of `config`, its experts on the ranks of `group`, or all here for None."""
    if group is None:
        return LocalMoE(config)
    moe = ExpertParallelMoE(
        config.hidden_size, config.ffn_size, config.num_experts, config.top_k, group=group,
        num_chunks=config.moe_chunks, backend=config.backend, renormalize=config.renormalize,
    )  # fmt: skip
    moe.experts.settings = ExpertOptions(save=config.moe_save)
    return moe


class LocalMoE(nn.Module):
    """All experts on this rank; hidden (..., D) -> (..., D). Inside `keep_plans` a recompute does not route again."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(
            config.hidden_size, config.num_experts, config.top_k, backend=config.backend, renormalize=config.renormalize
        )
        self.experts = Experts(config)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        kept = kept_plans()
        index = kept.take() if kept is not None and kept.recomputing else None
        routing = self.router(flat, index)
        if kept is not None and index is None:
            kept.add(routing.top_k_index)
        return self.experts(flat, routing).reshape(hidden.shape)


class Experts(nn.Module):
    """gate_up_proj (E, 2F, D) and down_proj (E, D, F): a module of its own, so that FSDP can shard it differently.

    The tokens go through in moe_chunks parts, one after the other: the backward holds the rows of one part at a time.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        E, D, F = config.num_experts, config.hidden_size, config.ffn_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * F, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, F))

    def forward(self, flat: Tensor, routing: Routing) -> Tensor:
        """(N, D) of flat (N, D)."""
        config = self.config
        size = max(-(-len(flat) // config.moe_chunks), 1)
        parts = []
        for start in range(0, max(len(flat), 1), size):  # once without tokens: the weights get gradients of 0
            rows = slice(start, start + size)
            plan = moe_plan(routing.top_k_index[rows], config.num_experts, backend=config.backend)
            out = moe_experts(
                flat[rows], self.gate_up_proj, self.down_proj, routing.top_k_weights[rows], plan,
                save=config.moe_save, combine=True, backend=config.backend,
            )  # fmt: skip
            parts.append(out)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
