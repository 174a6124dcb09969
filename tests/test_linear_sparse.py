"""The backward that leaves out what does not count: the same gradients without a budget, and within its bound with
one."""

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

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
    tensors = case.inputs(place.device)
    grads = [None if kind is None else zeroed(case.num_rows, kind, place.device) for kind in kinds]

    def ours(hidden, weight, target, bias):  # type: ignore[no-untyped-def]
        return fusedce.linear_logprob(
            hidden, weight, target, bias=bias, temperature=case.temperature, softcap=case.softcap,
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


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("kind", KINDS)
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
        assert error <= skipped * norm + 2 * other, f"d_{name}"
    if kind == "policy":
        # Something was left out, and more than rounding: the bound above has been tried.
        assert is_sparse and missing(grads, gold)[0] > 20 * rounding[0]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_rounded_operands(dtype: torch.dtype, place: Place, always: None) -> None:
    case = Sparse("policy", dtype=dtype, has_bias=True)
    gold = dense(case, "cpu", F64, False)
    rounding = missing(dense(case, place.device, dtype, False), gold)
    grads, (skipped, _, is_sparse, _) = sparse(case, place, DELTA, False)
    hidden, weight, _, _, _ = case.inputs("cpu")
    norms = [weight.float().norm(dim=1).max().item(), hidden.float().norm(dim=1).max().item(), 1.0]
    assert is_sparse == 1
    for error, norm, other in zip(missing(grads, gold), norms, rounding, strict=True):
        # d_logits is in 16 bits on a GPU, which plain fp32 sums are not.
        assert error <= skipped * norm + 3 * other + 3 * torch.finfo(dtype).eps * norm * case.num_rows


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


# ── the op ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("delta", [0.0, DELTA])
def test_opcheck(delta: float, place: Place, always: None) -> None:
    for case in (Case(9, 33, 8, has_bias=True), Case(0, 3, 2)):
        hidden, weight, target, bias = case.inputs(place.device)
        leaves = [t.requires_grad_() if t is not None else None for t in (hidden, weight, bias)]
        certificate = torch.zeros(4, device=place.device, requires_grad=True)
        arguments = (leaves[0], leaves[1], target, leaves[2], None, certificate)
        options = {"gradient_budget": delta, "backend": place.backend}
        opcheck(torch.ops.fusedce.linear_logprob_sparse.default, arguments, options)


def test_gradcheck() -> None:
    hidden, weight, target, bias = Case(6, 9, 3, F64, True, 0.7, 1.5, every_ignored=3).inputs("cpu")
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]

    def run(hidden, weight, bias):  # type: ignore[no-untyped-def]
        return tuple(fusedce.linear_logprob(hidden, weight, target, bias=bias, gradient_budget=0.0, softcap=1.5))

    assert torch.autograd.gradcheck(run, leaves)


def test_fullgraph_compile_is_bitwise_eager(place: Place, always: None) -> None:
    hidden, weight, target, _, grad = Sparse("policy").inputs(place.device)
    leaves = [t.requires_grad_() for t in (hidden, weight)]
    certificate = torch.zeros(4, device=place.device, requires_grad=True)

    def loss(hidden, weight, certificate):  # type: ignore[no-untyped-def]
        options = {"gradient_budget": DELTA, "certificate": certificate, "backend": place.backend}
        return (fusedce.linear_logprob(hidden, weight, target, **options).logprob * grad).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected, out = (torch.autograd.grad(f(*leaves, certificate), [*leaves, certificate]) for f in (loss, compiled))
    assert all(torch.equal(e, o) for e, o in zip(expected, out, strict=True))
    assert out[2][2] == 1


def test_double_backward_is_refused(place: Place) -> None:
    hidden, weight, target, _ = Case(20, 50, 8).inputs(place.device)
    out = fusedce.linear_logprob(hidden.requires_grad_(), weight, target, gradient_budget=0, backend=place.backend)
    grad = torch.autograd.grad(out.logprob.sum(), hidden, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


BAD = {
    "a budget below 0": (ValueError, "'gradient_budget' is -0.1", dict(gradient_budget=-0.1)),
    "a budget of 1": (ValueError, "'gradient_budget' is 1.0; expected from 0 to below 1", dict(gradient_budget=1.0)),
    "a budget of NaN": (ValueError, "gradient_budget", dict(gradient_budget=math.nan)),
    "a budget of True": (TypeError, "'gradient_budget' has type bool", dict(gradient_budget=True)),
    "a certificate alone": (ValueError, "'certificate' needs a gradient_budget", dict(certificate=torch.zeros(4))),
    "a short one": (ValueError, r"'certificate' has shape \(3,\)", dict(gradient_budget=0, certificate=torch.zeros(3))),
    "a whole one": (TypeError, "certificate", dict(gradient_budget=0, certificate=torch.zeros(4, dtype=torch.int64))),
    "one elsewhere": (ValueError, "'certificate' is on meta",
                      dict(gradient_budget=0, certificate=torch.zeros(4, device="meta"))),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    error, message, options = BAD[name]
    with pytest.raises(error, match=message):
        fusedce.linear_logprob(torch.randn(6, 4), torch.randn(9, 4), torch.arange(6), **options)


def test_a_direct_call_of_the_op_is_checked() -> None:
    arguments = (torch.randn(6, 4), torch.randn(9, 4), torch.arange(6), None)
    for bad in (-1.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="gradient_budget"):
            torch.ops.fusedce.linear_logprob_sparse(*arguments, gradient_budget=bad)
    with pytest.raises(ValueError, match="certificate"):
        torch.ops.fusedce.linear_logprob_sparse(*arguments, None, torch.zeros(3))


@pytest.mark.gpu
@pytest.mark.parametrize("delta", [0.0, 2.0**-10])
def test_no_sync_and_graph_capture(delta: float) -> None:
    """How many rows and pairs there are only the device learns; a captured graph follows them."""
    case = Sparse("policy", num_rows=200, vocab=160 * 256, depth=256, dtype=BF16)
    hidden, weight, target, _, grad = case.inputs("cuda")
    hidden.requires_grad_(), weight.requires_grad_()
    certificate = torch.zeros(4, device="cuda", requires_grad=True)

    def step() -> tuple[Tensor, ...]:
        options = {"gradient_budget": delta, "certificate": certificate, "backend": "triton"}
        out = fusedce.linear_logprob(hidden, weight, target, **options)
        return torch.autograd.grad(out.logprob, (hidden, weight, certificate), grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(), step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for change in (lambda: None, lambda: grad[::3].zero_(), lambda: grad.zero_()):
        change()
        graph.replay()
        assert all(torch.equal(c, e) for c, e in zip(captured, step(), strict=True))
