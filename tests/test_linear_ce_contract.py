"""What torch expects of an op (opcheck, gradcheck, fullgraph compile) and what a user expects of its errors."""

import pytest
import torch
from torch.library import opcheck

import fusedce
from tests.conftest import Place
from tests.linear_ce_cases import IGNORE, Case, ours, with_gradients
from tests.paired import assert_close

NATIVE = True

F64 = torch.float64
CHECKED = [
    Case(5, 7, 4, F64),
    Case(9, 33, 8, torch.float32, has_bias=True),
    Case(6, 20, 8, torch.bfloat16, softcap=2.0),
    Case(1, 1, 1, torch.float32),
    Case(0, 3, 2, torch.float32, has_bias=True, temperature=0.5),
]


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_opcheck(case: Case, needs_grad: bool, place: Place) -> None:
    if case.dtype == F64 and place.backend != "eager":
        case = Case(5, 7, 4, torch.float16)
    hidden, weight, target, bias = case.inputs(place.device)
    leaves = [t.requires_grad_(needs_grad) if t is not None else None for t in (hidden, weight, bias)]
    options = {"temperature": case.temperature, "softcap": case.softcap or 0.0, "backend": place.backend}
    opcheck(torch.ops.fusedce.linear_logprob.default, (leaves[0], leaves[1], target, leaves[2]), options)
    opcheck(torch.ops.fusedce.linear_ce.default, (leaves[0], leaves[1], target, leaves[2]), options)
    numbers = hidden.new_ones(case.num_rows, dtype=F64 if hidden.dtype == F64 else torch.float32)
    mask = [needs_grad, needs_grad, needs_grad and bias is not None]
    arguments = (leaves[0], leaves[1], target, leaves[2], None, numbers, 0.1 * numbers, None)
    opcheck(torch.ops.fusedce.linear_ce_sum.default, arguments, {**options, "ignore_index": IGNORE, "mask": mask})


@pytest.mark.parametrize("mask", [[True, True, True], [True, False, False], [False, True, False]])
def test_opcheck_backward(mask: list[bool], place: Place) -> None:
    hidden, weight, target, bias = Case(9, 33, 8, has_bias=True).inputs(place.device)
    options = {"backend": place.backend}
    logprob, entropy, _, normalizer = torch.ops.fusedce.linear_logprob(hidden, weight, target, bias, **options)
    upstream = [torch.randn(9, device=place.device), None, torch.randn(9, device=place.device)]
    upstream[1] = upstream[0] if all(mask) else None
    saved = (logprob, entropy, normalizer)
    arguments = (*upstream, hidden, weight, target, bias, None, *saved, IGNORE, 1.0, 0.0, mask, place.backend)
    opcheck(torch.ops.fusedce.linear_logprob_backward.default, arguments)


@pytest.mark.parametrize("case", [Case(5, 7, 4, F64), Case(6, 9, 3, F64, True, 0.7, 1.5, every_ignored=3)], ids=str)
def test_gradcheck(case: Case) -> None:
    hidden, weight, target, bias = case.inputs("cpu")
    leaves = [t.requires_grad_() for t in (hidden, weight, bias) if t is not None]

    def run(hidden, weight, bias=None):  # type: ignore[no-untyped-def]
        return tuple(ours(case, "eager", hidden, weight, target, bias))

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("ignored", [0, 4])
def test_fullgraph_compile_is_bitwise_eager(ignored: int, place: Place) -> None:
    """Liger-Kernel#1338 (LC-A02): under torch.compile the loss was wrong as soon as one target was ignored."""
    case = Case(64, 300, 16, torch.float32, has_bias=True, every_ignored=ignored)
    tensors = case.inputs(place.device)

    def loss(hidden, weight, target, bias):  # type: ignore[no-untyped-def]
        out = fusedce.linear_logprob(hidden, weight, target, bias=bias, backend=place.backend)
        mean = fusedce.linear_cross_entropy(hidden, weight, target, linear_bias=bias, backend=place.backend)
        return out.logprob, out.entropy, mean

    grads = [
        torch.randn(64, device=place.device),
        torch.randn(64, device=place.device),
        torch.ones((), device=place.device),
    ]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected, out = with_gradients(loss, tensors, grads), with_gradients(compiled, tensors, grads)
    assert all(torch.equal(e, o) for e, o in zip(expected, out, strict=True))
    with torch.no_grad():
        assert torch.equal(compiled(*tensors)[2], loss(*tensors)[2])


def test_compile_with_dynamic_rows(place: Place) -> None:
    compiled = torch.compile(fusedce.linear_cross_entropy, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 8, 13):
        hidden, weight, target, _ = Case(rows, 40, 8).inputs(place.device)
        expected = fusedce.linear_cross_entropy(hidden, weight, target, backend=place.backend)
        assert torch.equal(compiled(hidden, weight, target, backend=place.backend), expected)


def test_meta_tensors_have_shapes_only() -> None:
    hidden, weight = torch.empty(4, 8, device="meta"), torch.empty(11, 8, device="meta")
    out = fusedce.linear_logprob(hidden, weight, torch.empty(4, dtype=torch.int64, device="meta"))
    assert out.logprob.shape == out.entropy.shape == (4,)


def test_second_backward_and_double_backward(place: Place) -> None:
    """quack#209 (LC-A13): saved gradients that are scaled in place make the second backward wrong."""
    hidden, weight, target, _ = Case(20, 50, 8).inputs(place.device)
    hidden.requires_grad_(), weight.requires_grad_()
    loss = fusedce.linear_cross_entropy(hidden, weight, target, backend=place.backend)
    first = torch.autograd.grad(loss, (hidden, weight), torch.tensor(3.0, device=place.device), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    for before, after, one in zip(kept, first, second, strict=True):
        assert torch.equal(before, after)
        assert_close(before / 3, one.cpu().double(), before / 3)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    rows = fusedce.linear_logprob(hidden, weight, target, backend=place.backend).logprob
    grad = torch.autograd.grad(rows.sum(), hidden, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_input_changed_in_place_before_backward(place: Place) -> None:
    """Per token the logits are made again: an error. A scalar's gradients are there already: they are right."""
    hidden, weight, target, _ = Case(6, 9, 4).inputs(place.device)
    before, weight = hidden.clone(), weight.requires_grad_()
    rows = fusedce.linear_cross_entropy(hidden, weight, target, reduction="none", backend=place.backend)
    loss = fusedce.linear_cross_entropy(hidden, weight, target, backend=place.backend)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rows.sum().backward()
    expected = torch.autograd.grad(fusedce.linear_cross_entropy(before, weight, target, backend=place.backend), weight)
    assert torch.equal(torch.autograd.grad(loss, weight)[0], expected[0])


H, W, Y = torch.randn(6, 4), torch.randn(9, 4), torch.arange(6)
BAD = {
    "label of the vocabulary's size": (ValueError, r"the value 9 at row 5; expected \[0, 9\)", dict(target=Y + 4)),
    "negative label": (ValueError, "value -1 at row 0", dict(target=Y - 1)),
    "label of 2**32": (ValueError, "value 4294967296 at row 0", dict(target=Y + 2**32)),
    "smallest label": (ValueError, "value -9223372036854775808 at row 0", dict(target=torch.full((6,), -(2**63)))),
    "long target": (ValueError, r"shape \(7,\).*input's shape without D", dict(target=torch.arange(7))),
    "float target": (TypeError, "'target'.*expected int64", dict(target=Y.float())),
    "bool target": (TypeError, "'target'.*bool", dict(target=Y > 2)),
    "another D": (ValueError, r"'linear_weight' has shape \(9, 5\)", dict(linear_weight=torch.randn(9, 5))),
    "short bias": (ValueError, r"'linear_bias' has shape \(8,\)", dict(linear_bias=torch.randn(8))),
    "short class weight": (ValueError, r"'weight' has shape \(2,\)", dict(weight=torch.ones(2))),
    "0-d input": (ValueError, "'input'", dict(input=torch.tensor(1.0))),
    "no vocabulary": (ValueError, "V is 0", dict(linear_weight=torch.randn(0, 4), target=torch.full((6,), IGNORE))),
    "no depth": (ValueError, "D is 0", dict(input=torch.randn(6, 0), linear_weight=torch.randn(9, 0))),
    "short token weight": (ValueError, r"'token_weight' has shape \(5,\).*target's shape",
                           dict(token_weight=torch.ones(5))),
    "short temperature": (ValueError, r"'temperature' has shape \(2,\)", dict(temperature=torch.ones(2))),
    "whole temperature": (TypeError, "'temperature'.*int64", dict(temperature=torch.ones(6, dtype=torch.int64))),
    "z-loss below 0": (ValueError, "'z_loss' is -0.1", dict(z_loss=-0.1)),
    "vocabulary of 0": (ValueError, "'vocab_size' is 0; expected an int from 1 to V = 9", dict(vocab_size=0)),
    "vocabulary above V": (ValueError, "'vocab_size' is 10", dict(vocab_size=10)),
    "label in the padding": (ValueError, r"the value 5 at row 5; expected \[0, 5\)", dict(vocab_size=5)),
    "shift without a sequence": (ValueError, r"'target' has shape \(6,\).*\(B, S\) with shift", dict(shift=True)),
    "complex": (TypeError, "complex64", dict(input=H.to(torch.complex64))),
    "integers": (TypeError, "int64; expected float32", dict(input=H.long())),
    "sparse": (TypeError, "sparse", dict(linear_weight=W.to_sparse())),
    "other device": (ValueError, "on meta, argument 'input' on cpu", dict(linear_weight=W.to("meta"))),
    "not a tensor": (TypeError, "type list", dict(linear_weight=[1.0])),
    "reduction": (ValueError, "'avg'; expected one of none, mean, sum", dict(reduction="avg")),
    "label smoothing above 1": (ValueError, "label_smoothing", dict(label_smoothing=1.1)),
    "label smoothing with softcap": (ValueError, "'label_smoothing' and 'softcap'",
                                     dict(label_smoothing=0.1, softcap=2.0)),
    "softcap of 0": (ValueError, "softcap", dict(softcap=0.0)),
    "softcap of NaN": (ValueError, "softcap", dict(softcap=float("nan"))),
    "temperature of 0": (ValueError, "temperature", dict(temperature=0)),
    "temperature of True": (TypeError, "temperature", dict(temperature=True)),
    "ignore_index": (TypeError, "ignore_index", dict(ignore_index=1.5)),
    "check": (ValueError, "check", dict(check="never")),
    "backend": (ValueError, "'cuda'; expected one of auto, eager, triton, native", dict(backend="cuda")),
    "a backend that cannot run": (RuntimeError, "need a GPU", dict(backend="native")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_the_next_call_works(name: str) -> None:
    error, message, change = BAD[name]
    arguments = {"input": H, "linear_weight": W, "target": Y, **change}
    with pytest.raises(error, match=message):
        fusedce.linear_cross_entropy(
            arguments.pop("input"), arguments.pop("linear_weight"), arguments.pop("target"), **arguments
        )
    good = fusedce.linear_cross_entropy(H, W, Y)
    assert torch.allclose(good, torch.nn.functional.cross_entropy(H @ W.t(), Y))


WRONG_FOR_THE_OP = [
    dict(target=Y[:3]),
    dict(target=Y.int()),
    dict(weight=torch.randn(9, 5)),
    dict(weight=W.bfloat16()),
    dict(weight=torch.empty(0, 4)),
    dict(bias=torch.ones(3)),
    dict(temperature=0.0),
    dict(softcap=-1.0),
]


@pytest.mark.parametrize("change", WRONG_FOR_THE_OP)
def test_a_direct_call_of_the_op_reads_nothing_out_of_bounds(change: dict[str, object]) -> None:
    arguments = {"hidden": H, "weight": W, "target": Y, "bias": None, **change}
    with pytest.raises((ValueError, TypeError)):
        torch.ops.fusedce.linear_logprob(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_bad_label_on_a_gpu_is_reported_without_a_sync(backend: str) -> None:
    hidden, weight = H.cuda(), W.cuda()
    target = Y.cuda()
    target[4] = 9
    torch.cuda.synchronize()
    out = fusedce.linear_logprob(hidden, weight, target, backend=backend)
    assert out.logprob.isnan().tolist() == [False] * 4 + [True, False]
    with pytest.raises(ValueError, match="value 9 at row 4"):
        fusedce.check_flags()
    fusedce.check_flags()
    with pytest.raises(ValueError, match="value 9 at row 4"):
        fusedce.linear_cross_entropy(hidden, weight, target, check="sync", backend=backend)
    assert not fusedce.linear_cross_entropy(hidden, weight, Y.cuda(), check="sync", backend=backend).isnan()
