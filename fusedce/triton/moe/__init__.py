"""Mixture of experts in Triton: routing, the plan, moving rows, and the experts' grouped GEMMs."""

from fusedce.triton.moe.balance import moe_balance
from fusedce.triton.moe.balance_backward import moe_balance_backward
from fusedce.triton.moe.combine import moe_combine
from fusedce.triton.moe.dispatch import moe_dispatch
from fusedce.triton.moe.experts import moe_experts, moe_experts_backward, moe_experts_backward_into
from fusedce.triton.moe.plan import moe_plan, moe_plan_chunks
from fusedce.triton.moe.replay import moe_replay
from fusedce.triton.moe.route import moe_route
from fusedce.triton.moe.route_backward import moe_route_backward

__all__ = [
    "moe_balance",
    "moe_balance_backward",
    "moe_combine",
    "moe_dispatch",
    "moe_experts",
    "moe_experts_backward",
    "moe_experts_backward_into",
    "moe_plan",
    "moe_plan_chunks",
    "moe_replay",
    "moe_route",
    "moe_route_backward",
]
