"""The largest logit's word in plain torch, a chunk of rows at a time."""

import torch
from torch import Tensor

from fusedce.eager.linear_ce import _accumulate_dtype, _chunks, _raw_logits
from fusedce.options import LogitOptions


def linear_argmax(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(N,) int64: the lowest id among a row's largest logits; −1 for a row with NaN or +inf."""
    words, dtype = hidden.new_empty(hidden.shape[0], dtype=torch.int64), _accumulate_dtype(hidden)
    for start, stop in _chunks(hidden, weight, dtype):
        raw, _ = _raw_logits(hidden[start:stop], weight, bias, LogitOptions(), dtype)
        words[start:stop] = torch.where((raw < torch.inf).all(1), raw.argmax(1), -1)
    return words
