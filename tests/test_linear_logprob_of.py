"""linear_logprob_of: log-probs of several words a token against plain torch in fp64, values and every gradient."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

import fusedce
from fusedce import hip
from tests.conftest import Place
from tests.linear_ce_cases import IGNORE, Case, in_fp64, with_gradients
from tests.paired import assert_bites, assert_close, worst_twin

NATIVE = True

F64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def draw(case: Case, slots: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """hidden, weight, ids, bias: likely words, some of them twice, some slots ignored, some rows wholly."""
    hidden, weight, target, bias = case.inputs("cpu")
    generator = torch.Generator().manual_seed(slots)
    ids = torch.randint(0, case.vocab, (case.num_rows, slots), generator=generator)
    half = min(slots // 2, case.vocab)
    ids[:, :half] = (hidden.float() @ weight.float().t()).topk(half).indices
    ids[1::3, -1] = ids[1::3, 0]
    ids[2::4, slots // 2] = IGNORE
    ids[target == IGNORE] = IGNORE
    tensors = (hidden, weight, ids, bias)
    return tuple(t if t is None else t.to(device) for t in tensors)  # type: ignore[return-value]


def ours(case: Case, place: Place, hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None) -> list[Tensor]:
    options = {"temperature": case.temperature, "softcap": case.softcap, "backend": place.backend}
    return [fusedce.linear_logprob_of(hidden, weight, ids, bias=bias, **options)]


def plain(case: Case, hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None) -> list[Tensor]:
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == F64 else logits.float()
    if case.softcap:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    values = (logits / case.temperature).log_softmax(1).gather(1, torch.where(ids == IGNORE, 0, ids))
    return [torch.where(ids == IGNORE, 0.0, values)]


def check(case: Case, slots: int, place: Place, kind: str = "random") -> None:
    tensors = draw(case, slots, place.device)
    grad = torch.randn(case.num_rows, 2 * slots, generator=torch.Generator().manual_seed(9)).to(place.device)[:, ::2]
    grad = {"random": grad, "expanded": grad[0, 0].expand(case.num_rows, slots), "ones": torch.ones_like(grad)}[kind]
    out = with_gradients(lambda *t: ours(case, place, *t), tensors, [grad])
    twin = with_gradients(lambda *t: plain(case, *t), tensors, [grad])
    gold = with_gradients(lambda *t: plain(case, *t), in_fp64(tensors), [grad.cpu().double()])
    assert out[0].dtype == FP32
    for name, o, g, t in zip(("logprob", "d_hidden", "d_weight", "d_bias"), out, gold, twin, strict=False):
        assert_close(o, g, t, name)
        if case.num_rows >= 16 and case.vocab >= 16:
            assert_bites(g, t, name)


SHAPES = [(1, 2, 1, 2), (3, 31, 8, 3), (21, 129, 24, 5), (17, 257, 33, 40), (18, 1000, 50, 1)]
OPTIONS = [
    Case(24, 301, 48, has_bias=True),
    Case(24, 301, 48, temperature=0.6),
    Case(24, 301, 48, softcap=2.0),
    Case(24, 301, 48, has_bias=True, temperature=1.7, softcap=3.0, every_ignored=2),
]
CASES = [(Case(n, v, d, dtype=dtype), k) for n, v, d, k in SHAPES for dtype in (FP32, BF16, FP16)] + [
    (Case(**{**case.__dict__, "dtype": dtype}), 7) for case in OPTIONS for dtype in (FP32, BF16)
]


@pytest.mark.parametrize(("case", "slots"), CASES, ids=str)
def test_values_and_gradients(case: Case, slots: int, place: Place) -> None:
    check(case, slots, place)


@pytest.mark.parametrize("kind", ["expanded", "ones"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_upstream_gradients(kind: str, dtype: torch.dtype, place: Place) -> None:
    check(Case(19, 203, 24, dtype=dtype, has_bias=True), 6, place, kind)


def test_chunks_change_nothing_but_the_rounding(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCE_WORKSPACE_MB", "1")
    check(Case(140, 1100, 8), 4, place)


def test_one_slot_is_linear_logprob(place: Place) -> None:
    """One word is its own target. On a CPU bit by bit; GPU kernels may contract the two ways differently."""
    hidden, weight, target, bias = Case(40, 120, 16, BF16, has_bias=True).inputs(place.device)
    temperature = torch.linspace(0.5, 2.0, 40, device=place.device)
    rates = torch.randn(40, device=place.device)
    options = {"softcap": 5.0, "temperature": temperature, "backend": place.backend}

    def one(h: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        return [fusedce.linear_logprob_of(h, w, target[:, None], bias=b, **options)[:, 0]]

    def logprob(h: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        return [fusedce.linear_logprob(h, w, target, bias=b, with_entropy=False, **options).logprob]

    found, expected = (with_gradients(run, (hidden, weight, bias), [rates]) for run in (one, logprob))
    close = 0.0 if place.device == "cpu" else 1e-5
    torch.testing.assert_close(found[0], expected[0], rtol=close, atol=close)
    for f, e in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(f, e, rtol=1e-2, atol=1e-4)


def test_all_words_are_a_log_softmax(place: Place) -> None:
    """K = V, each word once: the probabilities sum to 1, and a gradient that is one for all of them is 1 − p·V."""
    hidden, weight, _, _ = Case(6, 50, 8).inputs(place.device)
    ids = torch.stack([torch.randperm(50) for _ in range(6)]).to(place.device)
    values = fusedce.linear_logprob_of(hidden.requires_grad_(), weight, ids, backend=place.backend)
    expected = (hidden @ weight.t()).log_softmax(1)
    torch.testing.assert_close(values, expected.gather(1, ids), rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(values.sum(), hidden)[0]
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), hidden)[0], rtol=1e-4, atol=1e-4)


def test_the_same_word_in_every_slot(place: Place) -> None:
    """More slots than a program of the kernel takes, all of one word: their gradients add up."""
    hidden, weight, _, _ = Case(5, 40, 8).inputs(place.device)
    ids = torch.full((5, 70), 7, device=place.device)
    rates = torch.randn(5, 70, device=place.device)
    many = fusedce.linear_logprob_of(hidden.requires_grad_(), weight, ids, backend=place.backend)
    one = fusedce.linear_logprob(hidden, weight, ids[:, 0], backend=place.backend).logprob
    assert torch.equal(many, one[:, None].expand(5, 70))
    found = torch.autograd.grad(many, hidden, rates)[0]
    torch.testing.assert_close(found, torch.autograd.grad(one, hidden, rates.sum(1))[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offset", [1e4, 1e8])
def test_a_common_offset_of_the_logits(offset: float, place: Place) -> None:
    """LC-A06: two equal logits are log 2 whatever they are, though fp32 has no digit left for it beside the logit."""
    hidden = torch.ones(3, 1, device=place.device)
    weight = torch.full((2, 1), offset, device=place.device, requires_grad=True)
    ids = torch.tensor([[0, 1], [1, 0], [1, IGNORE]], device=place.device)
    values = fusedce.linear_logprob_of(hidden, weight, ids, backend=place.backend)
    expected = torch.where(ids == IGNORE, 0.0, -math.log(2))
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=0.0)
    (grad,) = torch.autograd.grad(values[:, 0].sum(), weight)
    torch.testing.assert_close(grad, torch.tensor([[-0.5], [0.5]], device=place.device))


def test_certain_words_keep_their_digits(place: Place) -> None:
    """log p = −log(1 + rest), also where the certain word is not in the first slot; and its gradient."""
    gaps = torch.tensor([1.0, 5.0, 12.0, 20.0, 30.0], device=place.device)
    hidden = gaps[:, None].clone().requires_grad_()
    weight = torch.tensor([[1.0], [0.0]], device=place.device)
    ids = torch.tensor([[1, 0]], device=place.device).expand(5, 2)
    values = fusedce.linear_logprob_of(hidden, weight, ids, backend=place.backend)
    certain = -torch.log1p(torch.exp(-gaps.double()))
    torch.testing.assert_close(values[:, 1].double(), certain, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(values[:, 0].double(), certain - gaps.double(), rtol=1e-5, atol=0.0)
    (grad,) = torch.autograd.grad(values[:, 1].sum(), hidden)
    torch.testing.assert_close(grad[:, 0].double(), torch.sigmoid(-gaps.double()), rtol=1e-5, atol=0.0)


def test_masked_words_and_nan(place: Place) -> None:
    """LC-A21: a word of logit −inf has −inf and takes nothing from the others; a NaN stays in its row."""
    hidden, weight, _, _ = Case(6, 40, 8, every_ignored=0).inputs(place.device)
    bias = torch.zeros(40, device=place.device)
    bias[20:] = -math.inf
    ids = torch.tensor([[3, 25, 7]], device=place.device).repeat(6, 1)
    ids[1] = torch.tensor([30, 25, 35])
    hidden[4] = math.nan
    values = fusedce.linear_logprob_of(hidden, weight, ids, bias=bias, backend=place.backend)
    expected = F.linear(hidden, weight, bias).log_softmax(1).gather(1, ids)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert values[:4, 1].isneginf().all() and values[4].isnan().all()


def test_ignored_slots_and_rows_may_hold_anything(place: Place) -> None:
    """A row of ignored slots holds NaN, and its temperature is 0: results 0, gradients exactly 0, none in others."""
    hidden, weight, ids, _ = draw(Case(20, 60, 8, every_ignored=4), 4, place.device)
    off = (ids == IGNORE).all(1)
    assert off.sum() >= 5
    temperature = torch.where(off, 0.0, 1.3)
    clean, hidden = hidden.clone(), torch.where(off[:, None], math.nan, hidden)

    def run(h: Tensor, w: Tensor) -> list[Tensor]:
        return [fusedce.linear_logprob_of(h, w, ids, temperature=temperature, backend=place.backend)]

    rates = torch.randn(20, 4, device=place.device)
    found, expected = (with_gradients(run, (h, weight), [rates]) for h in (hidden, clean))
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
    assert not found[0][ids == IGNORE].any() and not found[1][off].any()


def test_ignored_may_be_a_word_and_dimensions_lead(place: Place) -> None:
    """ignore_index is a word of the vocabulary; hidden (2, 3, 4, D); words behind vocab_size are NaN."""
    hidden, weight, ids, _ = draw(Case(24, 60, 8, every_ignored=0), 3, place.device)
    ids = torch.where(ids == IGNORE, 5, ids % 50)
    weight = torch.cat((weight[:50], torch.full_like(weight[50:], math.nan)))
    options = {"ignore_index": 5, "vocab_size": 50, "backend": place.backend}
    hidden.requires_grad_()
    values = fusedce.linear_logprob_of(hidden.reshape(2, 3, 4, 8), weight, ids.reshape(2, 3, 4, 3), **options)
    expected = torch.where(ids == 5, 0.0, (hidden @ weight[:50].t()).log_softmax(1).gather(1, ids))
    torch.testing.assert_close(values.reshape(24, 3), expected, rtol=1e-5, atol=1e-5)
    rates = torch.randn(24, 3, device=place.device)
    found, right = (torch.autograd.grad(t.reshape(24, 3), hidden, rates)[0] for t in (values, expected))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    hidden = hidden.detach()
    assert fusedce.linear_logprob_of(hidden[0], weight, ids[0], **options).shape == (3,)
    empty = fusedce.linear_logprob_of(hidden[:0].requires_grad_(), weight, ids[:0], **options)
    empty.sum().backward()
    assert empty.shape == (0, 3)


def test_nothing_plausible_comes_out_of_a_bad_id(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the error comes later: until then the slot is NaN and its token's gradient; the others are right."""
    monkeypatch.setattr("fusedce.flags.report_outside", lambda *_, **__: None)
    hidden, weight, ids, _ = draw(Case(9, 40, 8, every_ignored=0), 3, place.device)
    right = fusedce.linear_logprob_of(hidden, weight, ids, backend=place.backend)
    bad = ids.clone()
    bad[2, 1], bad[5] = 2**32 + 3, torch.tensor([40, IGNORE, -1])
    values = fusedce.linear_logprob_of(hidden.requires_grad_(), weight, bad, backend=place.backend)
    wrong = torch.zeros(9, 3, dtype=torch.bool, device=place.device)
    wrong[2, 1] = wrong[5, 0] = wrong[5, 2] = True
    assert torch.equal(values.isnan(), wrong)
    assert torch.equal(values[~wrong & (bad == ids)], right[~wrong & (bad == ids)])
    (grad,) = torch.autograd.grad(values.sum(), hidden)
    assert torch.equal(grad.isnan().all(1), wrong.any(1)) and grad[~wrong.any(1)].isfinite().all()


def test_repeats_are_bitwise_equal(place: Place) -> None:
    case = Case(20, 200, 16, BF16, has_bias=True)
    tensors, rates = draw(case, 6, place.device), [torch.randn(20, 6, device=place.device)]
    first, again = (with_gradients(lambda *t: ours(case, place, *t), tensors, rates) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


CHECKED = [(Case(5, 7, 4, F64), 3), (Case(9, 33, 8, has_bias=True, temperature=0.5), 2), (Case(0, 3, 2), 1)]


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize(("case", "slots"), CHECKED, ids=str)
def test_opcheck_linear_logprob_of(case: Case, slots: int, needs_grad: bool, place: Place) -> None:
    if case.dtype == F64 and place.backend != "eager":
        case = Case(5, 7, 4, FP16)
    hidden, weight, ids, bias = draw(case, slots, place.device)
    leaves = [t if t is None else t.requires_grad_(needs_grad) for t in (hidden, weight, bias)]
    options = {"temperature": case.temperature, "softcap": 2.0, "backend": place.backend}
    opcheck(torch.ops.fusedce.linear_logprob_of.default, (leaves[0], leaves[1], ids, leaves[2]), options)


@pytest.mark.parametrize("mask", [[True, True, True], [True, False, False], [False, True, False]])
def test_opcheck_backward_and_its_mask(mask: list[bool], place: Place) -> None:
    hidden, weight, ids, bias = draw(Case(9, 33, 8, has_bias=True), 3, place.device)
    saved = torch.ops.fusedce.linear_logprob_of(hidden, weight, ids, bias, backend=place.backend)
    rates = torch.randn(9, 3, device=place.device)
    d_lse = torch.randn(9, device=place.device)
    arguments = (rates, d_lse, hidden, weight, ids, bias, None, *saved, IGNORE, 1.0, 0.0)
    opcheck(torch.ops.fusedce.linear_logprob_of_backward.default, (*arguments, mask, place.backend))
    whole = torch.ops.fusedce.linear_logprob_of_backward(*arguments, [True] * 3, place.backend)
    for part, all_of_it, wanted in zip(
        torch.ops.fusedce.linear_logprob_of_backward(*arguments, mask, place.backend), whole, mask, strict=True
    ):
        assert torch.equal(part, all_of_it) if wanted else part.numel() == 0


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_backward_with_a_gradient_of_the_log_sum_exp(softcap: float, place: Place) -> None:
    """What a shard of the vocabulary adds for the words of the others, over each row's own temperature."""
    case = Case(24, 301, 48, has_bias=True, softcap=softcap or None)
    hidden, weight, ids, bias = draw(case, 5, place.device)
    temperature = torch.linspace(0.5, 2.0, 24, device=place.device)
    rates, d_lse = torch.randn(24, 5, device=place.device), torch.randn(24, device=place.device)
    options = {"ignore_index": IGNORE, "softcap": softcap, "backend": place.backend}
    saved = torch.ops.fusedce.linear_logprob_of(hidden, weight, ids, bias, temperature, **options)
    found = torch.ops.fusedce.linear_logprob_of_backward(
        rates, d_lse, hidden, weight, ids, bias, temperature, *saved, IGNORE, 1.0, softcap, [True] * 3, place.backend
    )

    def reference(dtype: torch.dtype, device: str) -> list[Tensor]:
        leaves = [t.to(device, dtype).requires_grad_() for t in (hidden, weight, bias)]
        logits = F.linear(*leaves)
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        logits, words = logits / temperature.to(logits)[:, None], ids.to(device)
        kept, rows = (words != IGNORE).any(1), torch.where(words == IGNORE, 0.0, rates.to(device, dtype))
        values = logits.log_softmax(1).gather(1, words.clamp(min=0))
        of_lse = torch.where(kept, d_lse.to(device, dtype), 0.0) @ logits.logsumexp(1)
        return list(torch.autograd.grad((rows * values).sum() + of_lse, leaves))

    gold, twin, on_cpu = reference(F64, "cpu"), reference(FP32, place.device), reference(FP32, "cpu")
    for name, f, g, t, c in zip(("d_hidden", "d_weight", "d_bias"), found, gold, twin, on_cpu, strict=True):
        # Both are plain torch, and each is right by luck in other rows.
        assert_close(f, g, worst_twin([t.cpu(), c], g), name)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradcheck(softcap: float | None) -> None:
    hidden, weight, ids, bias = draw(Case(5, 7, 4, F64, has_bias=True), 3, "cpu")

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fusedce.linear_logprob_of(hidden, weight, ids, bias=bias, temperature=0.7, softcap=softcap)

    assert torch.autograd.gradcheck(run, [t.requires_grad_() for t in (hidden, weight, bias)])


def test_fullgraph_compile_is_bitwise_eager(place: Place) -> None:
    compiled = torch.compile(fusedce.linear_logprob_of, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (12, 17):
        hidden, weight, ids, _ = draw(Case(rows, 60, 8), 3, place.device)
        rates = [torch.randn(rows, 3, device=place.device)]
        expected, found = (
            with_gradients(lambda h, w, i, run=run: [run(h, w, i, backend=place.backend)], (hidden, weight, ids), rates)
            for run in (fusedce.linear_logprob_of, compiled)
        )
        assert all(torch.equal(e, f) for e, f in zip(expected, found, strict=True))


def test_second_backward_and_double_backward(place: Place) -> None:
    hidden, weight, ids, _ = draw(Case(12, 60, 8), 3, place.device)
    loss = fusedce.linear_logprob_of(hidden.requires_grad_(), weight, ids, backend=place.backend).sum()
    first, second = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(loss, hidden, create_graph=True)[0].sum().backward()
    assert fusedce.linear_logprob_of(
        hidden.to("meta"), weight.to("meta"), ids.to("meta"), backend="auto"
    ).shape == (12, 3)  # fmt: skip


H, W, IDS = torch.randn(6, 4), torch.randn(9, 4), torch.arange(12).reshape(6, 2) % 9
BAD = {
    "word of the vocabulary's size": (ValueError, r"'ids' has the value 9 at row 8; expected \[0, 9\)",
                                      dict(ids=torch.tensor([[1, 2]] * 4 + [[9, 3], [0, 0]]))),
    "negative word": (ValueError, "value -1 at row 0", dict(ids=IDS - 1)),
    "no slots": (ValueError, "K is 0", dict(ids=IDS[:, :0])),
    "too few rows": (ValueError, r"'ids' has shape \(5, 2\)", dict(ids=IDS[:5])),
    "one word a token": (ValueError, r"'ids' has shape \(6,\)", dict(ids=IDS[:, 0])),
    "float ids": (TypeError, "'ids'.*expected int64", dict(ids=IDS.float())),
    "another D": (ValueError, r"'weight' has shape \(9, 5\)", dict(weight=torch.randn(9, 5))),
    "short bias": (ValueError, r"'bias' has shape \(8,\)", dict(bias=torch.randn(8))),
    "short temperature": (ValueError, r"'temperature' has shape \(2,\).*hidden's shape without D",
                          dict(temperature=torch.ones(2))),
    "temperature of 0": (ValueError, "temperature", dict(temperature=0.0)),
    "softcap of 0": (ValueError, "softcap", dict(softcap=0.0)),
    "check": (ValueError, "check", dict(check="never")),
    "vocab_size": (ValueError, "'vocab_size' is 0", dict(vocab_size=0)),
    "other device": (ValueError, "on meta", dict(weight=W.to("meta"))),
    "CPU tensors for a GPU": (RuntimeError, "the native kernels need a GPU", dict(backend="native")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_the_next_call_works(name: str) -> None:
    error, message, change = BAD[name]
    with pytest.raises(error, match=message):
        fusedce.linear_logprob_of(**{"hidden": H, "weight": W, "ids": IDS, **change})
    torch.testing.assert_close(fusedce.linear_logprob_of(H, W, IDS), (H @ W.t()).log_softmax(1).gather(1, IDS))


@pytest.mark.parametrize("change", [dict(ids=IDS[:4]), dict(ids=IDS.int()), dict(ids=IDS[:, :0]), dict(bias=W[:3, 0])])
def test_a_direct_call_of_the_op_reads_nothing_out_of_bounds(change: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        torch.ops.fusedce.linear_logprob_of(**{"hidden": H, "weight": W, "ids": IDS, "bias": None, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "triton", *(["native"] if hip.unavailable() is None else [])])
def test_a_bad_id_on_a_gpu_is_reported_without_a_sync(backend: str) -> None:
    ids = IDS.cuda()
    ids[4, 1] = 9
    fusedce.linear_logprob_of(H.cuda(), W.cuda(), ids, backend=backend)
    with pytest.raises(ValueError, match="'ids' has the value 9 at row 9"):
        fusedce.check_flags()
    with pytest.raises(ValueError, match="'ids' has the value 9 at row 9"):
        fusedce.linear_logprob_of(H.cuda(), W.cuda(), ids, check="sync", backend=backend)
    assert fusedce.linear_logprob_of(H.cuda(), W.cuda(), IDS.cuda(), check="sync", backend=backend).isfinite().all()
