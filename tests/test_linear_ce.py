"""linear_logprob and linear_ce against fp64: values and every gradient, on every backend."""

import math

import pytest
import torch
import torch.nn.functional as F

import fusedce
from tests.conftest import Place
from tests.linear_ce_cases import IGNORE, Case, in_fp64, ours, plain, upstream, with_gradients
from tests.paired import assert_bites, assert_close

NATIVE = True

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ("logprob", "entropy", "lse", "d_hidden", "d_weight", "d_bias")
SHAPES = [
    (1, 2, 1), (2, 1, 3), (3, 31, 8), (7, 127, 17), (37, 129, 24), (64, 64, 32), (65, 257, 33), (127, 507, 40),
    (128, 512, 64), (131, 1000, 50), (50, 2053, 19),
]  # fmt: skip
OPTIONS = [
    Case(67, 301, 48, has_bias=True),
    Case(67, 301, 48, temperature=0.6),
    Case(67, 301, 48, softcap=2.0),
    Case(67, 301, 48, has_bias=True, temperature=1.7, softcap=3.0),
    Case(67, 301, 48, every_ignored=0),
    Case(67, 301, 48, every_ignored=2, has_bias=True),
]
CASES = [Case(*shape, dtype=dtype) for shape in SHAPES for dtype in (FP32, BF16, FP16)] + [
    Case(**{**case.__dict__, "dtype": dtype}) for case in OPTIONS for dtype in (FP32, BF16, FP16)
]


def check(case: Case, place: Place, kinds: tuple[str | None, str | None, str | None]) -> None:
    """Ours against fp64 with plain torch in the same dtype as the bar, and the bites of that bar."""
    tensors = case.inputs(place.device)
    grads = [None if kind is None else upstream(case.num_rows, kind, place.device) for kind in kinds]
    out = with_gradients(lambda *t: ours(case, place.backend, *t), tensors, grads)
    twin = with_gradients(lambda *t: plain(case, *t), tensors, grads)
    gold_grads = [None if g is None else g.cpu().double() for g in grads]
    gold = with_gradients(lambda *t: plain(case, *t), in_fp64(tensors), gold_grads)
    for name, o, g, t in zip(NAMES, out, gold, twin, strict=False):
        assert_close(o, g, t, name)
    assert out[0].dtype == out[1].dtype == out[2].dtype == FP32
    if case.num_rows >= 16 and case.vocab >= 16 and kinds[0]:
        for name, g, t in zip(NAMES, gold, twin, strict=False):
            assert_bites(g, t, name)
        shifted = with_gradients(lambda *t: plain(case, *t, shift=1), in_fp64(tensors), gold_grads)
        for at in (0, 3, 4):
            with pytest.raises(AssertionError):
                assert_close(shifted[at].to(out[at].dtype), gold[at], twin[at])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case: Case, place: Place) -> None:
    check(case, place, ("random", "random", "random"))


@pytest.mark.parametrize("kinds", [("ones", None, None), ("expanded", None, "strided"), (None, "random", None),
                                   (None, None, "ones"), ("strided", "expanded", None)], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_upstream_gradients(kinds: tuple[str | None, str | None, str | None], dtype: torch.dtype, place: Place) -> None:
    check(Case(41, 203, 24, dtype=dtype, has_bias=True), place, kinds)


@pytest.mark.parametrize("kind", ["random", "ones"])
@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_words_near_the_softcap(temperature: float, kind: str, place: Place) -> None:
    """Where a capped logit is near ±softcap its slope 1 − tanh² has few digits: tanh must be right to its last one, on
    both sides. Such words are targets here."""
    check(Case(67, 304, 48, temperature=temperature, softcap=2.0), place, (kind, kind, kind))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_linear_cross_entropy_matches_torch(reduction: str, dtype: torch.dtype, place: Place) -> None:
    case = Case(90, 211, 32, dtype=dtype, has_bias=True)
    tensors = case.inputs(place.device)
    grads = [upstream(case.num_rows, "random", place.device) if reduction == "none" else torch.tensor(1.3)]

    def reference(hidden, weight, target, bias):  # type: ignore[no-untyped-def]
        logits = F.linear(hidden, weight, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return [F.cross_entropy(logits, target, reduction=reduction, ignore_index=IGNORE)]

    def fused(hidden, weight, target, bias):  # type: ignore[no-untyped-def]
        keywords = {"linear_bias": bias, "reduction": reduction, "backend": place.backend}
        return [fusedce.linear_cross_entropy(hidden, weight, target, **keywords)]

    out = with_gradients(fused, tensors, [g.to(place.device) for g in grads])
    twin = with_gradients(reference, tensors, [g.to(place.device) for g in grads])
    gold = with_gradients(reference, in_fp64(tensors), [g.cpu() for g in grads])
    for o, g, t in zip(out, gold, twin, strict=True):
        assert_close(o, g, t)
        if o.dim():
            assert_bites(g, t)


def test_class_weight_matches_torch(place: Place) -> None:
    hidden, weight, target, _ = Case(60, 40, 16).inputs(place.device)
    class_weight = torch.rand(40, device=place.device)
    for reduction in ("none", "mean", "sum"):
        out = fusedce.linear_cross_entropy(
            hidden, weight, target, weight=class_weight, reduction=reduction, backend=place.backend
        )
        gold = F.cross_entropy(
            hidden.double() @ weight.double().t(), target, weight=class_weight.double(), reduction=reduction
        )
        twin = F.cross_entropy(hidden @ weight.t(), target, weight=class_weight, reduction=reduction)
        assert_close(out, gold, twin, reduction)


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_no_row_that_counts(rows: int, place: Place) -> None:
    hidden = torch.randn(rows, 8, device=place.device, requires_grad=True)
    weight = torch.randn(11, 8, device=place.device, requires_grad=True)
    target = torch.full((rows,), IGNORE, device=place.device)
    for reduction in ("mean", "sum"):
        loss = fusedce.linear_cross_entropy(hidden, weight, target, reduction=reduction, backend=place.backend)
        d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
        assert loss.item() == 0.0
        assert d_hidden.shape == hidden.shape and not d_hidden.any()
        assert d_weight.shape == weight.shape and not d_weight.any()


def test_ignored_rows_may_hold_anything(place: Place) -> None:
    case, ones = Case(40, 70, 16), [torch.ones(40, device=place.device)] * 3
    hidden, weight, target, _ = case.inputs(place.device)
    target[3] = IGNORE

    def run(hidden, weight, target):  # type: ignore[no-untyped-def]
        return ours(case, place.backend, hidden, weight, target, None)

    expected = with_gradients(run, (hidden, weight, target), ones)
    hidden[3, 0], hidden[3, 1] = math.nan, math.inf
    for name, o, e in zip(NAMES, with_gradients(run, (hidden, weight, target), ones), expected, strict=False):
        assert torch.equal(o, e), name


def test_repeats_are_bitwise_equal(place: Place) -> None:
    case = Case(150, 700, 40, dtype=BF16, has_bias=True)
    tensors, grads = case.inputs(place.device), [upstream(150, "random", place.device)] * 3
    first = with_gradients(lambda *t: ours(case, place.backend, *t), tensors, grads)
    for _ in range(3):
        again = with_gradients(lambda *t: ours(case, place.backend, *t), tensors, grads)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def check_rows_alone(device: str) -> None:
    """Triton's results of a row in a batch, in a part of it and alone: bitwise; in the interpreter, whose products are
    NumPy's and may be summed in another order, to rounding."""
    bits = {"rtol": 0.0, "atol": 0.0} if device == "cuda" else {}
    case = Case(150, 700, 40, dtype=BF16, has_bias=True, every_ignored=0)
    hidden, weight, target, bias = case.inputs(device)
    whole = ours(case, "triton", hidden, weight, target, bias)
    for rows in (slice(0, 1), slice(70, 140), slice(149, 150)):
        part = ours(case, "triton", hidden[rows], weight, target[rows], bias)
        for w, p in zip(whole, part, strict=True):
            torch.testing.assert_close(w[rows], p, **bits)


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_others() -> None:
    check_rows_alone("cuda")


@pytest.mark.parametrize("chunk_mb", ["1", "4"])
def test_chunks_change_nothing_but_the_rounding(chunk_mb: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(700, 1500, 16, dtype=FP32)
    if place.backend == "triton" and place.device == "cpu":
        case = Case(300, 1500, 8, dtype=FP32)
    monkeypatch.setenv("FUSEDCE_WORKSPACE_MB", chunk_mb)
    check(case, place, ("random", None, "random"))
