"""The gated activations of the experts, in registers: values and both slopes."""

import triton
import triton.language as tl

from fusedce.triton.common import sigmoid


@triton.jit
def gated(gate, up, limit, KIND: tl.constexpr, IS_FP32: tl.constexpr):
    """act, ∂act/∂gate and ∂act/∂up in fp32. See `fusedce.eager.activation` for the formulas."""
    if KIND == "gpt_oss":
        # Not minimum: NaN must come out as NaN.
        bound_gate = tl.where(gate > limit, limit, gate)
        bound_up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        share = _sigmoid(1.702 * bound_gate, IS_FP32)
        glu = bound_gate * share
        act = (bound_up + 1.0) * glu
        by_gate = (bound_up + 1.0) * (share + 1.702 * glu * (1.0 - share))
        by_gate = tl.where(gate > limit, 0.0, by_gate)
        by_up = tl.where((up > limit) | (up < -limit), 0.0, glu)
    else:
        if KIND == "swiglu":
            share = _sigmoid(gate, IS_FP32)
            bent = gate * share
            slope = share + bent * (1.0 - share)
        elif KIND == "geglu":
            share = 0.5 + 0.5 * tl.math.erf(0.7071067811865476 * gate)
            bent = gate * share
            slope = share + gate * (0.3989422804014327 * tl.exp(-0.5 * gate * gate))
        else:
            # 0.5·(1 + tanh(y)) is sigmoid(2y)
            square = gate * gate
            share = _sigmoid(gate * (1.5957691216057308 + 0.07135481627260025 * square), IS_FP32)
            bent = gate * share
            slope = share + bent * (1.0 - share) * (1.5957691216057308 + 0.21406444881780076 * square)
        act = bent * up
        by_gate = slope * up
        by_up = bent
    return act, by_gate, by_up


@triton.jit
def _sigmoid(x, IS_FP32: tl.constexpr):
    """1 / (1 + e^−x): as IEEE has it where the result stays fp32; where it is rounded to 16 bits, by the fast division,
    whose two units in the last place of fp32 are lost."""
    return sigmoid(x) if IS_FP32 else 1.0 / (1.0 + tl.exp(-x))
