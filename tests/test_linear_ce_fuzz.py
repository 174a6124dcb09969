"""Random sizes, dtypes, options and memory layouts of the three functions of the head, against plain torch in fp64.

The references are those of the other tests; what is new here is that nothing was chosen by hand: options meet in every
combination, tensors are transposed, strided, cut out of larger ones or expanded, what lies between their elements is
NaN, and so is all that belongs to an ignored row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fusedce
from fusedce import env
from tests.conftest import Place
from tests.linear_ce_cases import IGNORE, Case, in_fp64, plain, with_gradients
from tests.paired import assert_close, worst_twin
from tests.test_linear_ce_loss import ALL, Loss, check
from tests.test_policy_loss import cispo, clipped, with_bonus

NATIVE = True

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN = float("nan")
LAYOUTS = ("dense", "transposed", "strided", "every other row", "cut out", "one column")
OPTIONS = ("linear_bias", "weight", "token_weight", "temperature", "label_smoothing", "z_loss", "softcap", "vocab_size",
           "shift")  # fmt: skip


def fuzz(examples: int) -> Callable:
    """The same examples in every run, none of them kept. The interpreter, a hundred times slower, takes a tenth, and
    does not search for a smaller example of a failure; a machine with a GPU, on which most examples compile kernels of
    their own, a third."""
    slow = env.triton_interpreted()
    phases = (Phase.generate,) if slow else tuple(Phase)
    share = 10 if slow else 3 if torch.cuda.is_available() else 1
    count = max(examples // share, 1)
    return settings(max_examples=count, phases=phases, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Layout:
    """How the tensors of a problem lie in memory, what their ignored rows hold, and how large the logits are."""

    hidden: str
    weight: str
    rows: str  # of target and the numbers of each row: "dense" or "strided"
    row_dtype: torch.dtype
    ignored: float  # the share of rows
    size: float


@st.composite
def losses(draw: st.DrawFn) -> tuple[Loss, Layout]:
    """A loss with each option at its default or not."""
    shift, smoothing = draw(st.booleans()), draw(st.sampled_from((0.0, 0.0, 0.2)))
    # Of one word the loss is 0 whatever the logits, and nothing measures how near to 0 is right.
    vocab = draw(st.integers(3 if smoothing else 1, 80))
    num_rows = 2 * draw(st.integers(1, 20)) if shift else draw(st.integers(0, 40))
    flags = {name: draw(st.booleans()) for name in ("bias", "class_weight", "token_weight", "row_temperature")}
    case = Loss(
        num_rows, vocab, draw(st.integers(1, 40)), draw(st.sampled_from((BF16, FP16, FP32))),
        draw(st.sampled_from(("mean", "sum", "none"))),
        label_smoothing=smoothing, z_loss=draw(st.sampled_from((0.0, 0.05))),
        softcap=draw(st.sampled_from((None, 6.0))), padding=draw(st.sampled_from((0, vocab // 3))), shift=shift,
        **flags,
    )  # fmt: skip
    layout = Layout(
        draw(st.sampled_from(LAYOUTS if smoothing else (*LAYOUTS, "one row"))), draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(("dense", "strided"))),
        draw(st.sampled_from((FP32, BF16))), draw(st.sampled_from((0.0, 0.3, 0.3, 1.0))),
        draw(st.sampled_from((0.0, 1.0, 1.0, 4.0))),
    )  # fmt: skip
    return case, layout


def stored(matrix: Tensor, layout: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A dense tensor that holds the matrix (or its first row or column, to be expanded) and NaN elsewhere, and the way
    back to a view of it."""
    rows, columns = matrix.shape
    if layout == "transposed":
        return matrix.t().contiguous(), Tensor.t
    if layout == "one row" and rows:
        return matrix[:1].clone(), lambda t: t.expand(rows, -1)
    if layout == "one column":
        return matrix[:, :1].clone(), lambda t: t.expand(-1, columns)
    views: dict[str, tuple[tuple[int, int], Callable[[Tensor], Tensor]]] = {
        "strided": ((rows, 2 * columns), lambda t: t[:, ::2]),
        "every other row": ((2 * rows, columns), lambda t: t[1::2]),
        "cut out": ((rows + 1, columns + 3), lambda t: t[1:, 1:-2]),
    }
    if layout not in views:
        return matrix.clone(), lambda t: t
    sizes, view = views[layout]
    base = matrix.new_full(sizes, NAN)
    view(base).copy_(matrix)
    return base, view


def strided(vector: Tensor) -> Tensor:
    """The same numbers, every other element of a longer vector."""
    return torch.stack((vector, torch.full_like(vector, 77)), 1)[:, 0]


@dataclass(frozen=True)
class Problem:
    """The tensors of a loss as its layout has them.

    views: hidden, weight and bias out of the leaves, which get gradients. constants: target, class weight, token weight
    and temperature. spoiled: the same leaves and constants with NaN in the ignored rows. kept: how many others.
    """

    case: Loss
    views: list[Callable[[Tensor], Tensor]]
    leaves: list[Tensor]
    constants: list[Tensor]
    spoiled_leaves: list[Tensor]
    spoiled_constants: list[Tensor]
    kept: int

    def through(self, run: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        """`run` of the views of the leaves."""
        return lambda *leaves: run(*(view(leaf) for view, leaf in zip(self.views, leaves, strict=True)))


def problem(case: Loss, layout: Layout, device: str) -> Problem:
    hidden, weight, bias, target, class_weight, *numbers = case.tensors(device)
    dice = torch.rand(case.num_rows, generator=torch.Generator().manual_seed(1)).to(device)
    target = torch.where(dice < layout.ignored, IGNORE, target.clamp(min=0))
    class_weight, token_weight, temperature = (t.to(layout.row_dtype) for t in (class_weight, *numbers))
    if case.reduction != "none":
        # With weights of both signs a loss, or what a mean divides by, may be nothing but rounding.
        token_weight = token_weight.abs()
    ignored = target == IGNORE
    if case.shift:
        # A position's target is the next one's, whose weight comes along; its temperature is its own.
        ignored = ignored.reshape(2, -1).roll(-1, 1)
        ignored[:, -1] = True
        ignored = ignored.reshape(-1)
    parts = [stored(hidden * layout.size, layout.hidden), stored(weight, layout.weight)]
    parts += [] if bias is None else [(bias, lambda t: t)]
    leaves, views = [leaf for leaf, _ in parts], [view for _, view in parts]
    spoiled = [leaf.clone() for leaf in leaves]
    if layout.hidden not in ("one row", "one column"):
        views[0](spoiled[0])[ignored] = NAN
    lay = strided if layout.rows == "strided" else torch.clone
    constants = [lay(t) for t in (target, class_weight, token_weight, temperature)]
    token_weight, temperature = token_weight.masked_fill(target == IGNORE, NAN), temperature.masked_fill(ignored, NAN)
    spoiled_constants = [lay(t) for t in (target, class_weight, token_weight, temperature)]
    return Problem(case, views, leaves, constants, spoiled, spoiled_constants, int((~ignored).sum()))


def unlucky(
    run: Callable[..., list[Tensor]], leaves: list[Tensor], grads: list[Tensor], gold: list[Tensor]
) -> list[Tensor]:
    """The twin of problems so small that plain torch is often right by luck: of its results here and on leaves that are
    an ulp off, either way at random, each element's worst. Four ulp in fp32, in which ours rounds as often as torch."""
    generator = torch.Generator().manual_seed(5)

    def nudged(leaf: Tensor) -> Tensor:
        sign = torch.randint(0, 2, leaf.shape, generator=generator).to(leaf.device) * 2 - 1
        return leaf * (1 + sign * torch.finfo(leaf.dtype).eps * (4 if leaf.dtype == FP32 else 1))

    tries = [with_gradients(run, leaves, grads)]
    tries += [with_gradients(run, [nudged(leaf) for leaf in leaves], grads) for _ in range(4)]
    return [worst_twin(list(results), exact) for *results, exact in zip(*tries, gold, strict=True)]


def fused(run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What `run` returns; an example whose options are refused as a pair, by name, is none."""
    try:
        return run()
    except ValueError as error:
        assume(sum(f"'{name}'" in str(error) for name in OPTIONS) < 2)
        raise


def check_loss(case: Loss, layout: Layout, place: Place) -> None:
    made = problem(case, layout, place.device)
    grad = torch.randn(case.num_rows) if case.reduction == "none" else torch.tensor(1.7)
    upstream = [grad.to(place.device)]
    ours = made.through(case.fused(place, tuple(made.spoiled_constants)))
    out = fused(lambda: with_gradients(ours, made.spoiled_leaves, upstream))
    # Where nothing counts, a mean is 0 with gradients of 0, as the sum is; torch's is NaN.
    if case.reduction == "mean" and not made.kept:
        case = replace(case, reduction="sum")
    reference = made.through(case.plain(tuple(made.constants)))
    in64 = made.through(case.plain(tuple(in_fp64(made.constants))))
    gold = with_gradients(in64, in_fp64(made.leaves), [grad.double()])
    twin = unlucky(reference, made.leaves, upstream, gold)
    for name, o, g, t in zip(("loss", "d_hidden", "d_weight", "d_bias"), out, gold, twin, strict=False):
        assert_close(o, g, t, name)


@given(drawn=losses())
@fuzz(150)
def test_cross_entropy(drawn: tuple[Loss, Layout], place: Place) -> None:
    check_loss(*drawn, place)


def head_options(case: Loss, constants: list[Tensor], place: Place) -> dict[str, object]:
    """The keywords that linear_logprob and linear_policy_loss share."""
    return {
        "temperature": constants[3] if case.row_temperature else 1.3,
        "softcap": case.softcap,
        "ignore_index": IGNORE,
        "vocab_size": case.vocab - case.padding if case.padding else None,
        "backend": place.backend,
    }


def plain_rows(case: Loss, constants: list[Tensor]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """logprob, entropy and lse of the leaves by plain torch."""
    target, _, _, temperature = constants
    words = case.vocab - case.padding

    def run(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        column = temperature.to(torch.promote_types(hidden.dtype, FP32))[:, None] if case.row_temperature else 1.3
        sizes = Case(case.num_rows, words, case.depth, temperature=column, softcap=case.softcap)
        return plain(sizes, hidden, weight[:words], target, None if bias is None else bias[:words])

    return run


def check_logprob(case: Loss, layout: Layout, wanted: tuple[bool, bool, bool], place: Place) -> None:
    """wanted: which of logprob, entropy and lse the loss depends on; without the entropy's it is not asked for."""
    case = replace(case, shift=False, reduction="none")
    made = problem(case, layout, place.device)
    generator = torch.Generator().manual_seed(2)
    grads = [torch.randn(case.num_rows, generator=generator) if want else None for want in wanted]
    upstream = [None if grad is None else grad.to(place.device) for grad in grads]

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        options = head_options(case, made.spoiled_constants, place)
        out = fusedce.linear_logprob(hidden, weight, made.constants[0], bias=bias, with_entropy=wanted[1], **options)
        return [out.logprob, out.lse.new_zeros(case.num_rows) if out.entropy is None else out.entropy, out.lse]

    out = fused(lambda: with_gradients(made.through(ours), made.spoiled_leaves, upstream))
    in64 = made.through(plain_rows(case, in_fp64(made.constants)))
    gold = with_gradients(in64, in_fp64(made.leaves), [None if grad is None else grad.double() for grad in grads])
    twin = unlucky(made.through(plain_rows(case, made.constants)), made.leaves, upstream, gold)
    for name, o, g, t in zip(
        ("logprob", "entropy", "lse", "d_hidden", "d_weight", "d_bias"), out, gold, twin, strict=False
    ):
        if name != "entropy" or wanted[1]:
            assert_close(o, g, t, name)


@given(drawn=losses(), wanted=st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any))
@fuzz(100)
def test_logprob(drawn: tuple[Loss, Layout], wanted: tuple[bool, bool, bool], place: Place) -> None:
    check_logprob(*drawn, wanted, place)


def check_policy_loss(case: Loss, layout: Layout, loss_fn: Callable[..., Tensor], place: Place) -> None:
    case = replace(case, shift=False, reduction="sum")
    made = problem(case, layout, place.device)
    has_entropy = loss_fn is with_bonus
    in64 = plain_rows(case, in_fp64(made.constants))
    generator = torch.Generator().manual_seed(3)
    noise, advantage, counts = torch.randn(3, case.num_rows, generator=generator)
    old = made.through(in64)(*in_fp64(made.leaves))[0].float() + 0.3 * noise
    numbers = [old, advantage.abs(), counts.abs()]
    numbers = [strided(t) if layout.rows == "strided" else t for t in numbers]

    def reference(rows: Callable[..., tuple[Tensor, Tensor, Tensor]], device: str) -> Callable[..., list[Tensor]]:
        def run(*leaves: Tensor) -> list[Tensor]:
            logprob, entropy, _ = rows(*leaves)
            losses = loss_fn(logprob, *((entropy,) if has_entropy else ()), *(t.to(device) for t in numbers))
            return [torch.where(made.constants[0].to(device) != IGNORE, losses, 0.0).sum()]

        return made.through(run)

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        options = head_options(case, made.spoiled_constants, place)
        spoiled = [t.to(place.device).masked_fill(made.constants[0] == IGNORE, NAN) for t in numbers]
        return [
            fusedce.linear_policy_loss(
                hidden, weight, made.constants[0], loss_fn, *spoiled, bias=bias, with_entropy=has_entropy, **options
            )
        ]

    one = torch.tensor(-1.3)
    out = fused(lambda: with_gradients(made.through(ours), made.spoiled_leaves, [one.to(place.device)]))
    gold = with_gradients(reference(in64, "cpu"), in_fp64(made.leaves), [one.double()])
    plain_torch = reference(plain_rows(case, made.constants), place.device)
    twin = unlucky(plain_torch, made.leaves, [one.to(place.device)], gold)
    for name, o, g, t in zip(("loss", "d_hidden", "d_weight", "d_bias"), out, gold, twin, strict=False):
        assert_close(o, g, t, name)


@given(drawn=losses(), loss_fn=st.sampled_from((clipped, cispo, with_bonus)))
@fuzz(100)
def test_policy_loss(drawn: tuple[Loss, Layout], loss_fn: Callable[..., Tensor], place: Place) -> None:
    check_policy_loss(*drawn, loss_fn, place)


@pytest.mark.parametrize(
    "case",
    [
        Loss(140, 1100, 8, FP32, "sum", **ALL, label_smoothing=0.3),
        Loss(140, 2100, 8, BF16, "sum", **ALL, label_smoothing=0.3),
        Loss(140, 2100, 8, BF16, "mean", **ALL, softcap=3.0),
    ],
    ids=str,
)
def test_all_options_over_several_chunks(case: Loss, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What belongs to a chunk's rows comes from those rows, and what all rows add to is added to."""
    monkeypatch.setenv("FUSEDCE_WORKSPACE_MB", "1")
    check(case, place)
