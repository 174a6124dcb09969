"""main_grad: the weight's gradient added in fp32 to a tensor of the caller's, by every function of the head."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import fusedce
from fusedce.nn.lm_head import FusedLMHead
from fusedce.ops import registry
from fusedce.options import LogitOptions, Upstream, Wanted
from tests.conftest import Place
from tests.linear_ce_cases import IGNORE, Case, in_fp64
from tests.paired import assert_bites, assert_close

NATIVE = True

BF16, FP16, FP32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROWS, VOCAB, DEPTH = 40, 150, 24


def rates(like: Tensor) -> Tensor:
    return torch.linspace(-1.0, 2.0, ROWS, device=like.device, dtype=like.dtype)


def mean(h: Tensor, w: Tensor, y: Tensor, b: Tensor, **options: object) -> Tensor:
    return 3 * fusedce.linear_cross_entropy(h, w, y, linear_bias=b, z_loss=0.01, **options)


def smoothed(h: Tensor, w: Tensor, y: Tensor, b: Tensor, **options: object) -> Tensor:
    classes = torch.linspace(0.5, 1.5, VOCAB, device=h.device)
    options |= {"label_smoothing": 0.2, "weight": classes, "reduction": "sum"}
    return fusedce.linear_cross_entropy(h, w, y, linear_bias=b, **options) / ROWS


def unreduced(h: Tensor, w: Tensor, y: Tensor, b: Tensor, **options: object) -> Tensor:
    loss = fusedce.linear_cross_entropy(h, w, y, linear_bias=b, label_smoothing=0.1, reduction="none", **options)
    return loss @ rates(loss)


def rows(h: Tensor, w: Tensor, y: Tensor, b: Tensor, **options: object) -> Tensor:
    out = fusedce.linear_logprob(h, w, y, bias=b, softcap=4.0, **options)
    return out.logprob @ rates(out.logprob) + 0.1 * (out.entropy @ rates(out.entropy)) + out.lse.sum()


def policy(h: Tensor, w: Tensor, y: Tensor, b: Tensor, **options: object) -> Tensor:
    return -0.5 * fusedce.linear_policy_loss(h, w, y, lambda logprob: logprob.exp() - logprob, bias=b, **options)


def heads(h: Tensor, w: Tensor, y: Tensor, b: Tensor, **options: object) -> Tensor:
    pair = (h.reshape(2, -1, DEPTH), w, y.reshape(2, -1))
    return fusedce.linear_cross_entropy_heads(*pair, bias=b, head_weight=(1.0, 0.3), **options).loss


FUNCTIONS = [mean, smoothed, unreduced, rows, policy, heads]


def leaves_of(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, target, bias = Case(ROWS, VOCAB, DEPTH, dtype=dtype, has_bias=True).inputs(device)
    return hidden.requires_grad_(), weight.requires_grad_(), target, bias.requires_grad_()


@pytest.mark.parametrize(
    ("run", "dtype"),
    [*((run, dtype) for run in FUNCTIONS for dtype in (FP32, BF16)), (mean, FP16), (rows, FP16)],
    ids=lambda value: str(getattr(value, "__name__", value)),
)
def test_main_grad_is_the_weight_s_gradient(run: Callable, dtype: torch.dtype, place: Place) -> None:
    """Against fp64 by the same function; `.grad` of the others is what it is without main_grad, bit by bit."""
    leaves = leaves_of(dtype, place.device)
    run(*leaves, backend=place.backend).backward()
    hidden, weight, _, bias = leaves
    expected = [hidden.grad, weight.grad, bias.grad]
    hidden.grad = weight.grad = bias.grad = None
    main_grad = torch.zeros(VOCAB, DEPTH, device=place.device)
    run(*leaves, main_grad=main_grad, backend=place.backend).backward()
    assert weight.grad is None
    assert torch.equal(hidden.grad, expected[0]) and torch.equal(bias.grad, expected[2])
    exact = [t.requires_grad_(t.is_floating_point()) for t in in_fp64([t.detach() for t in leaves])]
    (gold,) = torch.autograd.grad(run(*exact), exact[1])
    assert_close(main_grad, gold, expected[1])
    assert_bites(gold, expected[1])
    if dtype != FP32 and place.backend != "native":
        error = (main_grad.double().cpu() - gold).norm()
        assert error <= 1.05 * (expected[1].double().cpu() - gold).norm()
        # rounded nowhere: most of the sums are no numbers of 16 bits
        assert (main_grad != main_grad.to(dtype).float()).float().mean() > 0.8


@pytest.mark.parametrize("run", [mean, smoothed, rows, policy])
def test_every_backward_adds(run: Callable, place: Place) -> None:
    """To what is there; with retain_graph once more; and with the forward of another batch before it."""
    leaves = leaves_of(BF16, place.device)
    one = torch.zeros(VOCAB, DEPTH, device=place.device)
    run(*leaves, main_grad=one, backend=place.backend).backward()
    before = torch.randn(VOCAB, DEPTH, device=place.device)
    total = before.clone()
    first = run(*leaves, main_grad=total, backend=place.backend)
    second = run(*leaves, main_grad=total, backend=place.backend)
    assert torch.equal(total, before)
    first.backward(retain_graph=True)
    second.backward()
    first.backward(torch.full_like(first, -4.0))
    torch.testing.assert_close(total - before, -2 * one, rtol=1e-4, atol=2e-6)
    assert leaves[1].grad is None and leaves[0].grad is not None


def test_micro_batches_lose_nothing(place: Place) -> None:
    """A large gradient and ten small ones, each below half an ulp of bf16 beside it: `.grad` in bf16 stays what it was,
    main_grad has all of them."""
    hidden = torch.ones(1, 8, dtype=BF16, device=place.device)
    weight = torch.zeros(2, 8, dtype=BF16, device=place.device).requires_grad_()
    target = torch.zeros(1, dtype=torch.int64, device=place.device)
    main_grad = torch.zeros(2, 8, device=place.device)
    for scale in [1.0] + [1e-3] * 10:
        for options in ({}, {"main_grad": main_grad}):
            loss = fusedce.linear_cross_entropy(hidden, weight, target, backend=place.backend, **options)
            loss.backward(torch.tensor(scale, device=place.device))
    torch.testing.assert_close(main_grad[1], torch.full_like(main_grad[1], 0.5 * 1.01), rtol=1e-4, atol=0.0)
    assert (weight.grad[1].float() == 0.5).all()


def test_what_is_frozen_and_what_is_padding(place: Place) -> None:
    hidden, weight, target, _ = leaves_of(FP32, place.device)
    target = torch.where(target >= 100, IGNORE, target)
    frozen = torch.full((VOCAB, DEPTH), 7.0, device=place.device)
    for run in (fusedce.linear_cross_entropy, lambda *t, **o: fusedce.linear_logprob(*t, **o).logprob.sum()):
        run(hidden, weight.detach(), target, main_grad=frozen, backend=place.backend).backward()
        assert (frozen == 7.0).all() and hidden.grad is not None
        padded = torch.zeros(VOCAB, DEPTH, device=place.device)
        padded[100:] = torch.nan
        options = {"vocab_size": 100, "backend": place.backend}
        run(hidden.detach(), weight, target, main_grad=padded, **options).backward()
        assert weight.grad is None and padded[100:].isnan().all()
        (expected,) = torch.autograd.grad(run(hidden, weight, target, **options), weight)
        torch.testing.assert_close(padded[:100], expected[:100], rtol=1e-6, atol=1e-7)
        with torch.no_grad():
            run(hidden, weight, target, main_grad=frozen, backend=place.backend)
        run(hidden[:0], weight, target[:0], main_grad=frozen, backend=place.backend).backward()
        assert (frozen == 7.0).all()


class Made(TorchDispatchMode):
    """How many tensors of the weight's size, or larger, torch's functions made."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)}
        if isinstance(out, Tensor) and out.numel() >= VOCAB * DEPTH and out.untyped_storage().data_ptr() not in known:
            self.count += 1
        return out


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_the_log_prob_s_backward_makes_nothing_of_the_weight_s_size(dtype: torch.dtype, place: Place) -> None:
    if place.backend == "eager":
        dtype = FP32  # from 16 bits it makes a copy of the weight in fp32
    hidden, weight, target, _ = (t.detach() for t in leaves_of(dtype, place.device))
    hidden, target = hidden[:8], target[:8]  # a chunk of logits must be smaller than the weight
    choice = registry.choose("linear_logprob", place.backend, hidden.device, dtype)
    logprob, entropy, _, normalizer = torch.ops.fusedce.linear_logprob(hidden, weight, target, None)
    ones, backward = torch.ones_like(logprob), registry.function(choice, "linear_logprob_backward")
    main_grad, counts = torch.zeros(VOCAB, DEPTH, device=place.device), []
    for wanted in (Wanted(True, True, False), Wanted(True, True, False, True, main_grad)):
        with Made() as made:
            backward(Upstream(ones, None, None), hidden, weight, target, None, logprob, entropy, normalizer,
                     LogitOptions(IGNORE), wanted)  # fmt: skip
        counts.append(made.count)
    assert counts[0] >= 1
    if place.backend != "native":
        assert counts[1] == 0 and main_grad.any()


# ── Megatron's flag, and the module ─────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("run", [mean, rows, policy, heads])
def test_megatron_s_flag_is_set_and_its_hook_runs(run: Callable, place: Place) -> None:
    """As Megatron's DDP does: a hook behind the parameter's gradient drops that gradient where the flag says so."""
    hidden, weight, target, bias = leaves_of(BF16, place.device)
    weight = nn.Parameter(weight.detach())
    weight.main_grad = torch.zeros(VOCAB, DEPTH, device=place.device)
    weight.grad_added_to_main_grad = False
    seen = []

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None and not parameter.grad.any()
        seen.append(parameter.grad_added_to_main_grad)
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(hook)
    expected = torch.zeros(VOCAB, DEPTH, device=place.device)
    run(hidden, weight.detach().requires_grad_(), target, bias, main_grad=expected, backend=place.backend).backward()
    with torch.no_grad():
        run(hidden, weight, target, bias, main_grad=weight.main_grad, backend=place.backend)
    assert weight.grad_added_to_main_grad is False
    run(hidden, weight, target, bias, main_grad=weight.main_grad, backend=place.backend).backward()
    assert seen == [True] and torch.equal(weight.main_grad, expected)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_s_option(tied: bool) -> None:
    embedding = nn.Embedding(29, 8)
    head = FusedLMHead.tied_to(embedding, main_grad=True) if tied else FusedLMHead(8, 29, main_grad=True)
    hidden, target = torch.randn(5, 8), torch.randint(0, 29, (5,))
    with pytest.raises(ValueError, match="main_grad=True, and the weight has no attribute main_grad"):
        head(hidden, target)
    with torch.no_grad():
        assert head(hidden, target).isfinite()
    head.weight.main_grad = torch.zeros(29, 8)
    (head(hidden, target) + head.logprobs(hidden, target).logprob.mean()).backward()
    assert head.weight.grad is None and head.weight.main_grad.abs().max() < 1e-6
    head(hidden, target).backward()
    leaf = head.weight.detach().requires_grad_()
    F.cross_entropy(hidden @ leaf.t(), target).backward()
    torch.testing.assert_close(head.weight.main_grad, leaf.grad, rtol=1e-5, atol=1e-6)


# ── the op's contract ───────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("run", [mean, smoothed, rows, heads])
def test_fullgraph_compile(run: Callable, place: Place) -> None:
    """Bit by bit what eager mode gives; two forwards before their backwards are torch's error, not a wrong sum."""
    leaves = leaves_of(FP32, place.device)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected, found = (torch.ones(VOCAB, DEPTH, device=place.device) for _ in range(2))
    for _ in range(2):
        run(*leaves, main_grad=expected, backend=place.backend).backward()
        compiled(*leaves, main_grad=found, backend=place.backend).backward()
        assert torch.equal(found, expected) and leaves[1].grad is None
    losses = [compiled(*leaves, main_grad=found, backend=place.backend) for _ in range(2)]
    losses[0].backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[1].backward()


def test_the_flag_cannot_be_compiled() -> None:
    hidden, weight, target, bias = leaves_of(FP32, "cpu")
    weight = nn.Parameter(weight.detach())
    weight.grad_added_to_main_grad = False
    compiled = torch.compile(mean, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="grad_added_to_main_grad cannot be compiled"):
        compiled(hidden, weight, target, bias, main_grad=torch.zeros(VOCAB, DEPTH))


def test_opcheck_linear_logprob_into(place: Place) -> None:
    rows = 9
    hidden, weight, target, bias = Case(rows, 33, 8, has_bias=True).inputs(place.device)
    main_grad, options = torch.zeros(33, 8, device=place.device), {"backend": place.backend}
    leaves = (hidden.requires_grad_(), weight.requires_grad_(), target, bias.requires_grad_(), None, main_grad)
    opcheck(torch.ops.fusedce.linear_logprob_into.default, leaves, options)
    opcheck(torch.ops.fusedce.linear_ce.default, leaves[:4], {"main_grad": main_grad, **options})
    hidden, weight, bias = (t.detach() for t in (hidden, weight, bias))
    logprob, entropy, _, normalizer = torch.ops.fusedce.linear_logprob(hidden, weight, target, bias, **options)
    arguments = (main_grad, torch.randn_like(logprob), None, None, hidden, weight, target, bias, None, logprob, entropy)
    mask = [True, True, True]
    opcheck(
        torch.ops.fusedce.linear_logprob_into_backward.default,
        (*arguments, normalizer, IGNORE, 1.0, 0.0, mask, place.backend),
    )
    numbers, mode = torch.ones(rows, device=place.device), {"ignore_index": IGNORE, "temperature": 1.0, "softcap": 0.0}
    arguments = (hidden.bfloat16(), weight.bfloat16(), target, None, None, numbers, None, None)
    mode |= {"mask": [True, True, False], "fp32_weight_grad": True, **options}
    opcheck(torch.ops.fusedce.linear_ce_sum.default, arguments, mode)


def test_double_backward_is_refused(place: Place) -> None:
    leaves = leaves_of(FP32, place.device)
    for run in (mean, rows, policy):
        loss = run(*leaves, main_grad=torch.zeros(VOCAB, DEPTH, device=place.device), backend=place.backend)
        (grad,) = torch.autograd.grad(loss, leaves[0], torch.ones_like(loss).requires_grad_(), create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


BAD = {
    "bf16": (TypeError, "'main_grad'.*expected float32", torch.zeros(9, 4, dtype=BF16)),
    "fp64 beside fp32": (TypeError, "'main_grad'.*float64", torch.zeros(9, 4, dtype=F64)),
    "a row too few": (ValueError, r"'main_grad' has shape \(8, 4\).*the weight's shape", torch.zeros(8, 4)),
    "flat": (ValueError, r"'main_grad' has shape \(36,\)", torch.zeros(36)),
    "transposed": (ValueError, "'main_grad' is not contiguous", torch.zeros(4, 9).t()),
    "a leaf": (ValueError, "'main_grad' requires grad", torch.zeros(9, 4, requires_grad=True)),
    "other device": (ValueError, "'main_grad' is on meta", torch.zeros(9, 4, device="meta")),
    "no tensor": (TypeError, "'main_grad' has type bool", True),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_the_next_call_works(name: str) -> None:
    error, message, main_grad = BAD[name]
    hidden, weight = torch.randn(6, 4), torch.randn(9, 4, requires_grad=True)
    target = torch.arange(6)
    for run in (fusedce.linear_cross_entropy, fusedce.linear_logprob,
                lambda *t, **o: fusedce.linear_policy_loss(*t, torch.exp, **o)):  # fmt: skip
        with pytest.raises(error, match=message):
            run(hidden, weight, target, main_grad=main_grad)
    good = torch.zeros(9, 4)
    fusedce.linear_cross_entropy(hidden, weight, target, main_grad=good).backward()
    (expected,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.t(), target), weight)
    torch.testing.assert_close(good, expected)


def test_a_direct_call_of_the_op_is_checked() -> None:
    hidden, weight, target, _ = Case(6, 9, 4).inputs("cpu")
    for main_grad in (torch.zeros(8, 4), torch.zeros(9, 4, dtype=BF16)):
        with pytest.raises(ValueError, match="main_grad"):
            torch.ops.fusedce.linear_logprob_into(hidden, weight, target, None, None, main_grad)
        with pytest.raises(ValueError, match="main_grad"):
            torch.ops.fusedce.linear_ce(hidden, weight.requires_grad_(), target, main_grad=main_grad)
