"""Linear cross-entropy in Triton. `logits` is one tile of logits; three kernels end it differently: `forward` (sums for
the log-prob), `seeded` (exponentials, for the loss with its gradients in one pass), `backward` (gradient of given
upstream). The others work on rows."""

from fusedce.triton.linear_ce.argmax import linear_argmax
from fusedce.triton.linear_ce.backward import linear_logprob_backward
from fusedce.triton.linear_ce.forward import linear_logprob
from fusedce.triton.linear_ce.fused import linear_fused
from fusedce.triton.linear_ce.parts import linear_parts
from fusedce.triton.linear_ce.scale import linear_ce_sum_backward
from fusedce.triton.linear_ce.selected import linear_logprob_of, linear_logprob_of_backward

__all__ = [
    "linear_argmax",
    "linear_ce_sum_backward",
    "linear_fused",
    "linear_logprob",
    "linear_logprob_backward",
    "linear_logprob_of",
    "linear_logprob_of_backward",
    "linear_parts",
]
