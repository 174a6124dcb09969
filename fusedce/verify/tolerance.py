"""The one tolerance, of `fusedce verify` and of the tests: at most twice the error of plain torch in the same dtype
(FlashAttention's rule).

gold: the result in fp64 on the same rounded inputs. twin: plain torch in the dtype under test. out: ours.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SLACK = 2.0
ROW_SLACK = 3.0  # for the RMS of one row, which is one draw of the rounding where the largest of all is none


class Margin(NamedTuple):
    """How much of the bar a result's error takes, 1 at the bar and inf where no error can be told; what it breaks."""

    ratio: float
    broken: str | None


def row_rms(x: Tensor) -> Tensor:
    """The root mean square of every row; of all of a vector."""
    return x.reshape(x.shape[0] if x.dim() > 1 else 1, -1).square().mean(1).sqrt()


def margin(out: Tensor, gold: Tensor, twin: Tensor) -> Margin:
    """The rule, applied.

    max|out − gold| ≤ 2·max|twin − gold| + 2 ulp·max|gold|, and the same, times 3 in place of 2, with the RMS of
    every row. A row that the twin hits by luck is no standard: its error counts as at least the twin's largest relative
    row error; and a row that is small by cancellation carries the rounding of what cancelled: its ulp is at least the
    median row's. NaN and infinities must be exactly where gold has them.
    """
    if out.shape != gold.shape:
        return Margin(torch.inf, f"shape {tuple(out.shape)}, expected {tuple(gold.shape)}")
    if gold.numel() == 0:
        return Margin(0.0, None)
    out64, twin64, gold = (x.detach().double().cpu() for x in (out, twin, gold))
    if not torch.equal(out64.isnan(), gold.isnan()):
        return Margin(torch.inf, f"{int(out64.isnan().sum())} NaN, expected {int(gold.isnan().sum())}")
    if not torch.equal(torch.where(gold.isinf(), out64, 0.0), torch.where(gold.isinf(), gold, 0.0)):
        return Margin(torch.inf, "infinities that differ")
    out64, twin64, gold = (torch.where(gold.isfinite(), x, 0.0) for x in (out64, twin64, gold))
    ulp = torch.finfo(out.dtype).eps
    error, bar = (out64 - gold).abs().amax(), SLACK * ((twin64 - gold).abs().amax() + ulp * gold.abs().amax())
    size, errors, twin_errors = row_rms(gold), row_rms(out64 - gold), row_rms(twin64 - gold)
    usual = torch.where(size > 0, twin_errors / size, 0.0).amax()
    bars = ROW_SLACK * (twin_errors.maximum(usual * size) + ulp * size.maximum(size.median()))
    ratio = max(_share(error, bar), _share(errors, bars))
    if error > bar:
        return Margin(ratio, f"largest error {error:.3e}, allowed {bar:.3e} (largest value {gold.abs().amax():.3e})")
    worst = int((errors - bars).argmax())
    if errors[worst] > bars[worst]:
        return Margin(ratio, f"row {worst}: RMS error {errors[worst]:.3e}, allowed {bars[worst]:.3e}")
    return Margin(ratio, None)


def _share(errors: Tensor, bars: Tensor) -> float:
    """The largest error over its bar; where the bar is 0, an error of 0 takes none of it."""
    return float(torch.where(errors > 0, errors / bars, 0.0).amax())


def violation(out: Tensor, gold: Tensor, twin: Tensor) -> str | None:
    """None if `out` keeps the rule, else what it breaks."""
    return margin(out, gold, twin).broken


def twin_of_sum(gold: Tensor, errors: Tensor) -> Tensor:
    """The twin of a sum over tokens: off by the root sum of squares of the twin's errors, which may cancel by luck.

    gold: (), the sum. errors: (N,) in fp64, what the twin's tokens are off by.
    """
    return gold + errors.square().sum().sqrt()


def worst_twin(tries: list[Tensor], gold: Tensor) -> Tensor:
    """A twin of several results of plain torch: of each element the one that is furthest off."""
    drawn, exact = torch.stack(tries), gold.to(tries[0].device)
    at = (drawn.double() - exact).abs().nan_to_num().argmax(0, keepdim=True)
    return drawn.gather(0, at)[0]
