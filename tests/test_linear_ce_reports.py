"""Public bug reports of other packages' linear cross-entropy, as tests of ours. The ids are those of the reports."""

import math

import pytest
import torch
import torch.nn.functional as F

import fusedce
from tests.conftest import Place
from tests.linear_ce_cases import IGNORE, Case, in_fp64, with_gradients
from tests.paired import assert_close

NATIVE = True

INF = float("inf")


def ce(place: Place, hidden, head, target, **options):  # type: ignore[no-untyped-def]
    return fusedce.linear_cross_entropy(hidden, head, target, backend=place.backend, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_liger_1298_weighted_sum_of_unreduced_losses(dtype: torch.dtype, place: Place) -> None:
    """LC-A01: with reduction "none", d_weight and d_bias were multiplied by the first upstream gradient."""
    tensors = Case(64, 128, 32, dtype=dtype, has_bias=True, every_ignored=0).inputs(place.device)
    rates = torch.rand(64, device=place.device)

    def fused(h, w, y, b):  # type: ignore[no-untyped-def]
        return [ce(place, h, w, y, linear_bias=b, reduction="none")]

    def plain(h, w, y, b):  # type: ignore[no-untyped-def]
        logits = F.linear(h, w, b)
        return [F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), y, reduction="none")]

    out, twin = with_gradients(fused, tensors, [rates]), with_gradients(plain, tensors, [rates])
    for o, g, t in zip(out, with_gradients(plain, in_fp64(tensors), [rates.cpu().double()]), twin, strict=True):
        assert_close(o, g, t)


def test_ml_cross_entropy_52_large_bias(place: Place) -> None:
    """LC-A04: a bias made the loss far too low, often negative."""
    hidden, weight, target, _ = Case(50, 507, 123).inputs(place.device)
    bias = 10 * torch.randn(507, device=place.device)
    bias[3] += 20
    for softcap in (None, 5.0):
        loss = ce(place, hidden, weight, target, linear_bias=bias, reduction="none", softcap=softcap)
        logits = F.linear(hidden.double(), weight.double(), bias.double())
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        assert (loss >= 0).all()
        assert torch.allclose(loss.double(), F.cross_entropy(logits, target, reduction="none"), rtol=1e-5, atol=1e-5)


def test_ml_cross_entropy_14_many_rows_few_words(place: Place) -> None:
    """LC-A05: a large difference in d_weight for many tokens and few classes."""
    rows = 8191 if place.device == "cuda" else 1023
    tensors = Case(rows, 32, 64, dtype=torch.bfloat16).inputs(place.device)
    one = [torch.ones((), device=place.device)]
    out = with_gradients(lambda h, w, y, b: [ce(place, h, w, y)], tensors, one)
    twin = with_gradients(lambda h, w, y, b: [F.cross_entropy((h @ w.t()).float(), y)], tensors, one)
    gold = with_gradients(
        lambda h, w, y, b: [F.cross_entropy(h @ w.t(), y)], in_fp64(tensors), [torch.ones(()).double()]
    )
    for o, g, t in zip(out, gold, twin, strict=True):
        assert_close(o, g, t)


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e6, 1e8])
def test_pytorch_195829_common_offset(offset: float, place: Place) -> None:
    """LC-A06: a large common offset of the logits gave a wrong loss. Two equal logits: log 2 for any offset."""
    hidden = torch.ones(3, 1, device=place.device, requires_grad=True)
    weight = torch.full((2, 1), offset, device=place.device, requires_grad=True)
    target = torch.tensor([0, 1, 0], device=place.device)
    out = fusedce.linear_logprob(hidden, weight, target, backend=place.backend)
    assert torch.allclose(-out.logprob, torch.full_like(out.logprob, math.log(2)), rtol=1e-6)
    assert torch.allclose(out.entropy, torch.full_like(out.entropy, math.log(2)), rtol=1e-6)
    (-out.logprob.sum()).backward()
    assert torch.allclose(weight.grad, torch.tensor([[-0.5], [0.5]], device=place.device))


def test_pytorch_195829_masked_words(place: Place) -> None:
    """LC-A21: a word of logit −inf contributes nothing; a row of nothing else is NaN; a NaN stays in its row."""
    hidden, weight, target, _ = Case(8, 40, 6, every_ignored=0).inputs(place.device)
    bias = torch.zeros(40, device=place.device)
    bias[20:] = -INF
    target %= 20
    hidden[2, 1] = math.nan
    hidden.requires_grad_(), weight.requires_grad_()
    out = fusedce.linear_logprob(hidden, weight, target, bias=bias, backend=place.backend)
    expected = F.linear(hidden, weight, bias).double().log_softmax(1).gather(1, target[:, None])[:, 0]
    assert out.logprob.isnan().tolist() == [row == 2 for row in range(8)]
    assert torch.allclose(out.logprob.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    good = torch.arange(8, device=place.device) != 2
    (out.logprob + out.entropy)[good].sum().backward()
    assert hidden.grad[good].isfinite().all() and not weight.grad[20:][:, :].nan_to_num().any()
    nothing = fusedce.linear_logprob(hidden, weight, target, bias=torch.full_like(bias, -INF), backend=place.backend)
    assert nothing.logprob.isnan().all()


def test_axolotl_3767_labels_out_of_range() -> None:
    """LC-A07: a label outside the vocabulary matched no tile, and a plausible wrong loss came back."""
    hidden, weight, target, _ = Case(33, 65, 4, every_ignored=0).inputs("cpu")
    for value in (65, 66, -1, -2, 2**31, -(2**31)):
        for row in (0, 16, 32):
            bad = target.clone()
            bad[row] = value
            with pytest.raises(ValueError, match=f"'target' has the value {value} at row {row}; expected .0, 65"):
                fusedce.linear_cross_entropy(hidden, weight, bad)
            assert fusedce.linear_cross_entropy(hidden, weight, target).isfinite()


def test_liger_243_every_option_is_alive(place: Place) -> None:
    """LC-A09: an option was accepted and never passed on."""
    hidden, weight, target, bias = Case(30, 50, 8, has_bias=True).inputs(place.device)
    plain = ce(place, hidden, weight, target)
    class_weight = torch.rand(50, device=place.device)
    for change in (dict(linear_bias=bias), dict(temperature=0.5), dict(softcap=1.0), dict(reduction="sum"),
                   dict(weight=class_weight), dict(ignore_index=int(target[1]))):  # fmt: skip
        kept = target if "ignore_index" not in change else torch.where(target == IGNORE, target[1], target)
        assert ce(place, hidden, weight, kept, **change) != plain, change


@pytest.mark.parametrize("needs", [(h, w, b) for h in (0, 1) for w in (0, 1) for b in (0, 1)])
def test_liger_507_every_combination_of_requires_grad(needs: tuple[int, int, int], place: Place) -> None:
    """LC-A15: the loss was 0 whenever the input did not require a gradient."""
    case = Case(12, 30, 8, has_bias=True)
    expected = ce(place, *case.inputs(place.device)[:3], linear_bias=case.inputs(place.device)[3])
    hidden, weight, target, bias = case.inputs(place.device)
    for tensor, need in zip((hidden, weight, bias), needs, strict=True):
        tensor.requires_grad_(bool(need))
    loss = ce(place, hidden, weight, target, linear_bias=bias)
    # With gradients the native loss takes other kernels: the same number, rounded on another way.
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
    if any(needs):
        loss.backward()
    assert [t.grad is not None for t in (hidden, weight, bias)] == [bool(n) for n in needs]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(ce(place, hidden, weight, target, linear_bias=bias), expected)


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_liger_305_mixed_dtypes(hidden_dtype: torch.dtype, weight_dtype: torch.dtype, place: Place) -> None:
    """LC-A12: bf16 hidden with an fp32 head. The head is cast to hidden's dtype; under autocast, F.linear's rule. Every
    gradient has its tensor's own dtype."""
    hidden, weight, target, _ = Case(12, 30, 8).inputs(place.device)
    hidden, weight = hidden.to(hidden_dtype).requires_grad_(), weight.to(weight_dtype).requires_grad_()
    plain = torch.autograd.grad(ce(place, hidden, weight, target), (hidden, weight))
    cast = torch.autograd.grad(ce(place, hidden, weight.to(hidden_dtype), target), (hidden, weight))
    assert all(torch.equal(p, c) and p.dtype == t.dtype for p, c, t in zip(plain, cast, (hidden, weight), strict=True))
    with torch.autocast(place.device, torch.bfloat16):
        loss = ce(place, hidden, weight, target)
    loss.backward()
    assert loss.dtype == torch.float32
    assert (hidden.grad.dtype, weight.grad.dtype) == (hidden_dtype, weight_dtype)
    twin = F.cross_entropy((hidden.bfloat16() @ weight.bfloat16().t()).float(), target)
    assert_close(loss, F.cross_entropy(hidden.bfloat16().double() @ weight.bfloat16().double().t(), target), twin)


def test_liger_1432_logits_are_not_rounded(place: Place) -> None:
    """LC-A22: "fp32" logits came from a bf16 GEMM. Ours keep the fp32 sum: log-probs within 1e-5, not within 2e-2."""
    hidden, weight, target, _ = Case(64, 2000, 256, dtype=torch.bfloat16, every_ignored=0).inputs(place.device)
    if place.backend == "triton" and place.device == "cpu":
        hidden, target = hidden[:16], target[:16]
    out = fusedce.linear_logprob(hidden, weight, target, backend=place.backend)
    gold = (hidden.double() @ weight.double().t()).log_softmax(1).gather(1, target[:, None])[:, 0]
    assert (out.logprob.double() - gold).abs().max() < 1e-5


def test_unsloth_8261_micro_batches_sum_to_the_batch(place: Place) -> None:
    """LC-A14: three components each divided by the token count. A sum over micro-batches, divided once, is the
    batch's."""
    hidden, weight, target, _ = Case(64, 50, 8).inputs(place.device)
    count = (target != IGNORE).sum()
    whole = ce(place, hidden, weight, target)
    parts = [ce(place, hidden[s : s + 8], weight, target[s : s + 8], reduction="sum") / count for s in range(0, 64, 8)]
    assert torch.allclose(whole, torch.stack(parts).sum(), rtol=1e-6)


def test_running_maximum_is_load_bearing(place: Place) -> None:
    """Logits past 88 overflow exp in fp32; the running maximum is what keeps them right."""
    hidden = 300 * torch.ones(2, 1, device=place.device)
    weight = torch.linspace(-1, 1, 900, device=place.device)[:, None].contiguous()
    target = torch.tensor([899, 0], device=place.device)
    loss = ce(place, hidden, weight, target, reduction="none")
    gold = F.cross_entropy((hidden.double() @ weight.double().t()), target, reduction="none")
    assert torch.allclose(loss.double(), gold, rtol=1e-5)
    # and the order of the vocabulary does not matter: the maximum first, or last
    assert torch.allclose(ce(place, hidden, weight.flip(0), 899 - target, reduction="none"), loss, rtol=1e-6)


@pytest.mark.gpu
def test_liger_803_more_than_2_31_elements() -> None:
    """LC-A03: N·D and N·V past 2³¹ read out of bounds by 32-bit offsets. First and last rows against a slice."""
    for rows, vocab, depth in ((524_289, 256, 4096), (14_200, 151_936, 256), (70_001, 300, 64)):
        generator = torch.Generator("cuda").manual_seed(0)
        hidden = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        weight = torch.randn(vocab, depth, device="cuda", dtype=torch.bfloat16, generator=generator) * depth**-0.5
        target = torch.randint(0, vocab, (rows,), device="cuda", generator=generator)
        out = fusedce.linear_logprob(hidden, weight, target, backend="triton")
        out.logprob.sum().backward()
        for ends in (slice(0, 64), slice(rows - 64, rows)):
            part = hidden[ends].detach().double().requires_grad_()
            gold = (part @ weight.double().t()).log_softmax(1).gather(1, target[ends, None])[:, 0]
            gold.sum().backward()
            assert (out.logprob[ends].double() - gold).abs().max() < 1e-4
            assert (hidden.grad[ends].double() - part.grad).norm() < 1e-2 * part.grad.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton"])
def test_no_sync_and_graph_capture(backend: str) -> None:
    """No host sync in forward or backward; a CUDA graph of both replays with new inputs."""
    case = Case(200, 1000, 64, dtype=torch.bfloat16)
    hidden, weight, target, _ = case.inputs("cuda")
    hidden.requires_grad_(), weight.requires_grad_()

    def step():  # type: ignore[no-untyped-def]
        out = fusedce.linear_logprob(hidden, weight, target, backend=backend)
        return out.logprob, *torch.autograd.grad(out.logprob.sum() + out.entropy.sum(), (hidden, weight))

    torch.use_deterministic_algorithms(False)
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            hidden.copy_(torch.randn_like(hidden))
        graph.replay()
        assert all(torch.equal(c, e) for c, e in zip(captured, step(), strict=True))


def test_reports_leave_lse_right(place: Place) -> None:
    """A row's lse is the log of its whole mass: exp(logprob) over all words sums to 1."""
    hidden, weight, _, _ = Case(5, 37, 6, every_ignored=0).inputs(place.device)
    every = torch.arange(37, device=place.device)
    for row in range(5):
        repeated = hidden[row].expand(37, -1)
        out = fusedce.linear_logprob(repeated, weight, every, backend=place.backend)
        assert torch.allclose(out.logprob.exp().sum(), torch.ones((), device=place.device), rtol=1e-5)
