"""fuse_lm_head: the stock model's loss and gradients, its own outputs without labels, and no trace after undo."""

import copy
import inspect
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import CausalLMOutput

from fusedce.integrations.transformers import Handle, fuse_lm_head, token_logprobs, unfuse_lm_head
from tests.integrations.tiny import FAMILIES, VOCAB, assert_same, batch, loss_and_gradients, tiny
from tests.paired import assert_close


def stock_and_fused(model, **inputs):  # type: ignore[no-untyped-def]
    expected = loss_and_gradients(model, **inputs)
    with fuse_lm_head(model):
        return loss_and_gradients(model, **inputs), expected


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient(family: str) -> None:
    model = tiny(family)
    out, expected = stock_and_fused(model, **batch())
    assert len(expected) > 15
    assert_same(out, expected)


def test_head_with_bias() -> None:
    out, expected = stock_and_fused(tiny("llama", bias=True), **batch())
    assert "lm_head.bias" in expected
    assert_same(out, expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_bf16_is_as_exact_as_the_stock_model(family: str) -> None:
    """Gold: the stock model in fp32 on the same rounded weights. Twin: the stock model in bf16."""
    model, inputs = tiny(family).bfloat16(), batch()
    gold = loss_and_gradients(copy.deepcopy(model).float(), **inputs)
    out, twin = stock_and_fused(model, **inputs)
    assert out["loss"].dtype == torch.float32
    for name, value in gold.items():
        assert_close(out[name], value, twin[name], name)


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere"])
def test_cap_and_scale_are_alive(family: str) -> None:
    """The loss of the bare head, without what the forward does to its logits, is another one."""
    model, inputs = tiny(family), batch()
    with torch.no_grad(), fuse_lm_head(model):
        loss = model(**inputs).loss
        hidden = model.model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
    bare = F.cross_entropy(model.lm_head(hidden)[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
    assert (bare - loss).abs() > 0.01 * loss


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_router_loss_is_added_once(family: str) -> None:
    model, inputs = tiny(family), batch()
    with torch.no_grad(), fuse_lm_head(model):
        with_router, without = model(**inputs), model(**inputs, output_router_logits=False)
    assert without.aux_loss is None
    assert torch.allclose(with_router.loss, without.loss + 0.1 * with_router.aux_loss)


def test_no_logits_are_made() -> None:
    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 3 and out.shape[-1] == VOCAB:
                made.append(function)
            return out

    model, inputs, made = tiny("gemma3"), batch(), []
    with fuse_lm_head(model), Watch():
        output = model(**inputs)
        assert output.logits is None and "logits" not in output and not made
        del inputs["labels"]
        model(**inputs)
        assert made


@pytest.mark.parametrize("count", [17, torch.tensor(17)], ids=["int", "tensor"])
def test_num_items_in_batch(count: object) -> None:
    """The Trainer's normalisation: micro-batches divided by the whole batch's tokens add up to the batch."""
    model, inputs = tiny("llama"), batch(4)
    out, expected = stock_and_fused(model, **inputs, num_items_in_batch=count)
    assert_same(out, expected)
    with fuse_lm_head(model):
        whole = loss_and_gradients(model, **inputs)
        count = (inputs["labels"][:, 1:] != -100).sum()
        parts = [
            loss_and_gradients(model, **{k: v[i : i + 1] for k, v in inputs.items()}, num_items_in_batch=count)
            for i in range(4)
        ]
    assert_same({name: sum(part[name] for part in parts) for name in whole}, whole)


def test_shift_labels_and_logits_to_keep() -> None:
    model, inputs = tiny("gemma2"), batch()
    shifted = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    out, expected = stock_and_fused(model, **inputs, shift_labels=shifted.roll(1, 1))
    assert_same(out, expected)
    inputs["labels"] = inputs["labels"][:, -5:]
    out, expected = stock_and_fused(model, **inputs, logits_to_keep=5)
    assert_same(out, expected)
    with fuse_lm_head(model), pytest.raises(ValueError, match="'target'"):
        model(**inputs)


def test_labels_by_position_and_tuples() -> None:
    model, inputs = tiny("llama"), batch()
    expected = model(**inputs).loss
    names = list(inspect.signature(LlamaForCausalLM.forward).parameters)[1:]
    by_position = [inputs.get(name) for name in names[: names.index("labels") + 1]]
    with fuse_lm_head(model):
        for output in (model(*by_position, return_dict=False), model(**inputs, return_dict=False)):
            assert isinstance(output, tuple)
            assert torch.allclose(output[0], expected)
            assert not any(getattr(value, "shape", ())[-1:] == (VOCAB,) for value in output)


def test_a_batch_without_labels_has_loss_zero() -> None:
    model, inputs = tiny("llama"), batch()
    inputs["labels"].fill_(-100)
    with fuse_lm_head(model):
        out = loss_and_gradients(model, **inputs)
    assert all(not value.any() for value in out.values())


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma2"])
def test_without_labels_nothing_changes(family: str) -> None:
    model, prompt = tiny(family).eval(), batch()["input_ids"][:, :4]

    def sampled() -> torch.Tensor:
        torch.manual_seed(1)
        return model.generate(prompt, max_new_tokens=6, do_sample=True)

    logits, tokens = model(prompt).logits, sampled()
    with fuse_lm_head(model):
        assert torch.equal(model(prompt).logits, logits)
        assert torch.equal(sampled(), tokens)


def test_undo_leaves_nothing_behind() -> None:
    model, inputs = tiny("gemma2"), batch()
    expected = loss_and_gradients(model, **inputs)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    state, signature = model.state_dict().keys(), inspect.signature(model.forward)
    handle = fuse_lm_head(model)
    assert inspect.signature(model.forward) == signature and model.state_dict().keys() == state
    model(**inputs).loss.backward()
    handle.undo()
    handle.undo()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    again = loss_and_gradients(model, **inputs)
    assert all(torch.equal(again[name], value) for name, value in expected.items())


def test_handles_take_back_only_themselves() -> None:
    model, inputs = tiny("llama"), batch()
    first, second = fuse_lm_head(model, in_eval=False), fuse_lm_head(model)
    model.eval()
    assert model(**inputs).logits is None
    first.undo()
    assert model(**inputs).logits is None
    second.undo()
    assert model(**inputs).logits is not None
    with fuse_lm_head(model) as outer, fuse_lm_head(model) as inner:
        assert isinstance(outer, Handle) and inner is not outer
    assert "forward" not in vars(model)


def test_a_wrapper_put_over_it_survives() -> None:
    """As Accelerate's autocast, which replaces `model.forward` by a wrapper of what it finds."""
    model, inputs = tiny("llama"), batch()
    handle = fuse_lm_head(model)
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    assert model(**inputs).logits is None
    wrapper = model.forward
    handle.undo()
    assert model.forward is wrapper and model(**inputs).logits is not None
    with fuse_lm_head(model):
        assert model(**inputs).logits is None
    assert model.forward is wrapper


def test_in_eval() -> None:
    model, inputs = tiny("llama"), batch()
    expected = model(**inputs)
    with fuse_lm_head(model, in_eval=False):
        assert model(**inputs).logits is None
        model.eval()
        assert torch.equal(model(**inputs).logits, expected.logits)
        assert token_logprobs(model, **inputs).output.logits is None
    with fuse_lm_head(model):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                output = model(**inputs)
            assert torch.allclose(output.loss, expected.loss) and output.logits is None


def test_gradient_checkpointing() -> None:
    model, inputs = tiny("gemma2"), batch()
    expected = loss_and_gradients(model, **inputs)
    model.activation_checkpointing_enable()
    with fuse_lm_head(model):
        assert_same(loss_and_gradients(model, **inputs), expected)


def test_autocast() -> None:
    """As exact as the stock model under the same autocast, which rounds its logits to bf16."""
    model, inputs = tiny("llama"), batch()
    gold = loss_and_gradients(model, **inputs)
    with torch.autocast("cpu", torch.bfloat16):
        out, twin = stock_and_fused(model, **inputs)
    for name, value in gold.items():
        assert out[name].dtype == torch.float32
        assert_close(out[name], value, twin[name], name)


@pytest.mark.slow
def test_compile_in_one_graph() -> None:
    model, inputs = tiny("gemma2"), batch()
    expected = loss_and_gradients(model, **inputs)
    with fuse_lm_head(model):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        out = loss_and_gradients(compiled, **inputs)
        assert "forward" not in vars(model.lm_head)
    assert_same({name.removeprefix("_orig_mod."): value for name, value in out.items()}, expected)


def sent(module):  # type: ignore[no-untyped-def]
    """As another process gets it."""
    return ForkingPickler.loads(ForkingPickler.dumps(module))


@pytest.mark.parametrize("copied", [copy.deepcopy, sent])
def test_copies_are_fused_and_stand_alone(copied) -> None:  # type: ignore[no-untyped-def]
    model, inputs = tiny("gemma2"), batch()
    handle = fuse_lm_head(model)
    twin = copied(model)
    twin.lm_head.weight = nn.Parameter(2 * twin.lm_head.weight)
    assert twin(**inputs).logits is None
    assert not torch.allclose(twin(**inputs).loss, model(**inputs).loss)
    handle.undo()
    assert model(**inputs).logits is not None and twin(**inputs).logits is None
    unfuse_lm_head(twin)
    unfuse_lm_head(twin)
    assert twin(**inputs).logits is not None and "forward" not in vars(twin)


def test_an_error_in_the_forward_leaves_the_model_usable() -> None:
    model, inputs = tiny("llama"), batch()
    with fuse_lm_head(model):
        bad = inputs["labels"].clone()
        bad[0, 5] = VOCAB
        with pytest.raises(ValueError, match=f"value {VOCAB}"):
            model(input_ids=inputs["input_ids"], labels=bad)
        assert "forward" not in vars(model.lm_head) and "_loss_function" not in vars(model)
        assert model(inputs["input_ids"]).logits is not None
        assert model(**inputs).loss.isfinite()


class Odd(LlamaForCausalLM):
    """A causal LM whose forward does `odd(logits)` between head and loss."""

    def forward(self, input_ids, labels=None, **kwargs):  # type: ignore[no-untyped-def]
        logits = self.odd(self.lm_head(self.model(input_ids).last_hidden_state))
        return CausalLMOutput(loss=self.loss_function(logits, labels, logits.shape[-1]), logits=logits)


@pytest.mark.parametrize(
    "odd",
    [
        lambda z: z[..., : VOCAB - 7].float(),
        lambda z: torch.mul(0.3 * F.tanh(torch.div(2 * z, 0.3)), 5),
        lambda z: torch.tanh((z / 3).to(torch.float64)).contiguous() * 7.5,
    ],
)
def test_what_a_forward_may_do_to_logits(odd) -> None:  # type: ignore[no-untyped-def]
    model, inputs = Odd(tiny("llama").config), batch()
    model.odd, inputs = odd, dict(input_ids=inputs["input_ids"], labels=inputs["labels"].clamp(max=VOCAB - 8))
    out, expected = stock_and_fused(model, **inputs)
    assert_same(out, expected)


@pytest.mark.parametrize(
    "odd, message",
    [
        (lambda z: z + 1, "uses logits.__add__|unsupported operand"),
        (lambda z: z + torch.ones(VOCAB), "add"),
        (lambda z: z * torch.ones(()), "multiplies its logits by Tensor"),
        (lambda z: z * -1.0, "multiplies its logits by -1.0"),
        (lambda z: z[:, 1:], "indexes"),
        (lambda z: z[..., 1:90], "indexes"),
        (lambda z: z.view(-1, VOCAB), "logits.view"),
        (lambda z: torch.tanh(z).tanh(), "caps its logits twice"),
        (lambda z: torch.softmax(z, -1), "softmax"),
        (lambda z: torch.zeros(tuple(z.shape)), "not its head's"),
    ],
)
def test_what_a_forward_does_to_logits_is_refused_by_name(odd, message: str) -> None:  # type: ignore[no-untyped-def]
    model, inputs = Odd(tiny("llama").config), batch()
    model.odd = odd
    with fuse_lm_head(model), pytest.raises((NotImplementedError, TypeError), match=message):
        model(inputs["input_ids"], labels=inputs["labels"])


def test_models_without_a_plain_head_are_refused() -> None:
    with pytest.raises(TypeError, match="LlamaModel has no output embeddings"):
        fuse_lm_head(LlamaModel(tiny("llama").config))
    with pytest.raises(TypeError, match="Linear has no output embeddings"):
        fuse_lm_head(nn.Linear(2, 2))
    bert = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    with pytest.raises(TypeError, match="loss of BertForMaskedLM"):
        fuse_lm_head(BertForMaskedLM(bert))
    model = tiny("llama")
    model.loss_function = F.cross_entropy
    with pytest.raises(TypeError, match="'cross_entropy'"):
        fuse_lm_head(model)
    model = tiny("llama")
    model.lm_head.forward = F.relu
    with pytest.raises(TypeError, match="forward of the head of LlamaForCausalLM was replaced"):
        fuse_lm_head(model)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(TypeError, match="meta"):
        fuse_lm_head(model)
    model = tiny("llama")
    handle = fuse_lm_head(model)
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(TypeError, match="Sequential"):
        model(**batch())
    handle.undo()


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_token_logprobs(family: str) -> None:
    model, inputs = tiny(family), batch()
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits / 0.7
    rates = torch.rand(2, *inputs["labels"].shape)
    logp, target = logits.log_softmax(-1), F.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    counts = target != -100
    logprob = logp.gather(-1, target.clamp(min=0)[..., None])[..., 0] * counts
    entropy = -(logp.exp() * logp).sum(-1) * counts

    def gradients(first, second):  # type: ignore[no-untyped-def]
        model.zero_grad()
        (rates[0] * first + rates[1] * second).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients(logprob, entropy)
    with fuse_lm_head(model):
        out = token_logprobs(model, temperature=0.7, **inputs)
        assert_same(gradients(out.logprob, out.entropy), expected, rtol=2e-5)
    assert_same(dict(logprob=out.logprob, entropy=out.entropy), dict(logprob=logprob, entropy=entropy))
    assert torch.allclose(out.lse, logits.logsumexp(-1) * counts, rtol=1e-5)
    assert torch.allclose(out.output.loss, -out.logprob.sum() / counts.sum()) and out.output.logits is None


def test_token_logprobs_options() -> None:
    """A temperature for each token, that of the logits it divides; and no entropy."""
    model, inputs = tiny("granite"), batch()
    with torch.no_grad(), fuse_lm_head(model):
        cold, warm = (token_logprobs(model, temperature=t, **inputs) for t in (0.5, 2.0))
        rows = torch.where(torch.rand(inputs["labels"].shape) < 0.5, 0.5, 2.0)
        mixed = token_logprobs(model, temperature=rows, with_entropy=False, **inputs)
    assert mixed.entropy is None
    assert torch.allclose(mixed.logprob, torch.where(rows == 0.5, cold.logprob, warm.logprob), rtol=1e-5)


def test_token_logprobs_needs_a_fused_model() -> None:
    with pytest.raises(RuntimeError, match="holds no model fused"):
        token_logprobs(tiny("llama"), **batch())
