"""Kernels for long-sequence mixture-of-experts RL training, as PyTorch ops. Importing registers
`torch.ops.fusedce.*`."""

from fusedce import nn, ops
from fusedce.flags import check_flags
from fusedce.functional import (
    HeadsLoss,
    LogProb,
    Routing,
    linear_argmax,
    linear_cross_entropy,
    linear_cross_entropy_heads,
    linear_logprob,
    linear_logprob_of,
    linear_policy_loss,
    load_balance_loss,
    moe_balance,
    moe_combine,
    moe_dispatch,
    moe_experts,
    moe_plan,
    moe_plan_chunks,
    moe_rank_index,
    moe_replay,
    moe_route,
    router_z_loss,
    sequence_balance_loss,
    update_correction,
)
from fusedce.ops import explain
from fusedce.options import MoEChunks, MoEPlan, RouterBalance
from fusedce.version import __version__

__all__ = [
    "HeadsLoss",
    "LogProb",
    "MoEChunks",
    "MoEPlan",
    "RouterBalance",
    "Routing",
    "__version__",
    "check_flags",
    "explain",
    "linear_argmax",
    "linear_cross_entropy",
    "linear_cross_entropy_heads",
    "linear_logprob",
    "linear_logprob_of",
    "linear_policy_loss",
    "load_balance_loss",
    "moe_balance",
    "moe_combine",
    "moe_dispatch",
    "moe_experts",
    "moe_plan",
    "moe_plan_chunks",
    "moe_rank_index",
    "moe_replay",
    "moe_route",
    "nn",
    "ops",
    "router_z_loss",
    "sequence_balance_loss",
    "update_correction",
]
