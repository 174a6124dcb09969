"""The ops: schemas, fakes, autograd and the choice of a backend. Importing this registers them with torch."""

from fusedce.ops import (
    linear_argmax,
    linear_ce,
    linear_logprob,
    linear_logprob_of,
    linear_sparse,
    loss,
    main_grad,
    moe,
    moe_route,
    schema,
)
from fusedce.ops.registry import Choice, choose, explain

__all__ = [
    "Choice",
    "choose",
    "explain",
    "linear_argmax",
    "linear_ce",
    "linear_logprob",
    "linear_logprob_of",
    "linear_sparse",
    "loss",
    "main_grad",
    "moe",
    "moe_route",
    "schema",
]
