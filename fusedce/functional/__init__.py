"""The functions users call: each checks its arguments, flattens, and makes one op call."""

from fusedce.functional.argmax import linear_argmax
from fusedce.functional.linear_ce import LogProb, linear_cross_entropy, linear_logprob
from fusedce.functional.logprob_of import linear_logprob_of
from fusedce.functional.moe import Routing, moe_combine, moe_dispatch, moe_experts, moe_plan, moe_route
from fusedce.functional.policy_loss import linear_policy_loss

__all__ = [
    "LogProb",
    "Routing",
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
]
