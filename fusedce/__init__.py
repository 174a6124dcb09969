"""Kernels for long-sequence mixture-of-experts RL training, as PyTorch ops. Importing registers
`torch.ops.fusedce.*`."""

from fusedce import nn, ops
from fusedce.flags import check_flags
from fusedce.functional import (
    LogProb,
    Routing,
    linear_argmax,
    linear_cross_entropy,
    linear_logprob,
    linear_logprob_of,
    linear_policy_loss,
    moe_combine,
    moe_dispatch,
    moe_experts,
    moe_plan,
    moe_route,
)
from fusedce.ops import explain
from fusedce.options import MoEPlan
from fusedce.version import __version__

__all__ = [
    "LogProb",
    "MoEPlan",
    "Routing",
    "__version__",
    "check_flags",
    "explain",
    "linear_argmax",
    "linear_cross_entropy",
    "linear_logprob",
    "linear_logprob_of",
    "linear_policy_loss",
    "moe_combine",
    "moe_dispatch",
    "moe_experts",
    "moe_plan",
    "moe_route",
    "nn",
    "ops",
]
