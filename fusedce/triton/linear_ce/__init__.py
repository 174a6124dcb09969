"""Linear cross-entropy in Triton: `forward` (logits tile, online log-sum-exp), `finish` (merge), `d_logits`
(gradient)."""

from fusedce.triton.linear_ce.backward import linear_logprob_backward
from fusedce.triton.linear_ce.forward import linear_logprob

__all__ = ["linear_logprob", "linear_logprob_backward"]
