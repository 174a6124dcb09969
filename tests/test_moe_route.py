"""moe_route against fp64 and its own promises: ties, NaN, masked experts."""

import math

import pytest
import torch

import fusedce
from tests.conftest import Place
from tests.linear_ce_cases import in_fp64, with_gradients
from tests.moe_cases import package
from tests.paired import assert_bites, assert_close

SIZES = [(1, 1, 1), (3, 2, 1), (40, 8, 2), (33, 33, 5), (65, 128, 8), (5, 257, 8), (9, 6, 6), (300, 3, 2)]
OPTIONS = [(score, renormalize) for score in ("softmax", "sigmoid") for renormalize in (True, False)]


def plain(logits: torch.Tensor, top_k: int, score: str, renormalize: bool, scale: float) -> list[torch.Tensor]:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    scores = logits.softmax(1) if score == "softmax" else logits.sigmoid()
    index = logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, index)
    return [scale * (weights / weights.sum(1, keepdim=True) if renormalize else weights)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_weights_index_and_gradient(
    sizes: tuple[int, int, int], options: tuple[str, bool], dtype: torch.dtype, place: Place
) -> None:
    num_tokens, num_experts, top_k = sizes
    score, renormalize = options
    logits = 2 * torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(3))
    logits = logits.to(place.device, dtype)
    keywords = {"score": score, "renormalize": renormalize, "scale": 1.5}
    index = fusedce.moe_route(logits, top_k, **keywords, backend=place.backend).top_k_index
    # bf16 logits tie: the stable sort is the rule of ties
    assert torch.equal(index, logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k])

    def ours(logits: torch.Tensor) -> list[torch.Tensor]:
        return [fusedce.moe_route(logits, top_k, **keywords, backend=place.backend).top_k_weights]

    grads = [torch.randn(num_tokens, top_k, generator=torch.Generator().manual_seed(4)).to(place.device)]
    out = with_gradients(ours, [logits], grads)
    twin = with_gradients(lambda x: plain(x, top_k, score, renormalize, 1.5), [logits], grads)
    gold = with_gradients(lambda x: plain(x, top_k, score, renormalize, 1.5), in_fp64([logits]), [grads[0].cpu()])
    assert out[0].dtype == torch.float32
    for name, o, g, t in zip(("weights", "d_logits"), out, gold, twin, strict=True):
        if top_k == 1 and renormalize:  # constant weights: every gradient is rounding around 0
            assert torch.allclose(o.double().cpu(), g, atol=1e-6), name
            continue
        assert_close(o, g, t, name)
        if num_tokens >= 16:
            assert_bites(g, t, name)


@pytest.mark.parametrize("value", [0.0, -0.0, 3.0, -1e9, -math.inf])
def test_among_equal_logits_the_lowest_id_wins(value: float, place: Place) -> None:
    logits = torch.full((5, 9), value, device=place.device)
    logits[1, 4], logits[2, 7], logits[3, 2] = 4.0, -0.0, 0.0
    weights, index = fusedce.moe_route(logits, 4, score="sigmoid", backend=place.backend)
    assert index[0].tolist() == [0, 1, 2, 3]
    assert index[1].tolist() == [4, 0, 1, 2]
    assert weights.shape == (5, 4)
    for row in (2, 3):
        expected = logits[row].sort(descending=True, stable=True).indices[:4]
        assert torch.equal(index[row], expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nan_stays_in_its_row_and_ids_stay_valid(options: tuple[str, bool], place: Place) -> None:
    score, renormalize = options
    logits = torch.randn(12, 7, device=place.device)
    keywords = {"score": score, "renormalize": renormalize, "backend": place.backend}
    clean = logits.clone().requires_grad_()
    expected = fusedce.moe_route(clean, 3, **keywords)
    logits[2, 5], logits[4] = math.nan, math.nan
    logits[6, 1], logits[8, :5] = math.inf, -math.inf
    spoiled = logits.clone().requires_grad_()
    out = fusedce.moe_route(spoiled, 3, **keywords)
    assert ((out.top_k_index >= 0) & (out.top_k_index < 7)).all()
    assert all(len(set(row)) == 3 for row in out.top_k_index.tolist())
    assert out.top_k_index[2, 0] == 5 and out.top_k_weights[2, 0].isnan() and out.top_k_weights[4].isnan().all()
    assert out.top_k_index[8, :2].sort().values.tolist() == [5, 6]
    same = [row for row in range(12) if row not in (2, 4, 6, 8)]
    for ours, theirs in zip(out, expected, strict=True):
        assert torch.equal(ours[same], theirs[same])
    out.top_k_weights.sum().backward()
    expected.top_k_weights.sum().backward()
    assert torch.equal(spoiled.grad[same], clean.grad[same])


def test_renormalized_weights_of_scores_that_are_all_zero_are_zero(place: Place) -> None:
    logits = torch.full((3, 6), -200.0, device=place.device, requires_grad=True)
    weights, _ = fusedce.moe_route(logits, 2, score="sigmoid", backend=place.backend)
    weights.sum().backward()
    assert not weights.any() and not logits.grad.any()
    far = torch.tensor([[0.0, -200.0, -300.0, -1e30]], device=place.device)
    weights, index = fusedce.moe_route(far, 3, backend=place.backend)
    assert index.tolist() == [[0, 1, 2]] and weights.tolist() == [[1.0, 0.0, 0.0]]


def test_mo_a20_top_1_has_a_router_gradient_where_it_is_not_renormalized(place: Place) -> None:
    """minimind#858: with one expert a token, normalized weights are the constant 1."""
    logits = torch.randn(8, 5, device=place.device, requires_grad=True)
    for renormalize in (True, False):
        out = fusedce.moe_route(logits, 1, renormalize=renormalize, backend=place.backend)
        (grad,) = torch.autograd.grad(out.top_k_weights.sum(), logits)
        assert (grad.abs().max() > 1e-3) == (not renormalize)
        assert not renormalize or torch.equal(out.top_k_weights, torch.ones(8, 1, device=place.device))


def test_mo_a17_routing_again_gives_the_same_bits(place: Place) -> None:
    """torchtitan#1117: recompute split the tokens differently. Ties and all, a second run is the first one."""
    logits = torch.randn(50, 16, device=place.device).bfloat16().round(decimals=0)
    first = fusedce.moe_route(logits, 4, backend=place.backend)
    for part in (logits, logits.clone(), logits.t().contiguous().t()):
        again = fusedce.moe_route(part, 4, backend=place.backend)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    alone = fusedce.moe_route(logits[7:8], 4, backend=place.backend)
    assert all(torch.equal(a[7:8], b) for a, b in zip(first, alone, strict=True))


def test_an_index_from_elsewhere_is_read_within_bounds(place: Place) -> None:
    """The backward of a replayed index touches only the logits that it names."""
    logits, index = torch.randn(4, 6, device=place.device), torch.tensor([[5, 0]] * 4, device=place.device)
    d_weights = torch.ones(4, 2, device=place.device)
    grad = package(place).moe_route_backward(d_weights, logits, index, "sigmoid", False, 1.0)
    assert (grad != 0).nonzero()[:, 1].unique().tolist() == [0, 5]
