"""Small random causal LMs of transformers, one of each kind of head and loss, and a batch for them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 97
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
ROUTED = dict(num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.1)
YARN = dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=32, rope_theta=1e4)

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3-tied": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZES, **ROUTED, num_experts=4, moe_intermediate_size=24),
    "gpt-oss": lambda: GptOssConfig(**SIZES, **ROUTED, num_local_experts=4, rope_parameters=YARN),
    "gemma2": lambda: Gemma2Config(**SIZES, final_logit_softcapping=0.5),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, final_logit_softcapping=0.5),
    "granite": lambda: GraniteConfig(**SIZES, logits_scaling=3.0),
    "cohere": lambda: CohereConfig(**SIZES, logit_scale=0.25),
}


def tiny(family: str, *, bias: bool = False) -> PreTrainedModel:
    """A model in fp32 whose logits are large enough for a softcap and a scale to count; bias: give the head one."""
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
        if bias:
            model.lm_head.bias = nn.Parameter(torch.randn(VOCAB))
    return model


def batch(rows: int = 3, length: int = 11) -> dict[str, Tensor]:
    """Tokens, a mask with padding on the right, and labels without the padding and without a prompt."""
    input_ids = torch.randint(3, VOCAB, (rows, length))
    mask = torch.ones_like(input_ids)
    mask[1, 8:] = 0
    labels = input_ids.masked_fill(mask == 0, -100)
    labels[0, :4] = -100
    return dict(input_ids=input_ids, attention_mask=mask, labels=labels)


def loss_and_gradients(model: nn.Module, **inputs: object) -> dict[str, Tensor]:
    """The loss as "loss", and the gradient of every parameter that has one, by name."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return dict(loss=loss.detach(), **gradients)


def assert_same(out: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-5) -> None:
    """Fail unless both hold the same names and no value is off by more than rtol of its tensor's largest.

    A gradient that is 0 but for rounding, as that of a key's bias, is measured by the largest of all.
    """
    assert out.keys() == expected.keys()
    floor = 1e-7 * max(value.abs().max() for name, value in expected.items() if name != "loss")
    for name, value in expected.items():
        assert out[name].dtype == value.dtype, name
        error, bar = (out[name] - value).abs().max(), rtol * value.abs().max() + floor
        assert error <= bar, f"{name}: error {error:.2e}, allowed {bar:.2e}"
