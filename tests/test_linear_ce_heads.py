"""linear_cross_entropy_heads: several heads over one weight, against one call a head, in fp64."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

import fusedce
from tests.conftest import Place
from tests.linear_ce_cases import IGNORE, in_fp64, with_gradients
from tests.paired import assert_bites, assert_close

NATIVE = True

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEADS, BATCH, LENGTH, VOCAB, DEPTH = 3, 2, 11, 90, 16
FACTORS = (1.0, 0.0, -0.3)


@dataclass(frozen=True)
class Heads:
    """One loss: dtype and options."""

    dtype: torch.dtype = BF16
    reduction: str = "mean"
    shift: bool = False
    bias: bool = False
    class_weight: bool = False
    token_weight: bool = False
    row_temperature: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None

    def __str__(self) -> str:
        default = Heads()
        given = [f"{k}={v}" for k, v in self.__dict__.items() if v != getattr(default, k)]
        return ",".join(given).replace("torch.", "") or "plain"

    def tensors(self, device: str) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """hidden, weight, bias if there is one; and target, class_weight, token_weight, temperature."""
        generator = torch.Generator().manual_seed(5)
        shape = (HEADS, BATCH, LENGTH)
        leaves = [torch.randn(*shape, DEPTH, generator=generator), torch.randn(VOCAB, DEPTH, generator=generator) / 2]
        leaves += [torch.randn(VOCAB, generator=generator)] * self.bias
        of_target = shape[1:] if self.shift else shape
        target = torch.randint(0, VOCAB, of_target, generator=generator)
        target[..., ::4] = IGNORE
        numbers = (torch.rand(VOCAB, generator=generator), torch.randn(of_target, generator=generator))
        constants = (target, *numbers, 0.5 + torch.rand(shape, generator=generator))
        return [t.to(device, self.dtype) for t in leaves], tuple(t.to(device) for t in constants)

    def fused(self, place: Place, constants: tuple[Tensor, ...]):  # type: ignore[no-untyped-def]
        """A function of the leaves: the loss, then the heads' own."""
        target, class_weight, token_weight, temperature = constants

        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
            return list(
                fusedce.linear_cross_entropy_heads(
                    hidden, weight, target, head_weight=FACTORS, shift=self.shift, bias=bias,
                    class_weight=class_weight if self.class_weight else None, reduction=self.reduction,
                    token_weight=token_weight if self.token_weight else None, ignore_index=IGNORE,
                    temperature=temperature if self.row_temperature else 1.0, z_loss=self.z_loss,
                    label_smoothing=self.label_smoothing, softcap=self.softcap, backend=place.backend,
                )
            )  # fmt: skip

        return run

    def plain(self, constants: tuple[Tensor, ...]):  # type: ignore[no-untyped-def]
        """The same, a head after another, by torch's own cross_entropy."""
        target, class_weight, token_weight, temperature = constants

        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
            losses = []
            for head in range(HEADS):
                rows, words, counts = hidden[head], target, token_weight
                if self.shift:
                    words, counts = words[:, 1 + head :], counts[:, 1 + head :]
                    rows = rows[:, : LENGTH - 1 - head]
                else:
                    words, counts = words[head], counts[head]
                logits = F.linear(rows, weight, bias)
                logits = logits if logits.dtype == torch.float64 else logits.float()
                if self.softcap:
                    logits = self.softcap * torch.tanh(logits / self.softcap)
                if self.row_temperature:
                    logits = logits / temperature[head][:, : rows.shape[1], None].to(logits.dtype)
                logits, words, counts = logits.reshape(-1, VOCAB), words.reshape(-1), counts.reshape(-1)
                classes = class_weight.to(logits.dtype) if self.class_weight else None
                loss = F.cross_entropy(
                    logits, words, classes, ignore_index=IGNORE, reduction="none", label_smoothing=self.label_smoothing
                )
                kept = (words != IGNORE).to(logits.dtype)
                loss = loss + self.z_loss * kept * logits.logsumexp(1) ** 2
                of_row = kept if classes is None else kept * classes[words.clamp(min=0)]
                if self.token_weight:
                    loss, of_row = loss * counts, of_row * counts
                losses.append(loss.sum() / (of_row.sum() if self.reduction == "mean" else 1))
            total = sum(factor * loss for factor, loss in zip(FACTORS, losses, strict=True))
            return [total, torch.stack(losses).detach()]

        return run


OPTIONS = [
    {},
    {"shift": True},
    {"bias": True, "softcap": 3.0},
    {"class_weight": True, "token_weight": True, "shift": True},
    {"row_temperature": True, "z_loss": 0.02},
    {"label_smoothing": 0.2, "class_weight": True, "bias": True},
]
CASES = [Heads(**options, dtype=dtype, reduction=reduction)
         for options in OPTIONS for dtype, reduction in ((BF16, "mean"), (FP32, "sum"), (FP16, "mean"))
         if not options or dtype != FP16]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_heads_and_gradients(case: Heads, place: Place) -> None:
    leaves, constants = case.tensors(place.device)
    grads = [torch.tensor(1.7, device=place.device), None]
    out = with_gradients(case.fused(place, constants), leaves, grads)
    twin = with_gradients(case.plain(constants), leaves, grads)
    gold = with_gradients(
        case.plain(tuple(in_fp64(constants))), in_fp64(leaves), [grads[0].cpu().double(), None]
    )  # fmt: skip
    assert out[0].dtype == out[1].dtype == FP32 and out[1].shape == (HEADS,)
    for name, o, g, t in zip(("loss", "head_loss", "d_hidden", "d_weight", "d_bias"), out, gold, twin, strict=False):
        assert_close(o, g, t, name)
        if o.dim() > 1:
            assert_bites(g, t, name)
    # head 1 has the factor 0: its loss is told, and its hidden states have no gradient
    assert out[1][1] != 0 and not out[2][1].any() and out[2][0].any()
    with torch.no_grad():
        values = case.fused(place, constants)(*leaves)
    for v, o in zip(values, out, strict=False):
        torch.testing.assert_close(v, o, rtol=1e-5, atol=1e-6)


def test_a_list_of_heads_and_one_head(place: Place) -> None:
    """H tensors are what their stack is; one head is linear_cross_entropy, bit by bit."""
    (hidden, weight), (target, *_) = Heads(FP32).tensors(place.device)
    options = {"head_weight": torch.tensor(FACTORS, device=place.device), "backend": place.backend}
    whole = fusedce.linear_cross_entropy_heads(hidden, weight, target, **options)
    parts = [head.clone().requires_grad_() for head in hidden]
    listed = fusedce.linear_cross_entropy_heads(parts, weight, target, **options)
    assert all(torch.equal(a, b) for a, b in zip(whole, listed, strict=True)) and not listed.head_loss.requires_grad
    grads = torch.autograd.grad(listed.loss, parts)
    assert grads[0].any() and not grads[1].any() and grads[2].any()
    one = fusedce.linear_cross_entropy_heads(parts[:1], weight, target[:1], backend=place.backend)
    expected = fusedce.linear_cross_entropy(parts[0], weight, target[0], backend=place.backend)
    assert torch.equal(one.loss, expected)
    torch.testing.assert_close(one.head_loss[0], expected.detach())
    for a, b in zip(torch.autograd.grad(one.loss, parts[0]), torch.autograd.grad(expected, parts[0]), strict=True):
        assert torch.equal(a, b)


def test_a_head_without_rows_and_no_rows(place: Place) -> None:
    """A head whose targets are all ignored, or that looks past the end of every sequence, has loss 0 and gradient 0."""
    (hidden, weight), (target, *_) = Heads(FP32).tensors(place.device)
    target[1] = IGNORE
    hidden.requires_grad_()
    out = fusedce.linear_cross_entropy_heads(hidden, weight, target, backend=place.backend)
    out.loss.backward()
    assert out.head_loss[1] == 0 and not hidden.grad[1].any() and hidden.grad[0].any() and out.loss > 0
    short = fusedce.linear_cross_entropy_heads(
        hidden[:, :, :2], weight, target[0, :, 1:3].abs(), shift=True, backend=place.backend
    )
    assert (short.head_loss > 0).tolist() == [True, False, False]
    none = fusedce.linear_cross_entropy_heads(hidden[:, :0], weight, target[:, :0], backend=place.backend)
    none.loss.backward()
    assert none.loss == 0 and not none.head_loss.any()


def test_compiled_and_opcheck(place: Place) -> None:
    (hidden, weight), (target, *_) = Heads(FP32).tensors(place.device)

    def loss(h: Tensor, w: Tensor) -> list[Tensor]:
        return list(fusedce.linear_cross_entropy_heads(h, w, target, head_weight=FACTORS, backend=place.backend))

    one = [torch.ones((), device=place.device), None]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected, found = (with_gradients(run, (hidden, weight), one) for run in (loss, compiled))
    assert all(torch.equal(e, f) for e, f in zip(expected, found, strict=True))
    flat = (hidden.reshape(-1, DEPTH).requires_grad_(), weight, target.reshape(-1), None, HEADS)
    opcheck(torch.ops.fusedce.linear_ce_heads.default, flat, {"backend": place.backend, "label_smoothing": 0.1})
    assert fusedce.linear_cross_entropy_heads(hidden.to("meta"), weight.to("meta"), target.to("meta")).head_loss.is_meta


H, W, Y = torch.randn(2, 6, 4), torch.randn(9, 4), torch.arange(12).reshape(2, 6) % 9
BAD = {
    "no heads": (ValueError, "H is 0", dict(hidden=[])),
    "heads of two sizes": (ValueError, r"'hidden\[1\]' has shape \(5, 4\)", dict(hidden=[H[0], H[1, :5]])),
    "no tensor among heads": (TypeError, r"'hidden\[1\]' has type float", dict(hidden=[H[0], 1.0])),
    "one dimension": (ValueError, r"'hidden' has shape \(4,\).*\(H, ..., D\)", dict(hidden=H[0, 0])),
    "target of one head": (ValueError, r"'target' has shape \(6,\)", dict(target=Y[0])),
    "target of the heads with shift": (ValueError, r"'target' has shape", dict(shift=True)),
    "label out of range": (ValueError, r"the value 9 at row 0; expected \[0, 9\)", dict(target=Y + 9)),
    "reduction": (ValueError, "'none'; expected one of mean, sum", dict(reduction="none")),
    "head_weight": (ValueError, r"'head_weight' has shape \(3,\).*\(H,\) = \(2,\)", dict(head_weight=(1.0, 1.0, 1.0))),
    "class_weight": (ValueError, r"'class_weight' has shape \(8,\)", dict(class_weight=torch.ones(8))),
    "token_weight": (ValueError, r"'token_weight' has shape \(6,\)", dict(token_weight=torch.ones(6))),
    "temperature": (ValueError, r"'temperature' has shape \(6,\)", dict(temperature=torch.ones(6))),
    "label smoothing with softcap": (ValueError, "'label_smoothing' and 'softcap'",
                                     dict(label_smoothing=0.1, softcap=2.0)),
    "a backend that cannot run": (RuntimeError, "need a GPU", dict(backend="native")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_the_next_call_works(name: str) -> None:
    error, message, change = BAD[name]
    with pytest.raises(error, match=message):
        fusedce.linear_cross_entropy_heads(**{"hidden": H, "weight": W, "target": Y, **change})
    good = fusedce.linear_cross_entropy_heads(H, W, Y).head_loss
    torch.testing.assert_close(good, torch.stack([F.cross_entropy(h @ W.t(), y) for h, y in zip(H, Y, strict=True)]))


def test_a_direct_call_of_the_op_is_checked() -> None:
    for change in (dict(num_heads=5), dict(num_heads=0), dict(num_heads=2, reduction="none")):
        with pytest.raises(ValueError, match="linear_ce_heads"):
            torch.ops.fusedce.linear_ce_heads(H.reshape(12, 4), W, Y.reshape(12), None, **change)
