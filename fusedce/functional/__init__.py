"""The functions users call: each checks its arguments, flattens, and makes one op call."""

from fusedce.functional.linear_ce import LogProb, linear_cross_entropy, linear_logprob
from fusedce.functional.moe import Routing, moe_combine, moe_dispatch, moe_experts, moe_plan, moe_route

__all__ = [
    "LogProb",
    "Routing",
    "linear_cross_entropy",
    "linear_logprob",
    "moe_combine",
    "moe_dispatch",
    "moe_experts",
    "moe_plan",
    "moe_route",
]
