"""fusedce.nn.Router and MoE with every option: groups, correction, shared experts, replay, collected losses."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedce
from fusedce.nn import MoE, Router, take_balances
from tests.conftest import Place
from tests.moe_cases import plain
from tests.paired import assert_close

GROUPED = dict(score="sigmoid", num_groups=4, top_groups=2, scale=2.5, correction=True, fp32_logits=True)


def block(place: Place, **options: object) -> MoE:
    return MoE(24, 20, 8, 3, backend=place.backend, device=place.device, **options)


def plain_block(moe: MoE, hidden: Tensor, index: Tensor) -> Tensor:
    """The block in plain torch for a choice that is given."""
    flat, options = hidden.reshape(-1, hidden.shape[-1]), moe.router.options
    logits = F.linear(flat, moe.router.weight, moe.router.bias)
    scores = logits.sigmoid() if options.score == "sigmoid" else logits.softmax(1)
    weights = scores.gather(1, index)
    if options.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    (out,) = plain(flat, moe.gate_up_proj, moe.down_proj, options.scale * weights, index)
    if moe.shared_gate_up_proj is not None:
        gate, up = F.linear(flat, moe.shared_gate_up_proj).chunk(2, 1)
        shared = F.linear(F.silu(gate) * up, moe.shared_down_proj)
        out = out + (shared if moe.shared_gate is None else F.linear(flat, moe.shared_gate).sigmoid() * shared)
    return out.view(hidden.shape)


@pytest.mark.parametrize(
    "options",
    [dict(GROUPED, shared_ffn_size=16), dict(bias=True), dict(shared_ffn_size=12, shared_gate=True, renormalize=False)],
    ids=["deepseek", "gpt-oss", "qwen"],
)
def test_output_and_every_gradient(options: dict, place: Place) -> None:
    moe = block(place, **options)
    if moe.router.correction is not None:
        moe.router.correction.uniform_(-0.2, 0.2)
    gold = copy.deepcopy(moe).double().cpu()
    hidden = torch.randn(3, 11, 24, device=place.device)
    grad, index = torch.randn_like(hidden), moe.route(hidden).top_k_index
    results = []
    for module, dtype in ((None, torch.float32), (gold, torch.float64), (moe, torch.float32)):
        owner = module or moe
        leaf = hidden.to(owner.down_proj.device, dtype).requires_grad_()
        out = moe(leaf) if module is None else plain_block(owner, leaf, index.to(leaf.device))
        grads = torch.autograd.grad(out, (leaf, *owner.parameters()), grad.to(leaf))
        results.append([out.detach(), *grads])
    names = ("out", "d_hidden", *(name for name, _ in moe.named_parameters()))
    for name, ours, golden, twin in zip(names, *results, strict=True):
        flat = [x.flatten(0, -2) if x.dim() > 1 else x for x in (ours, golden, twin)]
        assert_close(*flat, name)


def test_the_correction_moves_the_choice_and_is_saved(place: Place) -> None:
    moe = block(place, **GROUPED)
    hidden = torch.randn(40, 24, device=place.device)
    before = moe.route(hidden).top_k_index
    moe.router.correction[5] = -10.0
    after = moe.route(hidden).top_k_index
    assert (before == 5).any() and not (after == 5).any()
    assert "router.correction" in moe.state_dict() and not dict(moe.named_parameters()).get("router.correction")
    plan = fusedce.moe_plan(after, 8, backend=place.backend)
    fusedce.update_correction(moe.router.correction, plan.counts, 0.5)
    assert moe.router.correction[5] == -9.5
    moe.reset_parameters()
    assert not moe.router.correction.any()


def test_fp32_logits_of_a_bf16_block_also_under_autocast(place: Place) -> None:
    router = Router(16, 6, 2, fp32_logits=True, bias=True, device=place.device, dtype=torch.bfloat16)
    hidden = torch.randn(9, 16, device=place.device, dtype=torch.bfloat16)
    expected = F.linear(hidden.float(), router.weight.float(), router.bias.float())
    assert torch.equal(router.logits(hidden), expected)
    with torch.autocast(place.device, torch.bfloat16):
        assert torch.equal(router.logits(hidden), expected)
    router(hidden).top_k_weights.square().sum().backward()
    assert router.weight.grad.dtype == router.bias.grad.dtype == torch.bfloat16 and router.weight.grad.any()


def test_replay_of_a_rollout_s_experts(place: Place) -> None:
    moe = block(place, shared_ffn_size=8)
    hidden = torch.randn(2, 7, 24, device=place.device)
    routing = moe.route(hidden)
    again = moe.route(hidden, routing.top_k_index)
    assert torch.equal(moe(hidden, again), moe(hidden))
    index = routing.top_k_index.clone()
    index[:, 1] = -1  # a rank of the rollout that kept two experts a token
    out = moe(hidden, moe.route(hidden, index))
    expected = moe(hidden, moe.route(hidden, index[:, [0, 2]]))
    assert torch.allclose(out, expected, atol=1e-6) and not torch.allclose(out, moe(hidden), atol=1e-3)


def test_balances_are_collected_in_training_and_taken_once(place: Place) -> None:
    model = torch.nn.Sequential(block(place, collect=True), block(place), block(place, collect=True))
    hidden, mask = torch.randn(2, 9, 24, device=place.device), torch.ones(2, 9, device=place.device)
    mask[1, 4:] = 0
    model.eval()(hidden)
    assert not take_balances(model)
    out = model.train()(hidden)
    (first, second), again = take_balances(model), take_balances(model)
    assert not again and first.load.shape == (2, 8) and first.tokens.tolist() == [9.0, 9.0] and first.top_k == 3
    assert first.load.sum() == second.load.sum() == 2 * 9 * 3
    loss = out.square().mean() + 0.1 * fusedce.load_balance_loss([first, second]) + fusedce.router_z_loss(second)
    loss.backward()
    assert model[2].router.weight.grad.abs().max() > 0
    model[0](hidden, mask=mask)
    (masked,) = take_balances(model)
    assert masked.tokens.tolist() == [9.0, 4.0] and masked.load.sum() == 13 * 3
    expected = model[0].route(hidden).top_k_index.view(2, 9, 3)[1, :4]
    assert torch.equal(masked.load[1].cpu(), torch.bincount(expected.flatten().cpu(), minlength=8).float())


def test_balances_under_recompute_and_compile(place: Place) -> None:
    moe = block(place, collect=True, **GROUPED)
    hidden = torch.randn(2, 6, 24, device=place.device)

    def grads(run) -> list[Tensor]:  # type: ignore[no-untyped-def]
        out = run(hidden)
        loss = out.square().mean() + fusedce.sequence_balance_loss(take_balances(moe))
        found = torch.autograd.grad(loss, list(moe.parameters()))
        take_balances(moe)
        return [loss.detach(), *found]

    expected = grads(moe)
    again = grads(lambda x: checkpoint(moe, x, use_reentrant=False))
    compiled = grads(torch.compile(moe, fullgraph=True, backend="aot_eager"))
    for other in (again, compiled):
        assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(expected, other, strict=True))


def test_keeping_the_plan_alone_gives_the_same_bits(place: Place) -> None:
    moe, hidden = block(place), torch.randn(2, 7, 24, device=place.device)
    results = []
    for save in ("pre_activation", "plan"):
        moe.save, leaf = save, hidden.clone().requires_grad_()
        out = moe(leaf)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), (leaf, *moe.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(ValueError, match="nn.MoE: argument 'save' is 'all'; expected one of"):
        block(place, save="all")


def test_options_that_no_router_has_are_refused() -> None:
    for error, message, change in [
        (TypeError, "temperature", dict(temperature=2.0)),
        (ValueError, "'tanh'; expected one of softmax, sigmoid", dict(score="tanh")),
        (ValueError, "'num_groups' is 3; expected a divisor of E = 8", dict(num_groups=3)),
        (ValueError, "'top_groups' is 5; expected 1 to num_groups = 4", dict(num_groups=4, top_groups=5)),
        (ValueError, "top_k is 3; expected 1 to num_experts = 2 of 1 of 4 groups", dict(num_groups=4)),
        (ValueError, "'scale' is -1", dict(scale=-1.0)),
    ]:
        with pytest.raises(error, match=message):
            Router(16, 8, 3, **change)
    with pytest.raises(ValueError, match="shared_ffn_size is 0 with shared_gate=True"):
        MoE(16, 8, 8, 3, shared_gate=True)
    moe = MoE(16, 8, 8, 3, shared_ffn_size=4, shared_gate=True, **GROUPED)
    assert "num_groups=4, top_groups=2, correction=True, fp32_logits=True" in repr(moe)
    assert "shared_ffn_size=4, shared_gate=True" in repr(moe)
    shapes = {name: tuple(p.shape) for name, p in moe.named_parameters(recurse=False) if name.startswith("shared")}
    assert shapes == {"shared_gate_up_proj": (8, 16), "shared_down_proj": (16, 4), "shared_gate": (1, 16)}


class Config:
    """A config of no library: the presets read attributes."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)


def test_presets_read_a_config() -> None:
    deepseek = Config(
        model_type="deepseek_v3", hidden_size=16, n_routed_experts=8, num_experts_per_tok=3, norm_topk_prob=True,
        routed_scaling_factor=2.5, n_group=4, topk_group=2, moe_intermediate_size=6, n_shared_experts=2,
        hidden_act="silu",
    )  # fmt: skip
    moe = MoE.from_config(deepseek, dtype=torch.bfloat16)
    options = moe.router.options
    assert (options.score, options.scale, options.num_groups, options.top_groups) == ("sigmoid", 2.5, 4, 2)
    assert moe.router.correction.dtype == torch.float32 and moe.down_proj.dtype == torch.bfloat16
    assert moe.shared_down_proj.shape == (16, 12) and moe.shared_gate is None
    mixtral = Config(model_type="mixtral", hidden_size=16, num_local_experts=4, num_experts_per_tok=2)
    assert Router.from_config(mixtral, scale=3.0).options.scale == 3.0
    with pytest.raises(ValueError, match="no preset for model_type 'gpt_neo'; known: deepseek_v2, "):
        Router.from_config(Config(model_type="gpt_neo"))
    with pytest.raises(ValueError, match="hidden_act 'gelu' are not plain SwiGLU"):
        MoE.from_config(Config(**{**deepseek.__dict__, "hidden_act": "gelu"}))
