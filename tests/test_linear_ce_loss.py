"""linear_cross_entropy's options, alone and together, against plain torch in fp64: the loss and every gradient.

A scalar loss takes another way through the kernels than a loss per token: gradients in the forward.
"""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusedce
from tests.conftest import Place
from tests.linear_ce_cases import IGNORE, in_fp64, upstream, with_gradients
from tests.paired import assert_bites, assert_close, twin_of_sum, worst_twin

NATIVE = True

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Loss:
    """One loss: sizes, dtype and options of linear_cross_entropy."""

    num_rows: int = 66
    vocab: int = 301
    depth: int = 48
    dtype: torch.dtype = BF16
    reduction: str = "mean"
    bias: bool = False
    class_weight: bool = False
    token_weight: bool = False
    row_temperature: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    padding: int = 0
    shift: bool = False

    def __str__(self) -> str:
        default = Loss()
        given = [f"{k}={v}" for k, v in self.__dict__.items() if v != getattr(default, k)]
        return ",".join(given).replace("torch.", "") or "plain"

    def tensors(self, device: str) -> tuple[Tensor, ...]:
        """hidden, weight, bias or None, and target, class_weight, token_weight, temperature, which are not leaves."""
        generator = torch.Generator().manual_seed(self.num_rows + self.vocab)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator)

        hidden, weight = normal(self.num_rows, self.depth), 2 * normal(self.vocab, self.depth) * self.depth**-0.5
        bias = normal(self.vocab) if self.bias else None
        target = torch.randint(0, self.vocab - self.padding, (self.num_rows,), generator=generator)
        target[::7] = IGNORE
        class_weight = torch.rand(self.vocab - self.padding, generator=generator)
        token_weight, temperature = normal(self.num_rows), 0.5 + torch.rand(self.num_rows, generator=generator)
        leaves = [t if t is None else t.to(device, self.dtype) for t in (hidden, weight, bias)]
        return *leaves, *(t.to(device) for t in (target, class_weight, token_weight, temperature))

    def fused(self, place: Place, constants: tuple[Tensor, ...]):  # type: ignore[no-untyped-def]
        """A function of the leaves, by the op."""
        target, class_weight, token_weight, temperature = constants
        shape = (2, -1) if self.shift else (-1,)

        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
            loss = fusedce.linear_cross_entropy(
                hidden.reshape(*shape, self.depth), weight, target.reshape(shape), linear_bias=bias,
                weight=class_weight if self.class_weight else None, reduction=self.reduction, ignore_index=IGNORE,
                label_smoothing=self.label_smoothing, z_loss=self.z_loss, softcap=self.softcap, shift=self.shift,
                token_weight=token_weight.reshape(shape) if self.token_weight else None,
                temperature=temperature.reshape(shape) if self.row_temperature else 1.3,
                vocab_size=self.vocab - self.padding if self.padding else None, backend=place.backend,
            )  # fmt: skip
            return [loss.reshape(-1) if self.reduction == "none" else loss]

        return run

    def plain(self, constants: tuple[Tensor, ...]):  # type: ignore[no-untyped-def]
        """The same by torch's own cross_entropy on logits in the leaves' dtype, then fp32."""
        target, class_weight, token_weight, temperature = constants
        if self.shift:
            later = [t.reshape(2, -1).roll(-1, 1) for t in (target, token_weight)]
            later[0][:, -1] = IGNORE
            target, token_weight = (t.reshape(-1) for t in later)

        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
            words = self.vocab - self.padding
            logits = F.linear(hidden, weight[:words], None if bias is None else bias[:words])
            logits = logits if logits.dtype == torch.float64 else logits.float()
            if self.softcap:
                logits = self.softcap * torch.tanh(logits / self.softcap)
            logits = logits / (temperature.to(logits.dtype)[:, None] if self.row_temperature else 1.3)
            classes = class_weight.to(logits.dtype) if self.class_weight else None
            options = {"ignore_index": IGNORE, "label_smoothing": self.label_smoothing, "reduction": "none"}
            rows = F.cross_entropy(logits, target, weight=classes, **options)
            kept = (target != IGNORE).to(logits.dtype)
            rows = rows + self.z_loss * kept * logits.logsumexp(1) ** 2
            counts = kept if classes is None else kept * classes[target.clamp(min=0)]
            if self.token_weight:
                rows, counts = rows * token_weight, counts * token_weight
            if self.reduction == "none":
                return [rows]
            return [rows.sum() / (counts.sum() if self.reduction == "mean" else 1)]

        return run


ALL = {"bias": True, "class_weight": True, "token_weight": True, "row_temperature": True, "z_loss": 0.01, "padding": 20}
OPTIONS = [
    {},
    {"bias": True},
    {"class_weight": True},
    {"token_weight": True},
    {"row_temperature": True},
    {"label_smoothing": 0.2},
    {"label_smoothing": 0.2, "class_weight": True, "bias": True},
    {"z_loss": 0.02},
    {"softcap": 5.0},
    {"padding": 33},
    {"shift": True, "token_weight": True},
    {**ALL, "label_smoothing": 0.3, "shift": True},
    {**ALL, "softcap": 3.0},
]
SHAPES = [(2, 1, 1), (2, 3, 2), (130, 17, 8), (34, 1000, 8), (258, 129, 65)]
CASES = [
    Loss(**options, dtype=dtype, reduction=reduction)
    for options in OPTIONS
    for dtype in (BF16, FP16, FP32)
    for reduction in ("mean", "sum", "none")
    # Dtypes and reductions meet in full where no option is set; the options have one of the others' each.
    if not options or (dtype, reduction) in ((BF16, "mean"), (FP32, "sum"), (FP16, "none"))
] + [Loss(*shape, dtype=dtype, reduction="sum") for shape in SHAPES for dtype in (BF16, FP16, FP32)]


def check(case: Loss, place: Place) -> None:
    """Loss and gradients against fp64, plain torch in the same dtype as the bar; and the bites of that bar."""
    *leaves, target, class_weight, token_weight, temperature = case.tensors(place.device)
    leaves = [t for t in leaves if t is not None]
    constants = (target, class_weight, token_weight, temperature)
    grads = [upstream(case.num_rows, "random", place.device) if case.reduction == "none" else torch.tensor(1.7)]
    out = with_gradients(case.fused(place, constants), leaves, [g.to(place.device) for g in grads])
    twin = with_gradients(case.plain(constants), leaves, [g.to(place.device) for g in grads])
    gold = with_gradients(case.plain(tuple(in_fp64(constants))), in_fp64(leaves), [g.cpu().double() for g in grads])
    assert out[0].dtype == FP32
    if place.device != "cpu":
        # Its GPU kernels and its CPU kernels are both plain torch, and each is right by luck in other rows.
        plain = case.plain(tuple(t.cpu() for t in constants))
        on_cpu = with_gradients(plain, [t.cpu() for t in leaves], [g.cpu() for g in grads])
        twin = [worst_twin([t.cpu(), c], g) for t, c, g in zip(twin, on_cpu, gold, strict=True)]
    if case.reduction != "none":
        twin[0] = scalar_twin(case, leaves, constants, gold[0])
    for name, o, g, t in zip(("loss", "d_hidden", "d_weight", "d_bias"), out, gold, twin, strict=False):
        assert_close(o, g, t, name)
        if o.dim() and case.num_rows >= 16 and case.vocab >= 16:
            assert_bites(g, t, name)


def scalar_twin(case: Loss, leaves: list[Tensor], constants: tuple[Tensor, ...], gold: Tensor) -> Tensor:
    """The twin of a sum or mean."""
    rows = replace(case, reduction="none")
    exact = rows.plain(tuple(in_fp64(constants)))(*in_fp64(leaves))[0]
    errors = rows.plain(constants)(*leaves)[0].detach().cpu().double() - exact
    return twin_of_sum(gold, errors * (1.0 if case.reduction == "sum" else gold / exact.sum()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients(case: Loss, place: Place) -> None:
    check(case, place)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_targets_of_no_probability(dtype: torch.dtype, place: Place) -> None:
    """Targets 60 to 10⁴ nats below the rest, and one that is masked by −inf: e^(z − z_y) is past any float. Their rows
    have a loss and gradients like others, and the rows beside them do not feel them."""
    case = Loss(70, 150, 16, dtype=dtype, bias=True, reduction="sum")
    hidden, weight, bias, target, *rest = case.tensors(place.device)
    target[target == 3] = 4
    for row, word, low in ((1, 0, -60.0), (9, 1, -300.0), (10, 2, -1e4), (64, 149, -90.0)):
        target[row], bias[word] = word, low
    check_tensors(case, place, [hidden, weight, bias], (target, *rest))
    target[20], bias[3] = 3, -torch.inf
    run = case.fused(place, (target, *rest))
    out = with_gradients(run, [hidden, weight, bias], [torch.ones((), device=place.device)])
    assert out[0] == torch.inf and all(grad.isfinite().all() for grad in out[1:])


def check_tensors(case: Loss, place: Place, leaves: list[Tensor], constants: tuple[Tensor, ...]) -> None:
    """`check` of given tensors."""
    one = torch.ones((), device=place.device)
    out = with_gradients(case.fused(place, constants), leaves, [one])
    twin = with_gradients(case.plain(constants), leaves, [one])
    gold = with_gradients(case.plain(tuple(in_fp64(constants))), in_fp64(leaves), [one.cpu().double()])
    for name, o, g, t in zip(("loss", "d_hidden", "d_weight", "d_bias"), out, gold, twin, strict=True):
        assert_close(o, g, t, name)


def test_certain_tokens_keep_their_digits(place: Place) -> None:
    """log p = −log(1 + rest): 10⁻⁹ comes out as 10⁻⁹, never as 0 or above, and so does its gradient."""
    gaps = torch.tensor([1.0, 5.0, 12.0, 20.0, 30.0, 60.0], device=place.device)
    hidden = gaps[:, None].clone().requires_grad_()
    weight = torch.tensor([[1.0], [0.0]], device=place.device)
    target = torch.zeros(6, dtype=torch.int64, device=place.device)
    rows = fusedce.linear_logprob(hidden, weight, target, backend=place.backend).logprob
    expected = -torch.log1p(torch.exp(-gaps.double()))
    torch.testing.assert_close(rows.double(), expected, rtol=1e-5, atol=0.0)
    (grad,) = torch.autograd.grad(rows.sum(), hidden)
    torch.testing.assert_close(grad[:, 0].double(), torch.sigmoid(-gaps.double()), rtol=1e-5, atol=0.0)


def test_a_token_s_weight_or_temperature_gets_no_gradient(place: Place) -> None:
    hidden, weight, _, target, *_ = Loss(dtype=FP32).tensors(place.device)
    numbers = torch.ones(66, device=place.device, requires_grad=True)
    loss = fusedce.linear_cross_entropy(
        hidden.requires_grad_(), weight, target, token_weight=numbers, temperature=numbers, backend=place.backend
    )
    loss.backward()
    assert numbers.grad is None and hidden.grad is not None
