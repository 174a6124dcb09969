"""The native backend: kernels of csrc/, one C++ source for nvcc and HIP, between GEMMs of the vendor library.

Its public name is "native"; the folder is called after HIP, which the sources keep to.
"""

from fusedce.hip.extension import build_info, has_hopper, unavailable
from fusedce.hip.linear_ce import (
    linear_ce_sum_backward,
    linear_fused,
    linear_logprob,
    linear_logprob_backward,
    linear_parts,
)
from fusedce.hip.words import linear_argmax, linear_logprob_of, linear_logprob_of_backward
from fusedce.outside import first_outside

__all__ = [
    "first_outside",
    "has_hopper",
    "build_info",
    "linear_argmax",
    "linear_ce_sum_backward",
    "linear_fused",
    "linear_logprob",
    "linear_logprob_backward",
    "linear_logprob_of",
    "linear_logprob_of_backward",
    "linear_parts",
    "unavailable",
]
