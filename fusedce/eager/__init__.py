"""The plain-torch twin of every op: the CPU implementation, the gold of the tests in fp64, a baseline of the
benchmarks."""

from fusedce.eager.argmax import linear_argmax
from fusedce.eager.linear_ce import (
    linear_ce_sum_backward,
    linear_fused,
    linear_logprob,
    linear_logprob_backward,
    linear_parts,
)
from fusedce.eager.linear_sparse import linear_logprob_sparse, linear_logprob_sparse_backward
from fusedce.eager.moe import (
    moe_combine,
    moe_dispatch,
    moe_experts,
    moe_experts_backward,
    moe_experts_backward_into,
)
from fusedce.eager.moe_route import (
    moe_balance,
    moe_balance_backward,
    moe_plan,
    moe_plan_chunks,
    moe_replay,
    moe_route,
    moe_route_backward,
)
from fusedce.eager.selected import linear_logprob_of, linear_logprob_of_backward
from fusedce.outside import first_outside

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
