"""Drop-in modules over the functions of fusedce."""

from fusedce.nn.linear_ce import LinearCrossEntropyLoss
from fusedce.nn.moe import MoE, Router

__all__ = ["LinearCrossEntropyLoss", "MoE", "Router"]
