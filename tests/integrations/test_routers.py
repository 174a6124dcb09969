"""fusedce.nn.Router and MoE against the routers and blocks of transformers, by the presets; and its balance loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import fusedce
from fusedce.nn import MoE, Router
from tests.integrations.tiny_moe import FAMILIES, SWIGLU, tiny_moe

SHARED = ("shared_expert", "shared_experts")


def router_of(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter"))


def block_of(model: nn.Module) -> nn.Module:
    return next(m for m in model.modules() if hasattr(m, "experts") and (hasattr(m, "gate") or hasattr(m, "router")))


def ours_for(config: object, theirs: nn.Module) -> Router:
    router = Router.from_config(config)
    with torch.no_grad():
        router.weight.copy_(theirs.weight)
        if router.bias is not None:
            router.bias.copy_(theirs.bias)
        if router.correction is not None and hasattr(theirs, "e_score_correction_bias"):
            router.correction.copy_(theirs.e_score_correction_bias)
    return router


def by_expert(weights: Tensor, index: Tensor, num_experts: int) -> Tensor:
    """(N, E): the order of a token's experts is free."""
    return torch.zeros(index.shape[0], num_experts, dtype=weights.dtype).scatter(1, index, weights)


@pytest.mark.parametrize("family", FAMILIES)
def test_router_values_and_gradients(family: str) -> None:
    model = tiny_moe(family)
    theirs, hidden = router_of(model), torch.randn(60, 32)
    router, grad = ours_for(model.config, theirs), torch.randn(60, theirs.num_experts)

    def dense(module: nn.Module, x: Tensor) -> Tensor:
        out = module(x)
        weights, index = out if isinstance(module, Router) else out[1:]
        return by_expert(weights, index, module.weight.shape[0])

    results = []
    for module in (router, theirs):
        leaf = hidden.clone().requires_grad_()
        out = dense(module, leaf)
        grads = torch.autograd.grad(out, (leaf, *module.parameters()), grad)
        results.append([out.detach(), *grads])
    assert torch.equal(results[0][0] > 0, results[1][0] > 0) and len(results[0]) == len(results[1])
    for ours, expected in zip(*results, strict=True):
        assert torch.allclose(ours, expected, atol=2e-6 * float(expected.abs().max()), rtol=2e-6)


@pytest.mark.parametrize("family", SWIGLU)
def test_block_values_and_gradients(family: str) -> None:
    """The whole block, shared experts and their gate included, with transformers' parameters."""
    model = tiny_moe(family)
    theirs = block_of(model)
    moe = MoE.from_config(model.config)
    moe.router = ours_for(model.config, router_of(theirs))
    shared = next((getattr(theirs, name) for name in SHARED if hasattr(theirs, name)), None)
    with torch.no_grad():
        moe.gate_up_proj.copy_(theirs.experts.gate_up_proj)
        moe.down_proj.copy_(theirs.experts.down_proj)
        if shared is not None:
            moe.shared_gate_up_proj.copy_(torch.cat((shared.gate_proj.weight, shared.up_proj.weight)))
            moe.shared_down_proj.copy_(shared.down_proj.weight)
        if hasattr(theirs, "shared_expert_gate"):
            moe.shared_gate.copy_(theirs.shared_expert_gate.weight)
    assert (moe.shared_gate_up_proj is not None) == (shared is not None)
    hidden, grad = torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    results = []
    for block in (moe, theirs):
        leaf = hidden.clone().requires_grad_()
        out = block(leaf)
        (out[0] if isinstance(out, tuple) else out).backward(grad)
        results.append((out.detach(), leaf.grad))
    for ours, expected in zip(*results, strict=True):
        assert torch.allclose(ours, expected, atol=2e-5 * float(expected.abs().max()))
    pairs = [(moe.gate_up_proj, theirs.experts.gate_up_proj), (moe.down_proj, theirs.experts.down_proj),
             (moe.router.weight, router_of(theirs).weight)]  # fmt: skip
    if shared is not None:
        pairs.append((moe.shared_down_proj, shared.down_proj.weight))
    if moe.shared_gate is not None:
        pairs.append((moe.shared_gate, theirs.shared_expert_gate.weight))
    for ours, expected in pairs:
        assert torch.allclose(ours.grad, expected.grad, atol=2e-5 * float(expected.grad.abs().max()))


@pytest.mark.parametrize("masked", [False, True])
def test_load_balance_loss_is_transformers(masked: bool) -> None:
    layers = [torch.randn(2 * 10, 6, requires_grad=True) for _ in range(3)]
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, 6:] = 0
    mask = mask if masked else None
    expected = load_balancing_loss_func(tuple(layers), 6, 2, mask)
    golden = torch.autograd.grad(expected, layers)
    routed = [(logits, fusedce.moe_route(logits, 2).top_k_index) for logits in layers]
    loss = fusedce.load_balance_loss([fusedce.moe_balance(*pair, mask=mask) for pair in routed])
    assert torch.allclose(loss, expected, rtol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(loss, layers), golden, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-7)


def test_bf16_weights_stay_fp32_where_transformers_rounds_them() -> None:
    model = tiny_moe("qwen3-moe").to(torch.bfloat16)
    theirs, hidden = router_of(model), torch.randn(40, 32, dtype=torch.bfloat16)
    router = ours_for(model.config, theirs).to(torch.bfloat16)
    weights, index = router(hidden)
    logits, rounded, chosen = theirs(hidden)
    assert weights.dtype == torch.float32 and rounded.dtype == torch.bfloat16
    same = (index == chosen).all(1)  # bf16 logits tie, and torch.topk has no rule for ties
    assert same.float().mean() > 0.8 and torch.equal(weights[same].bfloat16(), rounded[same])
    assert torch.equal(F.linear(hidden, router.weight), logits)
