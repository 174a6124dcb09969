"""Bad inputs of every function of the head, each followed by a good call in the same process, and what NaN and
infinities may reach. Numbers are those of the list of bad inputs."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusedce
from fusedce import flags
from tests.conftest import Place
from tests.linear_ce_cases import Case, in_fp64

NATIVE = True

H, W, B, Y = torch.randn(6, 4), torch.randn(9, 4), torch.randn(9), torch.arange(6)
NESTED = torch.nested.as_nested_tensor([H[:2], H[2:]], layout=torch.jagged)
NAN, INF = math.nan, math.inf


def cross_entropy(hidden, weight, target, bias=None, **options):  # type: ignore[no-untyped-def]
    return fusedce.linear_cross_entropy(hidden, weight, target, linear_bias=bias, reduction="none", **options)


def logprob(hidden, weight, target, bias=None, **options):  # type: ignore[no-untyped-def]
    return -fusedce.linear_logprob(hidden, weight, target, bias=bias, **options).logprob


def policy(hidden, weight, target, bias=None, **options):  # type: ignore[no-untyped-def]
    return -fusedce.linear_policy_loss(hidden, weight, target, lambda rows: rows, bias=bias, **options)


def of_one(hidden, weight, target, bias=None, **options):  # type: ignore[no-untyped-def]
    ids = target[..., None] if isinstance(target, Tensor) else target
    return -fusedce.linear_logprob_of(hidden, weight, ids, bias=bias, **options)[..., 0]


def heads(hidden, weight, target, bias=None, **options):  # type: ignore[no-untyped-def]
    pair = [t[None] if isinstance(t, Tensor) and not t.is_nested else t for t in (hidden, target)]
    return fusedce.linear_cross_entropy_heads(pair[0], weight, pair[1], bias=bias, reduction="sum", **options).loss


FUNCTIONS = [cross_entropy, logprob, policy, of_one, heads]
# what -> number, the error, what its message says, the arguments that are wrong
BAD = {
    "label of V": (1, ValueError, r"the value 9 at row \d; expected \[0, 9\)", dict(target=Y + 4)),
    "label of -1": (1, ValueError, "the value -1 at row 0", dict(target=Y - 1)),
    "label of 2**63 - 1": (2, ValueError, "the value 9223372036854775807", dict(target=torch.full((6,), 2**63 - 1))),
    "label of -2**63": (2, ValueError, "the value -9223372036854775808", dict(target=torch.full((6,), -(2**63)))),
    "label of 2**32": (2, ValueError, "the value 4294967296", dict(target=Y + 2**32)),
    "long target": (3, ValueError, r"shape \(1?,? ?7", dict(target=torch.arange(7))),
    "short target": (3, ValueError, r"shape \(1?,? ?5", dict(target=Y[:5])),
    "target of another shape": (3, ValueError, r"shape \(", dict(target=Y.reshape(2, 3))),
    "float target": (4, TypeError, "expected int64", dict(target=Y.float())),
    "bool target": (4, TypeError, "expected int64", dict(target=Y > 2)),
    "uint8 target": (4, TypeError, "expected int64", dict(target=Y.to(torch.uint8))),
    "int32 target": (4, TypeError, "expected int64", dict(target=Y.int())),
    "no target": (4, TypeError, "NoneType", dict(target=None)),
    "another D": (5, ValueError, r"weight' has shape \(9, 5\)", dict(weight=torch.randn(9, 5))),
    "weight of three dimensions": (5, ValueError, r"weight' has shape \(1, 9, 4\)", dict(weight=W[None])),
    "flat weight": (5, ValueError, r"weight' has shape \(36,\)", dict(weight=W.reshape(-1))),
    "short bias": (6, ValueError, r"bias' has shape \(8,\)", dict(bias=B[:8])),
    "bias of two dimensions": (6, ValueError, r"bias' has shape \(1, 9\)", dict(bias=B[None])),
    "no dimension": (7, ValueError, "hidden'|'input'|'target'", dict(hidden=torch.tensor(1.0))),
    "no vocabulary": (10, ValueError, "V is 0", dict(weight=W[:0])),
    "no depth": (10, ValueError, "D is 0", dict(hidden=H[:, :0], weight=W[:, :0])),
    "complex": (12, TypeError, "complex64", dict(hidden=H.to(torch.complex64))),
    "integers": (12, TypeError, "int64", dict(hidden=H.long())),
    "fp8": (12, TypeError, "float8_e4m3fn", dict(hidden=H.to(torch.float8_e4m3fn))),
    "fp8 weight": (12, TypeError, "float8_e4m3fn", dict(weight=W.to(torch.float8_e4m3fn))),
    "weight elsewhere": (13, ValueError, "meta", dict(weight=W.to("meta"))),
    "target elsewhere": (13, ValueError, "meta", dict(target=Y.to("meta"))),
    "bias elsewhere": (13, ValueError, "meta", dict(bias=B.to("meta"))),
    "CPU tensors for a GPU": (13, RuntimeError, "cannot run", dict(backend="native")),
    "softcap of 0": (17, ValueError, "'softcap' is 0", dict(softcap=0.0)),
    "softcap below 0": (17, ValueError, "'softcap' is -1", dict(softcap=-1.0)),
    "softcap of NaN": (17, ValueError, "'softcap' is nan", dict(softcap=NAN)),
    "softcap of inf": (17, ValueError, "'softcap' is inf", dict(softcap=INF)),
    "softcap as a tensor": (17, TypeError, "'softcap'", dict(softcap=torch.ones(1))),
    "temperature of 0": (17, ValueError, "'temperature' is 0", dict(temperature=0)),
    "temperature below 0": (17, ValueError, "'temperature' is -2", dict(temperature=-2.0)),
    "temperature of NaN": (17, ValueError, "'temperature' is nan", dict(temperature=NAN)),
    "temperature of inf": (17, ValueError, "'temperature' is inf", dict(temperature=INF)),
    "temperature as a word": (17, TypeError, "'temperature'", dict(temperature="1")),
    "vocab_size of 0": (17, ValueError, "'vocab_size' is 0", dict(vocab_size=0)),
    "vocab_size past V": (17, ValueError, "'vocab_size' is 10", dict(vocab_size=10)),
    "vocab_size of 1.5": (17, ValueError, "'vocab_size' is 1.5", dict(vocab_size=1.5)),
    "ignore_index as a word": (17, TypeError, "'ignore_index'", dict(ignore_index="-100")),
    "check": (17, ValueError, "expected one of auto, sync", dict(check=True)),
    "backend": (17, ValueError, "expected one of auto, eager, triton, native", dict(backend="cuda")),
    "sparse weight": (20, TypeError, "sparse", dict(weight=W.to_sparse())),
    "sparse hidden": (20, TypeError, "sparse", dict(hidden=H.to_sparse())),
    "nested hidden": (20, TypeError, "nested", dict(hidden=NESTED)),
    "list for a weight": (20, TypeError, "type list", dict(weight=[1.0])),
}  # fmt: skip
# The loss's own options.
BAD_LOSS = {
    "label smoothing above 1": ("label_smoothing", dict(label_smoothing=1.01)),
    "label smoothing below 0": ("label_smoothing", dict(label_smoothing=-0.01)),
    "label smoothing of NaN": ("label_smoothing", dict(label_smoothing=NAN)),
    "z-loss below 0": ("z_loss", dict(z_loss=-1.0)),
    "z-loss of NaN": ("z_loss", dict(z_loss=NAN)),
    "z-loss of inf": ("z_loss", dict(z_loss=INF)),
    "two that exclude each other": ("'label_smoothing' and 'softcap'", dict(label_smoothing=0.1, softcap=1.0)),
    "class weights elsewhere": ("meta", dict(weight=torch.ones(9, device="meta"))),
    "token weights elsewhere": ("meta", dict(token_weight=torch.ones(6, device="meta"))),
    "class weights of two dimensions": (r"'weight' has shape \(9, 1\)", dict(weight=torch.ones(9, 1))),
}


def good_call(run: Callable) -> None:
    """The function after an error: as if nothing had been."""
    torch.testing.assert_close(run(H, W, Y, B).sum(), F.cross_entropy(F.linear(H, W, B), Y, reduction="sum"))


@pytest.mark.parametrize("run", FUNCTIONS)
def test_bad_input_is_refused_and_the_next_call_works(run: Callable) -> None:
    """One test a function: a case takes a millisecond, and the good call after each shares the process with all."""
    for name, (number, error, message, change) in BAD.items():
        with pytest.raises(error, match=message) as raised:
            run(**{"hidden": H, "weight": W, "target": Y, **change})
        assert "fusedce" in str(raised.value), f"{number}, {name}: {raised.value}"
        good_call(run)


@pytest.mark.parametrize("name", BAD_LOSS)
def test_bad_options_of_the_loss(name: str) -> None:
    message, change = BAD_LOSS[name]
    with pytest.raises(ValueError, match=message):
        fusedce.linear_cross_entropy(H, W, Y, **change)
    good_call(cross_entropy)


# ── 14: NaN and infinities go where eager's go, and no further ──────────────────────────────────────────────────────
def plain(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor) -> list[Tensor]:
    """The losses, and the gradients of hidden, weight and bias, by plain torch."""
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight, bias)]
    rows = F.cross_entropy(F.linear(*leaves), target, reduction="none")
    return [rows.detach(), *torch.autograd.grad(rows.sum(), leaves)]


POISON = {
    "NaN in a row": lambda h, w, b: h[3].fill_(NAN),
    "inf in a row": lambda h, w, b: h[3, 1].fill_(INF),
    "NaN in a word": lambda h, w, b: w[7, 2].fill_(NAN),
    "inf in a word": lambda h, w, b: w[7, 2].fill_(INF),
    "NaN in the bias": lambda h, w, b: b[7].fill_(NAN),
    "inf in the bias": lambda h, w, b: b[7].fill_(INF),
    "a word of -inf": lambda h, w, b: b[7].fill_(-INF),
    "all of -inf": lambda h, w, b: b.fill_(-INF),
    "a row of large numbers": lambda h, w, b: h[3].mul_(1e30),
}


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("run", [cross_entropy, logprob, of_one])
def test_nan_goes_where_eager_s_goes(run: Callable, poison: str, place: Place) -> None:
    """The rows' losses: NaN and infinities exactly where plain torch has them, the others right. d_hidden: rows that
    plain torch has finite are finite."""
    hidden, weight, target, bias = Case(12, 40, 8, has_bias=True, every_ignored=0).inputs(place.device)
    target %= 7
    POISON[poison](hidden, weight, bias)
    expected = plain(*in_fp64((hidden, weight, target, bias)))
    leaf = hidden.requires_grad_()
    rows = run(leaf, weight, target, bias, backend=place.backend)
    torch.testing.assert_close(rows.double().cpu(), expected[0], rtol=1e-4, atol=1e-5, equal_nan=True)
    (grad,) = torch.autograd.grad(rows.sum(), leaf)
    finite = expected[1].isfinite().all(1)
    torch.testing.assert_close(grad.double().cpu()[finite], expected[1][finite], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("poison", ["NaN in a row", "NaN in a word", "all of -inf"])
def test_a_scalar_loss_is_nan_and_says_so(poison: str, place: Place) -> None:
    """What stops a trainer before its optimizer: the loss of a batch with NaN is NaN, and so is the gradient norm."""
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight, target, bias = Case(12, 40, 8, dtype, has_bias=True, every_ignored=0).inputs(place.device)
        POISON[poison](hidden, weight, bias)
        leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
        loss = fusedce.linear_cross_entropy(hidden, weight, target, linear_bias=bias, backend=place.backend)
        grads = torch.autograd.grad(loss, leaves)
        assert loss.isnan() and grads[1].isnan().any()


# ── 28: what waits cannot be captured ───────────────────────────────────────────────────────────────────────────────
def test_what_waits_says_so_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="check_flags.*check='sync'.*waits for the GPU.*captured"):
        flags.check_flags()
    with pytest.raises(RuntimeError, match="captured"):
        fusedce.linear_logprob(H, W, Y, check="sync")
    monkeypatch.undo()
    good_call(logprob)


@pytest.mark.gpu
@pytest.mark.parametrize("run", FUNCTIONS)
def test_a_capture_ends_cleanly(run: Callable) -> None:
    hidden, weight, target = H.cuda(), W.cuda(), Y.cuda()
    torch.use_deterministic_algorithms(False)
    expected = run(hidden, weight, target, backend="triton")
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="captured"):
        run(hidden, weight, target, check="sync", backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(hidden, weight, target, backend="triton")
    graph.replay()
    assert torch.equal(captured, expected)
    assert torch.equal(run(hidden, weight, target, check="sync", backend="triton"), expected)
