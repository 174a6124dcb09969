"""The gated activations of the experts and their slopes, by name.

swiglu      silu(gate) · up
geglu       gelu(gate) · up, gelu(x) = x · Φ(x)
geglu_tanh  the same by gelu's tanh approximation
gpt_oss     (u + 1) · g · sigmoid(1.702 · g), g = min(gate, limit), u = up within ±limit
"""

import math

import torch
from torch import Tensor

ALPHA = 1.702


def gated(gate: Tensor, up: Tensor, activation: str, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """act, ∂act/∂gate and ∂act/∂up, each of gate's shape and dtype. At the limit itself the slope is that inside."""
    if activation == "gpt_oss":
        bound_gate, bound_up = gate.clamp(max=limit), up.clamp(-limit, limit)
        share = (ALPHA * bound_gate).sigmoid()
        glu = bound_gate * share
        by_gate = (bound_up + 1) * (share + ALPHA * glu * (1 - share))
        by_gate, by_up = torch.where(gate > limit, 0, by_gate), torch.where(up.abs() > limit, 0, glu)
        return (bound_up + 1) * glu, by_gate, by_up
    bent, slope = _bent(gate, activation)
    return bent * up, slope * up, bent


def _bent(gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The nonlinearity of gate, and its slope."""
    if activation == "swiglu":
        share = gate.sigmoid()
        return gate * share, share + gate * share * (1 - share)
    if activation == "geglu":
        share = 0.5 + 0.5 * (gate * math.sqrt(0.5)).erf()
        return gate * share, share + gate * (-0.5 * gate * gate).exp() / math.sqrt(2 * math.pi)
    # 0.5·(1 + tanh(y)) is sigmoid(2y)
    twice, square = 2 * math.sqrt(2 / math.pi), gate * gate
    share = (gate * twice * (1 + 0.044715 * square)).sigmoid()
    return gate * share, share + gate * share * (1 - share) * twice * (1 + 3 * 0.044715 * square)
