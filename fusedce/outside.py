"""The search for a label or expert id that is none, in plain torch."""

import torch
from torch import Tensor


def first_outside(values: Tensor, size: int, ignore: int | None, seen: Tensor) -> None:
    """Write the first row of `values` (N,) int64, N > 0, that is neither in [0, size) nor `ignore`, and its value, into
    seen (2,) int64, unless a row was seen before. No sync.
    """
    bad = (values < 0) | (values >= size)
    if ignore is not None:
        bad &= values != ignore
    num_rows = values.shape[0]
    rows = torch.arange(num_rows, device=values.device)
    first = torch.where(bad, rows, num_rows).min()
    # gather, not values[first]: indexing by a tensor of no dimension reads it on the host
    value = values.gather(0, first.clamp(max=num_rows - 1).reshape(1))
    found = torch.cat((first.reshape(1), value))
    seen.copy_(torch.where((first < num_rows) & (seen[0] < 0), found, seen))
