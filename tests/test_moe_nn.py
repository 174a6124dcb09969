"""fusedce.nn.MoE and Router: against a plain block, routing handed in, autocast, state."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fusedce
from fusedce.functional import Routing
from fusedce.nn import MoE, Router
from tests.conftest import Place
from tests.moe_cases import plain
from tests.paired import assert_close


def block(place: Place, **options: object) -> MoE:
    return MoE(24, 20, 6, 2, backend=place.backend, device=place.device, **options)


def plain_block(moe: MoE, hidden: torch.Tensor) -> torch.Tensor:
    flat = hidden.reshape(-1, hidden.shape[-1])
    weights, index = F.linear(flat, moe.router.weight).softmax(1).topk(2, 1)
    weights = weights / weights.sum(1, keepdim=True)
    return plain(flat, moe.gate_up_proj, moe.down_proj, weights, index)[0].view(hidden.shape)


def test_output_and_every_gradient(place: Place) -> None:
    moe = block(place)
    gold = copy.deepcopy(moe).double().cpu()
    hidden = torch.randn(3, 11, 24, device=place.device)
    grad = torch.randn_like(hidden)
    results = []
    for module, run, dtype in ((moe, moe, torch.float32), (gold, None, torch.float64), (moe, None, torch.float32)):
        leaf = hidden.to(gold.down_proj.device if module is gold else place.device, dtype).requires_grad_()
        out = run(leaf) if run else plain_block(module, leaf)
        grads = torch.autograd.grad(out, (leaf, *module.parameters()), grad.to(leaf))
        results.append([out.detach(), *grads])
    for name, ours, golden, twin in zip(("out", "d_hidden", "router", "gate_up", "down"), *results, strict=True):
        assert_close(ours.flatten(0, -2), golden.flatten(0, -2), twin.flatten(0, -2), name)


def test_a_routing_handed_in_is_the_one_that_is_used(place: Place) -> None:
    moe = block(place)
    hidden = torch.randn(2, 9, 24, device=place.device)
    routing = moe.route(hidden)
    assert routing.top_k_index.shape == routing.top_k_weights.shape == (18, 2)
    assert torch.equal(moe(hidden, routing), moe(hidden))
    other = Routing(routing.top_k_weights, (routing.top_k_index + 1) % 6)
    expected = plain(hidden.view(18, 24), moe.gate_up_proj, moe.down_proj, *other)[0].view(hidden.shape)
    assert torch.allclose(moe(hidden, other), expected, atol=1e-5)
    moe(hidden, routing).sum().backward()
    assert moe.router.weight.grad.abs().max() > 0


def test_mo_a17_activation_recompute_gives_the_same_gradients(place: Place) -> None:
    moe = block(place)
    hidden = torch.randn(20, 24, device=place.device, requires_grad=True)
    expected = torch.autograd.grad(moe(hidden).square().sum(), (hidden, *moe.parameters()))
    out = checkpoint(moe, hidden, use_reentrant=False)
    again = torch.autograd.grad(out.square().sum(), (hidden, *moe.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))


def test_autocast_gives_gradients_in_the_parameters_dtype(place: Place) -> None:
    moe = block(place)
    hidden = torch.randn(10, 24, device=place.device, requires_grad=True)
    with torch.autocast(place.device, torch.bfloat16):
        out = moe(hidden)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.abs().max() > 0 for p in (hidden, *moe.parameters()))


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_few_tokens_still_give_every_gradient(num_tokens: int, place: Place) -> None:
    moe = block(place)
    moe(torch.randn(num_tokens, 24, device=place.device)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in moe.parameters())


def test_mo_a20_top_1_renormalized_warns() -> None:
    """minimind#858: the router got no gradient, and nobody was told."""
    with pytest.warns(UserWarning, match="the router gets no gradient"):
        Router(8, 4, 1)
    moe = MoE(8, 6, 4, 1, renormalize=False)
    moe(torch.randn(16, 8)).square().sum().backward()
    assert moe.router.weight.grad.abs().max() > 0


def test_compiles_whole(place: Place) -> None:
    moe = block(place)
    hidden = torch.randn(2, 8, 24, device=place.device)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(hidden), moe(hidden))
    assert torch.equal(compiled(hidden, moe.route(hidden)), moe(hidden))


def test_parameters_repr_and_meta() -> None:
    moe = MoE(24, 20, 6, 2, score="sigmoid", renormalize=False, scale=2.5, dtype=torch.bfloat16)
    shapes = {name: tuple(p.shape) for name, p in moe.named_parameters()}
    assert shapes == {"router.weight": (6, 24), "gate_up_proj": (6, 40, 24), "down_proj": (6, 24, 20)}
    assert "hidden_size=24, ffn_size=20, num_experts=6" in repr(moe) and "score='sigmoid'" in repr(moe)
    for parameter in moe.parameters():
        assert parameter.dtype == torch.bfloat16
        bound = parameter.shape[-1] ** -0.5
        assert bound / 2 < parameter.float().abs().max() <= bound * 1.01
    empty = MoE(24, 20, 6, 2, device="meta").to_empty(device="cpu")
    empty.reset_parameters()
    assert empty(torch.randn(3, 24)).isfinite().all()
    with pytest.raises(ValueError, match="top_k is 7; expected 1 to num_experts = 6"):
        MoE(24, 20, 6, 7)
    assert fusedce.nn.MoE is MoE
