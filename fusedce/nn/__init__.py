"""Drop-in modules over the functions of fusedce."""

from fusedce.nn.linear_ce import LinearCrossEntropyLoss
from fusedce.nn.lm_head import FusedLMHead
from fusedce.nn.moe import MoE
from fusedce.nn.router import Router, take_balances

__all__ = ["FusedLMHead", "LinearCrossEntropyLoss", "MoE", "Router", "take_balances"]
