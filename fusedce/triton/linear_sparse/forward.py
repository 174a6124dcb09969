"""The forward of the sparse backward: the log-prob's, and what each tile of words has of each row's probability."""

import torch
from torch import Tensor

from fusedce import budget
from fusedce.options import LogitOptions
from fusedce.triton.linear_ce.forward import results_and_mass


def linear_logprob_sparse(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    with_entropy: bool,
    gradient_budget: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logprob, entropy, lse (N,), normalizer (N, 2), fp32, and mass (tiles, N) bf16, (0, 0) without a budget."""
    shape = (budget.num_tiles(weight.shape[0]), hidden.shape[0]) if gradient_budget else (0, 0)
    mass = hidden.new_empty(shape, dtype=torch.bfloat16)
    results = results_and_mass(hidden, weight, target, bias, options, with_entropy, mass if gradient_budget else None)
    return *results, mass
