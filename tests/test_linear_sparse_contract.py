"""What torch expects of linear_logprob with a gradient_budget (opcheck, gradcheck, fullgraph compile, CUDA graphs), and
what a user expects of its errors."""

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import fusedce
from fusedce import budget
from tests.conftest import Place
from tests.linear_ce_cases import Case
from tests.sparse_cases import Sparse

BF16, F64 = torch.bfloat16, torch.float64
DELTA = 2.0**-6


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems are left sparse too, where everything at once would be as fast."""
    monkeypatch.setattr(budget, "MOST_SHARE", 1.0)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("delta", [0.0, DELTA])
def test_opcheck(delta: float, place: Place) -> None:
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


@pytest.mark.usefixtures("always")
def test_fullgraph_compile_is_bitwise_eager(place: Place) -> None:
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
    "one for native": (ValueError, "'gradient_budget' and 'backend' = 'native'",
                       dict(gradient_budget=0, backend="native")),
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
