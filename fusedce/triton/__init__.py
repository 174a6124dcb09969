"""The Triton backend: one function per op, with the signatures of `fusedce.eager`."""

from fusedce.triton.linear_ce import linear_logprob, linear_logprob_backward

__all__ = ["linear_logprob", "linear_logprob_backward"]
