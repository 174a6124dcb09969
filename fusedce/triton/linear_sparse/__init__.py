"""The backward of linear cross-entropy that leaves out what does not count: rows without a gradient (`dense`, the
products over the others) and, within a budget, words without probability (`sparse`)."""

from fusedce.triton.linear_sparse.backward import linear_logprob_sparse_backward
from fusedce.triton.linear_sparse.forward import linear_logprob_sparse

__all__ = ["linear_logprob_sparse", "linear_logprob_sparse_backward"]
