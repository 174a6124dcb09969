"""The one tolerance of the tests: at most twice the error of plain torch in the same dtype (FlashAttention's rule).

gold: the result in fp64 on the same rounded inputs. twin: plain torch in the test dtype. out: ours.
"""

import torch
from torch import Tensor

SLACK = 2.0
ROW_SLACK = 3.0  # for the RMS of one row, which is one draw of the rounding where the largest of all is none


def _row_rms(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0] if x.dim() > 1 else 1, -1).square().mean(1).sqrt()


def violation(out: Tensor, gold: Tensor, twin: Tensor) -> str | None:
    """None if `out` keeps the rule, else what it breaks.

    max|out − gold| ≤ 2·max|twin − gold| + 2 ulp·max|gold|, and the same, times 3 in place of 2, with the RMS of
    every row. A row that the twin hits
    by luck is no standard: its error counts as at least the twin's largest relative row error; and a row that is small
    by cancellation carries the rounding of what cancelled: its ulp is at least the median row's. NaN and infinities
    must be exactly where gold has them.
    """
    if out.shape != gold.shape:
        return f"shape {tuple(out.shape)}, expected {tuple(gold.shape)}"
    if gold.numel() == 0:
        return None
    out64, twin64, gold = (x.detach().double().cpu() for x in (out, twin, gold))
    if not torch.equal(out64.isnan(), gold.isnan()):
        return f"{int(out64.isnan().sum())} NaN, expected {int(gold.isnan().sum())}"
    if not torch.equal(torch.where(gold.isinf(), out64, 0.0), torch.where(gold.isinf(), gold, 0.0)):
        return "infinities that differ"
    out64, twin64, gold = (torch.where(gold.isfinite(), x, 0.0) for x in (out64, twin64, gold))
    ulp = torch.finfo(out.dtype).eps
    error, bar = (out64 - gold).abs().amax(), SLACK * ((twin64 - gold).abs().amax() + ulp * gold.abs().amax())
    if error > bar:
        return f"largest error {error:.3e}, allowed {bar:.3e} (largest value {gold.abs().amax():.3e})"
    size, errors, twin_errors = _row_rms(gold), _row_rms(out64 - gold), _row_rms(twin64 - gold)
    usual = torch.where(size > 0, twin_errors / size, 0.0).amax()
    bars = ROW_SLACK * (twin_errors.maximum(usual * size) + ulp * size.maximum(size.median()))
    worst = int((errors - bars).argmax())
    if errors[worst] > bars[worst]:
        return f"row {worst}: RMS error {errors[worst]:.3e}, allowed {bars[worst]:.3e}"
    return None


def assert_close(out: Tensor, gold: Tensor, twin: Tensor, name: str = "result") -> None:
    """Fail unless `out` keeps the rule."""
    broken = violation(out, gold, twin)
    assert broken is None, f"{name}: {broken}"


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
    wrong_row[_row_rms(good.double()).argmax() if good.dim() > 1 else good.abs().argmax()] *= -1
    no_tail[-max(good.shape[0] // 8, 1) :] = 0
    return [
        ("zeros", torch.zeros_like(good)),
        ("one wrong row", wrong_row),
        ("a dropped tail", no_tail),
        ("rows moved by one", good.roll(1, 0)),
    ]
