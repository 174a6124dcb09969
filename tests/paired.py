"""The one tolerance of the tests, which is `fusedce verify`'s: fusedce/verify/tolerance.py. Here it asserts, and bites.

gold: the result in fp64 on the same rounded inputs. twin: plain torch in the test dtype. out: ours.
"""

import torch
from torch import Tensor

from fusedce.verify.tolerance import row_rms, twin_of_sum, violation, worst_twin

__all__ = ["assert_bites", "assert_close", "twin_of_sum", "violation", "worst_twin"]


def assert_close(out: Tensor, gold: Tensor, twin: Tensor, name: str = "result") -> None:
    """Fail unless `out` keeps the rule."""
    broken = violation(out, gold, twin)
    assert broken is None, f"{name}: {broken}"


def assert_bites(gold: Tensor, twin: Tensor, name: str = "result") -> None:
    """Fail unless the rule would catch: a result of zeros, one wrong row, a dropped tail, everything moved by one
    row."""
    good = gold.to(twin.dtype)
    assert_close(good, gold, twin, f"{name} (gold itself)")
    for what, bad in _spoiled(good):
        if not torch.equal(bad, good):
            assert violation(bad, gold, twin) is not None, f"{name}: the tolerance lets through {what}"


def _spoiled(good: Tensor) -> list[tuple[str, Tensor]]:
    wrong_row, no_tail = good.clone(), good.clone()
    wrong_row[row_rms(good.double()).argmax() if good.dim() > 1 else good.abs().argmax()] *= -1
    no_tail[-max(good.shape[0] // 8, 1) :] = 0
    return [
        ("zeros", torch.zeros_like(good)),
        ("one wrong row", wrong_row),
        ("a dropped tail", no_tail),
        ("rows moved by one", good.roll(1, 0)),
    ]
