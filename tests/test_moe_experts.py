"""moe_experts with moe_plan and moe_combine against fp64: values and every gradient, on every backend."""

import pytest
import torch

import fusedce
from tests.conftest import Place
from tests.linear_ce_cases import in_fp64, with_gradients
from tests.moe_cases import NAMES, Case, ours, plain, upstream
from tests.paired import assert_bites, assert_close

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZES = [
    (1, 1, 1, 1, 1), (2, 3, 1, 2, 1), (5, 7, 3, 4, 2), (37, 24, 20, 5, 2), (16, 8, 31, 3, 3), (63, 33, 17, 8, 2),
    (64, 32, 64, 4, 1), (65, 47, 65, 2, 2), (40, 129, 16, 6, 4), (30, 64, 97, 16, 3), (7, 40, 24, 33, 8),
]  # fmt: skip
LOADS = [Case(45, 24, 18, 6, 2, loads=loads) for loads in ("one", "half")] + [Case(70, 16, 24, 2, 1, loads="one")]
CASES = [Case(*sizes, dtype=dtype) for sizes in SIZES for dtype in (FP32, BF16, FP16)] + [
    Case(**{**case.__dict__, "dtype": dtype}) for case in LOADS for dtype in (FP32, BF16, FP16)
]


def check(case: Case, place: Place, kind: str) -> None:
    """Ours against fp64 with plain torch in the same dtype as the bar, and the bites of that bar."""
    tensors, grads = case.inputs(place.device), [upstream(case, kind, place.device)]
    out = with_gradients(lambda *t: ours(place.backend, *t), tensors, grads)
    twin = with_gradients(plain, tensors, grads)
    gold = with_gradients(plain, in_fp64(tensors), [g.cpu() for g in grads])
    for name, o, g, t in zip(NAMES, out, gold, twin, strict=True):
        assert_close(o, g, t, name)
        if case.num_tokens >= 16 and g.shape[0] >= 2:
            assert_bites(g, t, name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case: Case, place: Place) -> None:
    check(case, place, "random")


@pytest.mark.parametrize("kind", ["ones", "expanded", "transposed", "strided"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_upstream_gradients(kind: str, dtype: torch.dtype, place: Place) -> None:
    check(Case(41, 26, 20, 5, 2, dtype=dtype), place, kind)


@pytest.mark.parametrize("mask", [tuple(bool(bits >> i & 1) for i in range(4)) for bits in range(1, 16)], ids=str)
def test_mo_a05_each_gradient_alone_and_with_others(mask: tuple[bool, ...], place: Place) -> None:
    """Liger-Kernel#1413: one gradient of four was wrong, on one architecture. Each is the same with others wanted."""
    case = Case(20, 12, 10, 4, 2)
    *tensors, index = case.inputs(place.device)
    grad = upstream(case, "random", place.device)
    every = with_gradients(lambda *t: ours(place.backend, *t), (*tensors, index), [grad])[1:]
    leaves = [t.clone().requires_grad_(wanted) for t, wanted in zip(tensors, mask, strict=True)]
    ours(place.backend, *leaves, index)[0].backward(grad)
    for name, leaf, expected, wanted in zip(NAMES[1:], leaves, every, mask, strict=True):
        assert (leaf.grad is not None) == wanted, name
        assert not wanted or torch.equal(leaf.grad, expected), name


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_no_token_and_one_token(num_tokens: int, place: Place) -> None:
    """MO-A04, MO-A09: a rank without tokens takes part, and its gradients are zeros, not None."""
    case = Case(num_tokens, 9, 5, 4, 2)
    tensors, grads = case.inputs(place.device), [upstream(case, "ones", place.device)]
    out = with_gradients(lambda *t: ours(place.backend, *t), tensors, grads)
    for o, g in zip(out, with_gradients(plain, tensors, grads), strict=True):
        assert o.shape == g.shape
        assert torch.allclose(o, g, atol=1e-5)
    if num_tokens == 0:
        assert not out[2].any() and not out[3].any()


def test_mo_a02_an_expert_without_rows_gets_gradients_of_exactly_zero(place: Place) -> None:
    """pytorch#172439: non-zero weight gradients for groups of size zero."""
    splits = [16, 0, 57, 4, 0, 8]
    index = torch.repeat_interleave(torch.arange(6), torch.tensor(splits))[:, None].to(place.device)
    case = Case(sum(splits), 40, 24, 6, 1)
    *tensors, _ = case.inputs(place.device)
    for _ in range(3):  # MO-A03: the second step finds what the first left in memory
        grads = [upstream(case, "random", place.device)]
        out = with_gradients(lambda *t: ours(place.backend, *t), (*tensors, index), grads)
        assert all(t.isfinite().all() for t in out)
        for gradient in out[2:4]:
            assert [bool(g.any()) for g in gradient] == [count > 0 for count in splits]


def test_mo_a10_every_group_size(place: Place) -> None:
    """torchtitan#2262: group sizes that are no multiple of 32 reached kernels that need it."""
    largest = 129 if place.device == "cuda" else 37
    sizes = torch.arange(largest + 1)[torch.randperm(largest + 1, generator=torch.Generator().manual_seed(1))]
    index = torch.repeat_interleave(torch.arange(largest + 1), sizes)[:, None].to(place.device)
    case = Case(index.shape[0], 16, 8, largest + 1, 1)
    *tensors, _ = case.inputs(place.device)
    grads = [upstream(case, "random", place.device)]
    out = with_gradients(lambda *t: ours(place.backend, *t), (*tensors, index), grads)
    twin = with_gradients(plain, (*tensors, index), grads)
    gold = with_gradients(plain, in_fp64((*tensors, index)), [g.cpu() for g in grads])
    for name, o, g, t in zip(NAMES, out, gold, twin, strict=True):
        assert_close(o, g, t, name)


def views(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same numbers as views of memory that is NaN elsewhere."""
    experts, height, width = weight.shape
    gaps = weight.new_full((experts, height + 3, width + 5), torch.nan)
    gaps[:, :height, :width] = weight
    wide = weight.new_full((experts, height, 2 * width), torch.nan)
    wide[:, :, ::2] = weight
    return {"gaps": gaps[:, :height, :width], "transposed": weight.mT.contiguous().mT, "strided": wide[:, :, ::2]}


@pytest.mark.parametrize("kind", ["gaps", "transposed", "strided"])
def test_mo_a11_weights_and_hidden_may_be_views(kind: str, place: Place) -> None:
    """Liger-Kernel#1377: views with a larger expert stride were refused, or would have read the wrong tiles."""
    hidden, gate_up, down, weights, index = Case(30, 24, 20, 4, 2).inputs(place.device)
    grad = torch.randn_like(hidden)

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        (out,) = ours(place.backend, *leaves, index)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    strided = [views(t)[kind] for t in (gate_up, down)]
    view = views(hidden[None])[kind][0]
    expected = run(hidden, gate_up, down, weights)
    close = torch.equal if place.backend == "triton" else torch.allclose  # a BLAS may sum in another order
    for name, e, o in zip(NAMES, expected, run(view, *strided, views(weights[None])[kind][0]), strict=True):
        assert close(e, o) if close is torch.equal else torch.allclose(e, o, atol=1e-5), name


@pytest.mark.parametrize("size", [1, 8, 31, 47, 64, 97])
def test_mo_a18_sizes_that_divide_by_nothing(size: int, place: Place) -> None:
    """megablocks#114: ffn sizes that are no multiple of 128 were unsupported."""
    check(Case(24, size, 33, 3, 2), place, "random")
    check(Case(24, 33, size, 3, 2), place, "random")


def test_repeats_are_bitwise_equal(place: Place) -> None:
    case = Case(60, 40, 24, 5, 2, dtype=BF16)
    tensors, grads = case.inputs(place.device), [upstream(case, "random", place.device)]
    first = with_gradients(lambda *t: ours(place.backend, *t), tensors, grads)
    for _ in range(3):
        again = with_gradients(lambda *t: ours(place.backend, *t), tensors, grads)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_mo_a13_chunks_of_tokens_give_what_all_give_at_once(place: Place) -> None:
    """prime-rl#3411: the result must not depend on the number of chunks. Bitwise in Triton on a GPU, where no
    BLAS chooses."""
    hidden, gate_up, down, weights, index = Case(50, 24, 20, 4, 2).inputs(place.device)
    (whole,) = ours(place.backend, hidden, gate_up, down, weights, index)
    for count in (2, 3, 7):
        parts = zip(*(t.chunk(count) for t in (hidden, weights, index)), strict=True)
        out = torch.cat([ours(place.backend, h, gate_up, down, w, i)[0] for h, w, i in parts])
        assert torch.allclose(out, whole, atol=1e-5)
        assert place != Place("cuda", "triton") or torch.equal(out, whole)


def test_a_nan_weight_or_token_spoils_its_own_token_only(place: Place) -> None:
    hidden, gate_up, down, weights, index = Case(20, 12, 10, 4, 2).inputs(place.device)
    hidden[3, 5], weights[7, 1] = torch.nan, torch.nan
    (out,) = ours(place.backend, hidden, gate_up, down, weights, index)
    assert out.isnan().any(1).nonzero()[:, 0].tolist() == [3, 7]


def test_dispatch_and_combine_are_each_other_s_gradient(place: Place) -> None:
    case = Case(23, 1100, 4, 6, 3)
    hidden, *_, index = case.inputs(place.device)
    plan = fusedce.moe_plan(index, 6, backend=place.backend)
    hidden.requires_grad_()
    rows = fusedce.moe_dispatch(hidden, plan, backend=place.backend)
    assert torch.equal(rows, hidden[plan.row_slot.long() // 3])
    grad = torch.randn_like(rows)
    (d_hidden,) = torch.autograd.grad(rows, hidden, grad)
    expected = grad[plan.slot_row.long()].sum(1)
    assert_close(d_hidden, grad.double()[plan.slot_row.long()].sum(1), expected)
    assert torch.equal(d_hidden, fusedce.moe_combine(grad, plan, backend=place.backend))
    leaf = grad.clone().requires_grad_()
    out = fusedce.moe_combine(leaf, plan, backend=place.backend)
    (d_rows,) = torch.autograd.grad(out.sum(), leaf)
    assert torch.equal(d_rows, torch.ones_like(rows))
