"""The functions users call: each checks its arguments, flattens, and makes one op call."""

from fusedce.functional.argmax import linear_argmax
from fusedce.functional.heads import HeadsLoss, linear_cross_entropy_heads
from fusedce.functional.linear_ce import LogProb, linear_cross_entropy, linear_logprob
from fusedce.functional.logprob_of import linear_logprob_of
from fusedce.functional.moe import moe_combine, moe_dispatch, moe_experts
from fusedce.functional.moe_balance import (
    load_balance_loss,
    moe_balance,
    router_z_loss,
    sequence_balance_loss,
    update_correction,
)
from fusedce.functional.moe_route import (
    Routing,
    moe_plan,
    moe_plan_chunks,
    moe_rank_index,
    moe_replay,
    moe_route,
)
from fusedce.functional.policy_loss import linear_policy_loss

__all__ = [
    "HeadsLoss",
    "LogProb",
    "Routing",
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
    "router_z_loss",
    "sequence_balance_loss",
    "update_correction",
]
