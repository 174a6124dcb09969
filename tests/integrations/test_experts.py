"""fuse_experts: values, every gradient and undo for every family; what is refused."""

import copy

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import fusedce
from fusedce.integrations import transformers_experts
from fusedce.integrations.transformers import fuse_experts, fuse_lm_head
from tests.integrations import test_families
from tests.integrations.tiny import assert_same, batch, loss_and_gradients, tiny
from tests.integrations.tiny_moe import FAMILIES, tiny_moe


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "is_concatenated")]


@pytest.mark.parametrize("family", FAMILIES)
def test_values_every_gradient_and_undo(family: str) -> None:
    model, inputs = tiny_moe(family), batch()
    stock = loss_and_gradients(model, **inputs)
    logits = model(**inputs).logits.detach()
    names = {m.config._experts_implementation for m in experts_of(model)}
    handle = fuse_experts(model)
    assert {m.config._experts_implementation for m in experts_of(model)} == {"fusedce"} != names
    fused = loss_and_gradients(model, **inputs)
    assert_same(fused, stock, rtol=2e-5)
    assert any(name.endswith("gate_up_proj") for name in fused)
    assert torch.allclose(model(**inputs).logits, logits, atol=2e-5 * float(logits.abs().max()))
    handle.undo()
    handle.undo()
    assert {m.config._experts_implementation for m in experts_of(model)} == names
    assert torch.equal(model(**inputs).logits, logits)


def test_the_experts_are_really_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(*args: object, backend: str, **options: object) -> torch.Tensor:
        calls.append(backend)
        return fusedce.moe_experts(*args, backend=backend, **options)

    monkeypatch.setattr(transformers_experts, "moe_experts", counted)
    model, inputs = tiny_moe("qwen3-moe"), batch()
    with fuse_experts(model, backend="eager"):
        model(**inputs)
    model(**inputs)
    assert calls == ["eager"] * model.config.num_hidden_layers


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh"])
def test_experts_gated_by_gelu(activation: str) -> None:
    model, inputs = tiny_moe("mixtral"), batch()
    for experts in experts_of(model):
        experts.act_fn = ACT2FN[activation]
    stock = loss_and_gradients(model, **inputs)
    with fuse_experts(model):
        assert_same(loss_and_gradients(model, **inputs), stock, rtol=2e-5)


def test_with_the_fused_head_and_checkpointing() -> None:
    model, inputs = tiny_moe("qwen3-moe"), batch()
    stock = loss_and_gradients(model, **inputs)
    model.gradient_checkpointing_enable()
    model.train()
    with fuse_experts(model, save="plan"), fuse_lm_head(model):
        assert experts_of(model)[0].config._experts_implementation == "fusedce_plan"
        assert_same(loss_and_gradients(model, **inputs), stock, rtol=2e-5)


def test_autocast_and_mixed_dtypes() -> None:
    model, inputs = tiny_moe("mixtral"), batch()
    with fuse_experts(model), torch.autocast("cpu", torch.bfloat16):
        out = model(**inputs)
    out.loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    (experts, *_) = experts_of(model)
    experts.to(torch.bfloat16)
    hidden = torch.randn(5, 32)
    index, weights = torch.tensor([[0, 1]] * 5), torch.rand(5, 2)
    with fuse_experts(model):
        assert experts(hidden, index, weights).dtype == torch.float32


def test_slots_of_other_ranks_take_no_part() -> None:
    """transformers' expert parallelism marks them with the id E."""
    model = tiny_moe("mixtral")
    (experts, *_) = experts_of(model)
    hidden, weights = torch.randn(7, 32), torch.rand(7, 2)
    index = torch.randint(0, 6, (7, 2))
    elsewhere = torch.rand(7, 2) < 0.4
    expected = experts(hidden, index, weights.masked_fill(elsewhere, 0.0))
    experts._is_expert_parallel = True
    with fuse_experts(model):
        out = experts(hidden, index.masked_fill(elsewhere, 6), weights.masked_fill(elsewhere, torch.nan))
    assert torch.allclose(out, expected, atol=1e-5)


def test_one_graph() -> None:
    model, inputs = tiny_moe("olmoe"), batch()
    (experts, *_) = experts_of(model)
    hidden, index, weights = torch.randn(9, 32), torch.randint(0, 6, (9, 2)), torch.rand(9, 2)
    with fuse_experts(model):
        expected = experts(hidden, index, weights)
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(hidden, index, weights), expected)
    assert model(**inputs).loss.isfinite()


def test_a_copy_is_fused_and_its_own() -> None:
    model, inputs = tiny_moe("mixtral"), batch()
    handle = fuse_experts(model)
    twin = copy.deepcopy(model)
    handle.undo()
    assert {m.config._experts_implementation for m in experts_of(twin)} == {"fusedce"}
    assert torch.allclose(twin(**inputs).loss, model(**inputs).loss, rtol=1e-5)


def test_what_is_not_fused_is_refused_by_name() -> None:
    other = tiny_moe("gpt-oss")
    experts_of(other)[1].alpha = 1.5
    with pytest.raises(TypeError, match="the experts of GptOssExperts have an activation of their own"):
        fuse_experts(other)
    with pytest.raises(TypeError, match="LlamaForCausalLM has no experts of transformers' registry"):
        fuse_experts(tiny("llama"))
    with pytest.raises(TypeError, match="Linear has no set_experts_implementation"):
        fuse_experts(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="'cuda'; expected one of"):
        fuse_experts(tiny_moe("mixtral"), backend="cuda")
    with pytest.raises(ValueError, match="'all'; expected one of"):
        fuse_experts(tiny_moe("mixtral"), save="all")
    model = tiny_moe("mixtral")
    before = model.get_experts_implementation()
    (experts, *_) = experts_of(model)
    for change, message in [
        (dict(has_gate=False), "have no gate"),
        (dict(act_fn=nn.ReLU()), "have the activation ReLU"),
        (dict(has_post_expert_norm=True), "have a norm behind each expert"),
    ]:
        kept = {name: getattr(experts, name) for name in change}
        for name, value in change.items():
            setattr(experts, name, value)
        with pytest.raises(TypeError, match=f"the experts of MixtralExperts {message}, which is not fused"):
            fuse_experts(model)
        for name, value in kept.items():
            setattr(experts, name, value)
    assert model.get_experts_implementation() == before
    handle = fuse_experts(model)
    experts.has_post_expert_norm = True
    with pytest.raises(TypeError, match="have a norm behind each expert"):
        model(**batch())
    handle.undo()


# Types with experts whose smallest config leads to a model here; a floor keeps the test from passing by building
# nothing.
LEAST_FUSED = 20


def outcome(kind: str) -> str:
    """ "fused", "no experts", "unbuilt", or the sentence that refuses it; fails where a value or gradient is wrong."""
    model = test_families.build(kind)
    if model is None:
        return "unbuilt"
    if not experts_of(model):
        return "no experts"
    settle(model)
    model.set_experts_implementation("eager")
    stock = loss_and_gradients(model, **test_families.inputs())
    try:
        handle = fuse_experts(model)
    except TypeError as error:
        return str(error)
    try:
        assert_same(loss_and_gradients(model, **test_families.inputs()), stock, rtol=1e-4)
    finally:
        handle.undo()
    return "fused"


def settle(model: PreTrainedModel) -> None:
    """Routers at 0 would tie on every expert."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.copy_(0.25 * torch.randn_like(parameter))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_type_with_experts_is_right_or_refused() -> None:
    outcomes = {kind: outcome(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    refused = {kind: what for kind, what in outcomes.items() if what not in ("fused", "no experts", "unbuilt")}
    assert all(what.startswith("fusedce.fuse_experts: the experts of") for what in refused.values()), refused
    assert sum(what == "fused" for what in outcomes.values()) >= LEAST_FUSED, outcomes
