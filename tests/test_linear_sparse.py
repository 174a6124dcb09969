"""The backward that leaves out what does not count: the same gradients without a budget, and within its bound with
one."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusedce
from fusedce import budget
from tests.conftest import Place
from tests.linear_ce_cases import IGNORE, Case, in_fp64, plain, upstream, with_gradients
from tests.paired import assert_bites, assert_close
from tests.sparse_cases import KINDS, Sparse

BF16, FP16, FP32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DELTA = 2.0**-6


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems are left sparse too, where everything at once would be as fast."""
    monkeypatch.setattr(budget, "MOST_SHARE", 1.0)


# ── rows without a gradient ─────────────────────────────────────────────────────────────────────────────────────────
ROW_CASES = [
    Case(1, 2, 1),
    Case(3, 31, 8, has_bias=True),
    Case(37, 129, 24, BF16, has_bias=True, temperature=0.6),
    Case(65, 557, 33, FP16),
    Case(67, 301, 48, softcap=2.0),
    Case(130, 600, 40, BF16, has_bias=True, temperature=1.7, softcap=3.0),
]


def zeroed(num_rows: int, kind: str, device: str) -> Tensor:
    """An upstream gradient of which two rows of three are 0, a run at the start and every other one after it."""
    grad = upstream(num_rows, kind, device).clone()
    grad[: num_rows // 3] = 0
    grad[num_rows // 3 + 1 :: 2] = 0
    return grad


@pytest.mark.parametrize("kinds", [("random", None, None), ("random", "random", "random")], ids=str)
@pytest.mark.parametrize("case", ROW_CASES, ids=str)
def test_gradients_with_rows_of_zero(case: Case, kinds: tuple[str | None, ...], place: Place) -> None:
    check_rows_of_zero(case, kinds, place)


def check_rows_of_zero(
    case: Case,
    kinds: tuple[str | None, ...],
    place: Place,
    moved: Callable[[Tensor], Tensor] = lambda weight: weight,
) -> None:
    """moved: weight in other memory."""
    tensors = case.inputs(place.device)
    grads = [None if kind is None else zeroed(case.num_rows, kind, place.device) for kind in kinds]

    def ours(hidden, weight, target, bias):  # type: ignore[no-untyped-def]
        return fusedce.linear_logprob(
            hidden, moved(weight), target, bias=bias, temperature=case.temperature, softcap=case.softcap,
            gradient_budget=0, backend=place.backend,
        )  # fmt: skip

    out = with_gradients(ours, tensors, grads)
    twin = with_gradients(lambda *t: plain(case, *t), tensors, grads)
    gold_grads = [None if g is None else g.cpu().double() for g in grads]
    gold = with_gradients(lambda *t: plain(case, *t), in_fp64(tensors), gold_grads)
    for name, o, g, t in zip(
        ("logprob", "entropy", "lse", "d_hidden", "d_weight", "d_bias"), out, gold, twin, strict=False
    ):
        assert_close(o, g, t, name)
        if case.num_rows >= 16 and "d_" in name:
            assert_bites(g, t, name)
    dead = torch.stack([g == 0 for g in grads if g is not None]).all(0) | (tensors[2] == IGNORE)
    assert not out[3][dead].any()


@pytest.mark.parametrize("delta", [0.0, DELTA])
def test_with_the_other_options(delta: float, place: Place, always: None) -> None:
    """Sequences, padded words, a softcap and a temperature for each token: as without a budget, within the bound."""
    hidden, weight, target, _, grad = Sparse("policy", vocab=560).inputs(place.device)
    temperature = torch.linspace(0.5, 1.5, 40, device=place.device).view(2, 20)
    target = torch.where(target < 530, target, 3).view(2, 20)
    leaves = [hidden.view(2, 20, -1).requires_grad_(), weight.requires_grad_()]

    def grads(certificate: Tensor | None, **options: object) -> tuple[Tensor, ...]:
        more = {} if certificate is None else {"gradient_budget": delta, "certificate": certificate}
        settings = {"vocab_size": 530, "softcap": 40.0, "temperature": temperature, **more, **options}
        out = fusedce.linear_logprob(*leaves, target, **settings)
        return torch.autograd.grad(
            out.logprob, leaves if certificate is None else [*leaves, certificate], grad.view(2, 20)
        )

    expected = grads(None, backend="eager")
    *ours, said = grads(torch.zeros(4, device=place.device, requires_grad=True), backend=place.backend)
    assert said[2] == (delta > 0)
    for out, gold, norm in zip(ours, expected, (1.0, hidden.norm(dim=1).max()), strict=True):
        missed = (out - gold).flatten(0, -2).norm(dim=1).sum()
        assert missed <= said[0] * norm + 3e-6 * said[1] * norm
        assert (missed > 1e-5 * said[1] * norm) == (delta > 0)
    assert not ours[1][530:].any()


def test_no_row_at_all_and_no_row_with_a_gradient(place: Place) -> None:
    for rows in (0, 40):
        hidden, weight, target, bias = Case(rows, 300, 8, has_bias=True).inputs(place.device)
        leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
        for delta in (0.0, DELTA):
            certificate = torch.zeros(4, device=place.device, requires_grad=True)
            out = fusedce.linear_logprob(
                hidden, weight, target, bias=bias, gradient_budget=delta, certificate=certificate,
                backend=place.backend,
            )  # fmt: skip
            *grads, said = torch.autograd.grad(out.logprob.sum() * 0, [*leaves, certificate])
            assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, leaves, strict=True))
            assert said.tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
@pytest.mark.parametrize("delta", [0.0, DELTA])
def test_only_what_is_wanted(wanted: tuple[bool, ...], delta: float, place: Place, always: None) -> None:
    hidden, weight, target, bias, grad = Sparse("policy", has_bias=True).inputs(place.device)

    def run(*needs: bool) -> list[Tensor | None]:
        leaves = [t.clone().requires_grad_(n) for t, n in zip((hidden, weight, bias), needs, strict=True)]
        options = {"gradient_budget": delta, "backend": place.backend}
        out = fusedce.linear_logprob(leaves[0], leaves[1], target, bias=leaves[2], **options)
        out.logprob.backward(grad)
        return [t.grad for t in leaves]

    for alone, together, want in zip(run(*wanted), run(True, True, True), wanted, strict=True):
        assert torch.equal(alone, together) if want else alone is None


def test_chunks_of_words_change_nothing_but_the_rounding(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCE_WORKSPACE_MB", "1")
    case = Case(600, 1100, 8)
    test_gradients_with_rows_of_zero(case, ("random", None, None), place)


def test_a_weight_that_no_descriptor_reaches(place: Place) -> None:
    """Its products go by pointer, d_weight's by descriptor: what the one leaves behind the last row the other reads."""
    case = Case(70, 1300, 64, BF16)
    check_rows_of_zero(case, ("random", None, None), place, lambda weight: F.pad(weight, (1, 0))[:, 1:])


# ── the certificate ─────────────────────────────────────────────────────────────────────────────────────────────────
def sparse(case: Sparse, place: Place, delta: float, with_entropy: bool) -> tuple[list[Tensor], list[float]]:
    """The gradients, and what the certificate says."""
    hidden, weight, target, bias, grad = case.inputs(place.device)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias) if t is not None]
    certificate = torch.zeros(4, device=place.device, requires_grad=True)
    out = fusedce.linear_logprob(
        hidden, weight, target, bias=bias, gradient_budget=delta, certificate=certificate, backend=place.backend
    )
    torch.autograd.backward(*_loss(out, grad, with_entropy))
    return [t.grad for t in leaves], certificate.grad.tolist()


def dense(case: Sparse, device: str, dtype: torch.dtype, with_entropy: bool) -> list[Tensor]:
    """The gradients of everything, by plain torch's formula in `dtype`."""
    hidden, weight, target, bias, grad = case.inputs(device)
    leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight, bias) if t is not None]
    out = fusedce.linear_logprob(*leaves[:2], target, bias=leaves[2] if case.has_bias else None, backend="eager")
    torch.autograd.backward(*_loss(out, grad.to(dtype), with_entropy))
    return [t.grad for t in leaves]


def _loss(out, grad: Tensor, with_entropy: bool) -> tuple[list[Tensor], list[Tensor]]:  # type: ignore[no-untyped-def]
    grad = grad.to(out.logprob.dtype)
    return ([out.logprob, out.entropy], [grad, 0.3 * grad.roll(1)]) if with_entropy else ([out.logprob], [grad])


def missing(grads: list[Tensor], gold: list[Tensor]) -> list[float]:
    """Σ over rows of ‖error‖₂ of d_hidden and d_weight, Σ |error| of d_bias."""
    errors = [(a.double().cpu() - b.double().cpu()) for a, b in zip(grads, gold, strict=True)]
    return [(e.norm(dim=1) if e.dim() > 1 else e.abs()).sum().item() for e in errors]


@pytest.mark.parametrize(
    ("kind", "with_entropy"), [(kind, False) for kind in KINDS] + [("policy", True), ("random", True), ("ties", True)]
)
def test_the_bound_holds(
    kind: str, with_entropy: bool, place: Place, always: None, request: pytest.FixtureRequest
) -> None:
    """Every gradient is within the bound that was returned, times the largest row that its error is made of."""
    case = Sparse(kind, has_bias=kind in ("policy", "random", "ignored"))
    if place.backend == "eager":
        # Nothing is rounded then: the whole error is what was skipped. And no number of words is too many.
        request.getfixturevalue("monkeypatch").setattr(budget, "WORDS_A_ROW", case.vocab)
    hidden, weight, target, _, _ = case.inputs(place.device)
    live = target != IGNORE
    norms = [weight.double().norm(dim=1).max().item(), hidden[live].double().norm(dim=1).max().item(), 1.0]
    gold = dense(case, "cpu", F64, with_entropy)
    rounding = missing(dense(case, place.device, case.dtype, with_entropy), gold)
    grads, (skipped, total, is_sparse, passes) = sparse(case, place, DELTA, with_entropy)
    assert passes == 1 and 0 <= skipped <= DELTA * total * 1.02
    assert is_sparse == (skipped > 0) or kind == "one word"
    for name, error, norm, other in zip(
        ("hidden", "weight", "bias"), missing(grads, gold), norms, rounding, strict=False
    ):
        # Where a row's words cancel (ties), what is left is rounding of numbers as large as `total`.
        cancelled = 16 * torch.finfo(FP32).eps * total * norm
        assert error <= skipped * norm + 2 * other + cancelled, f"d_{name}"
    if kind == "policy":
        # Something was left out, and more than rounding: the bound above has been tried.
        assert is_sparse and missing(grads, gold)[0] > 20 * rounding[0]


def test_words_of_a_worked_pair_that_are_left_out_are_counted(place: Place, always: None) -> None:
    """One tile of words, so no pair is left out: d_weight has everything, and the bound is of d_hidden's words."""
    case = Sparse("policy", vocab=250)
    gold = dense(case, "cpu", F64, False)
    rounding = missing(dense(case, place.device, FP32, False), gold)
    grads, (skipped, total, is_sparse, _) = sparse(case, place, 0.25, False)
    errors = missing(grads, gold)
    assert is_sparse == 1 and 20 * rounding[0] < errors[0] <= skipped + 2 * rounding[0]
    assert errors[1] <= 2 * rounding[1] + 1e-6 * total * case.inputs("cpu")[0].norm(dim=1).max()


def check_rounded(case: Sparse, place: Place) -> None:
    """The bound with operands in 16 bits, whose rounding comes on top of it."""
    dtype = case.dtype
    gold = dense(case, "cpu", F64, False)
    rounding = missing(dense(case, place.device, dtype, False), gold)
    grads, (skipped, _, is_sparse, _) = sparse(case, place, DELTA, False)
    hidden, weight, _, _, _ = case.inputs("cpu")
    norms = [weight.float().norm(dim=1).max().item(), hidden.float().norm(dim=1).max().item(), 1.0]
    assert is_sparse == 1
    for error, norm, other in zip(missing(grads, gold), norms, rounding, strict=True):
        # d_logits is in 16 bits on a GPU, which plain fp32 sums are not.
        assert error <= skipped * norm + 3 * other + 3 * torch.finfo(dtype).eps * norm * case.num_rows


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_rounded_operands(dtype: torch.dtype, place: Place, always: None) -> None:
    check_rounded(Sparse("policy", dtype=dtype, has_bias=True), place)


@pytest.mark.parametrize("kind", ["random", "peaked"])
def test_what_has_no_small_words_is_refused(kind: str, place: Place) -> None:
    """A flat tail with half of the mass: a filter by size drops it (Cut Cross-Entropy's d_hidden is off by 0.8 %)."""
    case = Sparse(kind)
    grads, (skipped, total, is_sparse, _) = sparse(case, place, 2.0**-10, False)
    assert is_sparse == 0 and skipped == 0 and total > 0
    for ours, gold, twin in zip(
        grads, dense(case, "cpu", F64, False), dense(case, place.device, case.dtype, False), strict=True
    ):
        assert_close(ours, gold, twin)


def test_too_many_words_are_refused(place: Place, always: None) -> None:
    """All of a tile's words alike: few pairs, but gathering word by word would not end."""
    case = Sparse("policy", vocab=700)
    hidden, weight, target, _, grad = case.inputs(place.device)
    weight[:200] = weight[0]
    hidden = 20 * weight[0] + 0.01 * hidden
    leaves = [t.requires_grad_() for t in (hidden, weight)]
    certificate = torch.zeros(4, device=place.device, requires_grad=True)
    options = {"gradient_budget": DELTA, "backend": place.backend}
    out = fusedce.linear_logprob(*leaves, target.clamp(max=199), certificate=certificate, **options)
    *grads, said = torch.autograd.grad(out.logprob, [*leaves, certificate], grad)
    assert said[2] == 0
    expected = fusedce.linear_logprob(*leaves, target.clamp(max=199), backend="eager")
    for ours, theirs in zip(grads, torch.autograd.grad(expected.logprob, leaves, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_policy_is_sparse_with_the_usual_constants() -> None:
    """Enough tiles of words for a row's few to be a small share, without a fixture's help."""
    case = Sparse("policy", num_rows=24, vocab=160 * 256, depth=256)
    _, (skipped, total, is_sparse, _) = sparse(case, Place("cpu", "eager"), 2.0**-10, False)
    assert is_sparse == 1 and 0 < skipped <= 2.0**-10 * total * 1.02


def test_nan_upstream_stays_in_its_row(place: Place, always: None) -> None:
    case = Sparse("policy")
    hidden, weight, target, _, grad = case.inputs(place.device)
    hidden.requires_grad_()

    def d_hidden(grad: Tensor, delta: float | None) -> Tensor:
        out = fusedce.linear_logprob(hidden, weight, target, gradient_budget=delta, backend=place.backend)
        return torch.autograd.grad(out.logprob, hidden, grad)[0]

    expected = d_hidden(grad, 0.0)
    grad[9] = math.nan
    out = d_hidden(grad, DELTA)
    assert out[9].isnan().all()
    others = torch.arange(case.num_rows, device=place.device) != 9
    torch.testing.assert_close(out[others], expected[others], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("delta", [0.0, DELTA])
def test_repeats_are_bitwise_equal(delta: float, place: Place, always: None) -> None:
    case = Sparse("policy", dtype=BF16, has_bias=True)
    first, again = (sparse(case, place, delta, True) for _ in range(2))
    assert first[1] == again[1]
    assert all(torch.equal(a, b) for a, b in zip(first[0], again[0], strict=True))


def test_a_certificate_adds_up_over_passes(place: Place, always: None) -> None:
    """As gradients do: the bound of the sum is the sum of the bounds."""
    hidden, weight, target, _, grad = Sparse("policy").inputs(place.device)
    weight.requires_grad_()
    certificate = torch.zeros(4, device=place.device, requires_grad=True)
    parts = []
    for rows in (slice(0, 20), slice(20, 40)):
        options = {"gradient_budget": DELTA, "certificate": certificate, "backend": place.backend}
        before = 0 if certificate.grad is None else certificate.grad.clone()
        fusedce.linear_logprob(hidden[rows], weight, target[rows], **options).logprob.backward(grad[rows])
        parts.append(certificate.grad - before)
    torch.testing.assert_close(certificate.grad, parts[0] + parts[1])
    assert certificate.grad[3] == 2
