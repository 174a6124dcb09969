"""The Triton backend: one function per op, with the signatures of `fusedce.eager`."""

from fusedce.triton.linear_ce import (
    linear_argmax,
    linear_ce_sum_backward,
    linear_fused,
    linear_logprob,
    linear_logprob_backward,
    linear_logprob_of,
    linear_logprob_of_backward,
    linear_parts,
)
from fusedce.triton.linear_sparse import linear_logprob_sparse, linear_logprob_sparse_backward
from fusedce.triton.moe import (
    moe_balance,
    moe_balance_backward,
    moe_combine,
    moe_dispatch,
    moe_experts,
    moe_experts_backward,
    moe_experts_backward_into,
    moe_plan,
    moe_plan_chunks,
    moe_replay,
    moe_route,
    moe_route_backward,
)
from fusedce.triton.outside import first_outside

__all__ = [
    "first_outside",
    "linear_argmax",
    "linear_ce_sum_backward",
    "linear_fused",
    "linear_logprob",
    "linear_logprob_backward",
    "linear_logprob_of",
    "linear_logprob_of_backward",
    "linear_logprob_sparse",
    "linear_logprob_sparse_backward",
    "linear_parts",
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
