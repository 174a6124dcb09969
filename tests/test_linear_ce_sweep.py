"""Every option of the loss and of the log-prob at every size around the edges of tiles, vectors and warps.

Small problems, many of them: on a CPU all run at once, on a GPU most compile kernels of their own, so there they are
of the long tests.
"""

import itertools

import pytest
from torch import Tensor

from tests.conftest import Place
from tests.linear_ce_cases import Case
from tests.test_linear_ce import check as check_log_probs
from tests.test_linear_ce_loss import BF16, FP16, FP32, Loss
from tests.test_linear_ce_loss import OPTIONS as LOSSES
from tests.test_linear_ce_loss import check as check_loss

# N even, for the built-in shift of two sequences, and 4 at least, so that one has a next token. D and V on both sides
# of 8, 16, 32, 64, 128 and 256, and odd ones.
SHAPES = [
    (4, 2, 1), (4, 3, 16), (4, 40, 7), (4, 15, 9), (4, 16, 8), (6, 17, 15), (6, 31, 17), (8, 32, 31), (8, 33, 32),
    (10, 47, 33), (12, 63, 47), (14, 64, 63), (16, 65, 64), (18, 96, 65), (30, 97, 96), (32, 127, 97), (34, 128, 40),
    (62, 129, 24), (64, 192, 20), (66, 255, 12), (96, 256, 10), (126, 257, 6), (128, 300, 5), (130, 384, 4),
    (254, 70, 3), (256, 41, 2), (258, 513, 3), (384, 26, 11),
]  # fmt: skip
DTYPES = (FP32, BF16, FP16)
HEADS = [
    {},
    {"has_bias": True},
    {"temperature": 0.6},
    {"softcap": 2.0},
    {"every_ignored": 0},
    {"every_ignored": 2},
    {"has_bias": True, "temperature": 1.7, "softcap": 3.0, "every_ignored": 3},
]
REDUCTIONS = itertools.cycle(("mean", "none", "sum"))
ON_GPU = [
    pytest.param(Place("cuda", backend), marks=[pytest.mark.gpu, pytest.mark.slow], id=f"{backend}-cuda")
    for backend in ("triton", "native")
]
PLACES = pytest.mark.parametrize("where", [Place("cpu", "eager"), *ON_GPU], ids=str)


class Small(Loss):
    """A loss over few rows: with weights of both signs they may cancel, and what rounding is left in the twin is luck,
    no yardstick."""

    def tensors(self, device: str) -> tuple[Tensor, ...]:
        *others, token_weight, temperature = super().tensors(device)
        return *others, token_weight.abs(), temperature


def losses() -> list[Loss]:
    """Every option at every size and dtype, the three reductions in turn; words enough for the padding."""
    return [
        Small(num_rows, vocab, depth, **{**options, "padding": min(options.get("padding", 0), vocab // 2)},
              dtype=dtype, reduction=next(REDUCTIONS))
        for (num_rows, vocab, depth), options, dtype in itertools.product(SHAPES, LOSSES, DTYPES)
    ]  # fmt: skip


@PLACES
@pytest.mark.parametrize("loss", losses(), ids=str)
def test_loss(loss: Loss, where: Place) -> None:
    check_loss(loss, where)


@PLACES
@pytest.mark.parametrize(
    "case",
    [Case(*shape, dtype=dtype, **head) for shape, head, dtype in itertools.product(SHAPES, HEADS, DTYPES)],
    ids=str,
)
def test_log_probs(case: Case, where: Place) -> None:
    check_log_probs(case, where, ("random", "strided", "ones"))
