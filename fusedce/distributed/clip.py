"""The gradient norm of a model whose parameters lie on meshes of several kinds, each counted once."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce import checks
from fusedce.distributed.collectives import local_part

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    experts: Iterable[Tensor] = (),
    group: dist.ProcessGroup | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that their common 2-norm is at most max_norm: the norm that one rank would have.

    A collective call of all ranks. torch's own takes parameters of one mesh, and knows nothing of experts that differ
    from rank to rank without being DTensors over those ranks.

    Args:
        parameters: those that every rank of `group` has alike, plain or DTensors, sharded over any mesh (FSDP) or
            replicated; with plain ones, their gradients are the same on every rank already.
        max_norm: above 0.
        experts: those of which each rank of `group` has its own, such as those of `ExpertParallelMoE.experts`, plain or
            DTensors over the ranks that have the same ones.
        group: the experts' ranks; None for all.
        error_if_nonfinite: raise RuntimeError, on every rank alike and before any gradient changes, where the norm is
            NaN or infinite. The host waits for it.

    Returns:
        The norm before scaling, () fp32, the same bits on every rank; squares are summed in fp32 (fp64 for fp64
        gradients).

    Raises:
        TypeError, ValueError: max_norm is no number above 0; a gradient's placement is a sum that is still to be made.
        RuntimeError: with error_if_nonfinite, see there.

    Memory: a copy in fp32 of one gradient at a time.
    """
    checks.positive_number("clip_grad_norm_", "max_norm", max_norm)
    common, own = list(parameters), list(experts)
    square = _sum_of_squares(common)
    if own:
        square_of_experts = _sum_of_squares(own)
        # also from a rank whose experts have no gradient: the others wait for it
        dist.all_reduce(square_of_experts, group=group)
        square = square.to(square_of_experts.device) + square_of_experts
    norm = square.sqrt()
    if error_if_nonfinite and not math.isfinite(float(norm)):
        raise RuntimeError(f"fusedce.clip_grad_norm_: the gradients' norm is {float(norm)}")
    # A norm of NaN goes into every gradient, so that nothing plausible is left.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in (*common, *own):
        if parameter.grad is not None:
            grad = local_part(parameter.grad)
            grad.mul_(scale.to(grad))
    return norm


def _sum_of_squares(parameters: list[Tensor]) -> Tensor:
    """() over whole gradients: parts of those that are sharded are summed over their mesh, replicas counted once."""
    squares: dict[tuple[Any, tuple[int, ...]], Tensor] = {}
    total = torch.zeros((), device=local_part(parameters[0]).device if parameters else None)
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        part = local_part(grad)
        square = part.to(torch.float64 if part.dtype == torch.float64 else torch.float32).square().sum()
        if not checks.is_distributed(grad):
            total = total + square
            continue
        placements = grad.placements  # type: ignore[attr-defined]
        if any(placement.is_partial() for placement in placements):
            raise ValueError(f"fusedce.clip_grad_norm_: a gradient is placed {placements}; reduce it first")
        mesh = grad.device_mesh  # type: ignore[attr-defined]
        # What is no replica is a part: FSDP's part of a part (_StridedShard) does not call itself a shard.
        key = (mesh, tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate()))
        squares[key] = squares.get(key, torch.zeros_like(square)) + square
    for (mesh, dims), square in squares.items():
        for dim in dims:
            dist.all_reduce(square, group=mesh.get_group(dim))
        total = total + square
    return total
