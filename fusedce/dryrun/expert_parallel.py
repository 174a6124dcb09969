"""The expert layer of one rank among several: its share of the experts, and the exchange with the others.

A plain form, for memory and not for speed: rows sorted by expert, an all-to-all, the experts, an all-to-all back, the
weighted sum. Every rank sends and gets as many rows as if the router were even; nobody reads the values.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.utils.checkpoint import checkpoint

from fusedce.functional import moe_combine, moe_dispatch, moe_experts, moe_plan
from fusedce.nn import Router


class LocalExperts(nn.Module):
    """The experts that live here: gate_up_proj (E/EP, 2F, D), down_proj (E/EP, D, F)."""

    def __init__(self, num_local: int, ffn_size: int, hidden_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_local, 2 * ffn_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_local, hidden_size, ffn_size))

    def forward(self, rows: Tensor, weights: Tensor, expert: Tensor) -> Tensor:
        """rows (R, D) of experts (R, 1), times weights (R, 1), in the order they came."""
        plan = moe_plan(expert, self.down_proj.shape[0])
        return moe_combine(moe_experts(rows, self.gate_up_proj, self.down_proj, weights, plan), plan)


class ExpertParallelMoE(nn.Module):
    """`fusedce.nn.MoE` with the experts spread over a group. forward: hidden (..., D) -> (..., D).

    chunks: how many parts the tokens go through one after the other; above 1 a part keeps only its tokens for the
    backward, and is dispatched again there.
    """

    def __init__(
        self, hidden_size: int, ffn_size: int, num_experts: int, top_k: int, chunks: int, group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self.group, self.chunks, self.num_experts = group, chunks, num_experts
        self.router = Router(hidden_size, num_experts, top_k)
        self.experts = LocalExperts(num_experts // group.size(), ffn_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        if self.chunks == 1:
            return self._part(flat).reshape(hidden.shape)
        parts = [
            checkpoint(self._part, part, use_reentrant=False, preserve_rng_state=False)
            for part in flat.chunk(self.chunks)
        ]
        return torch.cat(parts).reshape(hidden.shape)

    def _part(self, hidden: Tensor) -> Tensor:
        weights, index = self.router(hidden)
        if self.group.size() == 1:
            plan = moe_plan(index, self.num_experts)
            experts = self.experts
            return moe_combine(moe_experts(hidden, experts.gate_up_proj, experts.down_proj, weights, plan), plan)
        plan = moe_plan(index, self.num_experts)
        slots = plan.row_slot.long()
        expert = index.reshape(-1)[slots] % self.experts.down_proj.shape[0]
        rows = self._exchange(moe_dispatch(hidden, plan))
        sent_weights = self._exchange(weights.reshape(-1, 1)[slots])
        out = self.experts(rows, sent_weights, self._exchange(expert[:, None]))
        return moe_combine(self._exchange(out), plan)

    def _exchange(self, rows: Tensor) -> Tensor:
        share = [rows.shape[0] // self.group.size()] * self.group.size()
        return all_to_all_single_autograd(rows, share, share, self.group)
