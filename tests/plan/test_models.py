"""Models and cards: sizes that are public elsewhere, and config files as transformers writes them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fusedce.arch import ARCHS
from fusedce.plan.gpus import GPUS, gpu_named
from fusedce.plan.hf_config import from_config, model_named
from fusedce.plan.models import MODELS, Model

# Billions, all and active, as the models' own pages and papers give them, to the digits they give.
PUBLISHED = {
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3.5-35b-a3b": (35, 3),
    "mixtral-8x7b": (46.7, 12.9),
    "deepseek-v3-like": (671, 37),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
}
CONFIGS: dict[str, dict[str, object]] = {
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, vocab_size=151936, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        intermediate_size=6144, decoder_sparse_step=1, mlp_only_layers=[], sliding_window=None,
        tie_word_embeddings=False,
    ),
    "qwen3.5-35b-a3b": dict(
        model_type="qwen3_5_moe",
        tie_word_embeddings=False,
        text_config=dict(
            model_type="qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40, num_attention_heads=16,
            num_key_value_heads=2, head_dim=256, vocab_size=248320, num_experts=256, num_experts_per_tok=8,
            moe_intermediate_size=512, shared_expert_intermediate_size=512, linear_conv_kernel_dim=4,
            linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
        ),
    ),
    "mixtral-8x7b": dict(
        model_type="mixtral", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=32000, num_local_experts=8, num_experts_per_tok=2, intermediate_size=14336, sliding_window=None,
    ),
    "deepseek-v3-like": dict(
        model_type="deepseek_v3", hidden_size=7168, num_hidden_layers=61, num_attention_heads=128,
        num_key_value_heads=128, vocab_size=129280, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1,
        moe_intermediate_size=2048, intermediate_size=18432, first_k_dense_replace=3, q_lora_rank=1536,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    ),
    "gpt-oss-120b": dict(
        model_type="gpt_oss", hidden_size=2880, num_hidden_layers=36, num_attention_heads=64, num_key_value_heads=8,
        head_dim=64, vocab_size=201088, num_local_experts=128, num_experts_per_tok=4, intermediate_size=2880,
        sliding_window=128,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    total, active = PUBLISHED[name]
    model = MODELS[name]
    assert model.params / 1e9 == pytest.approx(total, rel=0.012)
    # Some count the embedding as active, some do not.
    embedding = model.head_params / 1e9
    assert model.active_params / 1e9 <= active * 1.015 and model.active_params / 1e9 + embedding >= active * 0.985


@pytest.mark.parametrize("name", CONFIGS)
def test_config_file_is_the_preset(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    read = model_named(str(tmp_path))
    wanted = MODELS[name]
    # head_dim stands in no MLA config, and is used by none; a dense width counts only where there are dense layers.
    read = replace(read, name=wanted.name, source=wanted.source, head_dim=read.head_dim if not read.latent else 128)
    assert read == wanted
    assert model_named(str(tmp_path / "config.json")).params == wanted.params


def test_every_preset_but_the_twin_is_read_from_a_config() -> None:
    assert set(MODELS) - set(CONFIGS) == {"gpt-oss-20b"}


def test_a_dense_model_has_no_experts() -> None:
    llama = dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100, intermediate_size=128
    )  # fmt: skip
    model = from_config(llama, "llama", "x")
    assert (model.experts, model.top_k, model.moe_layers, model.dense_layers, model.dense_ffn) == (0, 0, 0, 2, 128)
    assert model.params == 2 * (4 * 64 * 64 + 3 * 64 * 128) + 2 * 100 * 64


def test_sparse_steps_and_listed_dense_layers_count() -> None:
    base = CONFIGS["qwen3-30b-a3b"]
    assert from_config(base | {"decoder_sparse_step": 2}, "x", "x").moe_layers == 24
    assert from_config(base | {"mlp_only_layers": [0, 1, 99]}, "x", "x").moe_layers == 46


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": "48"}, "num_hidden_layers is '48'; expected a count"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_experts_per_tok": True}, "num_experts_per_tok is True"),
        ({"num_hidden_layers": 0}, "no layers"),
    ],
)
def test_bad_config_ends_in_one_line(change: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3-30b-a3b"] | change))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        model_named(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "message"), [("{", "is no JSON"), ("[]", "holds no object")])
def test_a_file_that_is_no_config(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        model_named(str(tmp_path))


def test_names_are_suggested() -> None:
    with pytest.raises(ValueError, match="did you mean qwen3-30b-a3b"):
        model_named("qwen3-30b")
    with pytest.raises(ValueError, match="did you mean mi300x"):
        gpu_named("mi300")
    with pytest.raises(ValueError, match="No such file"):
        model_named("nowhere/config.json")
    assert gpu_named("MI355X").title == "MI355X" and isinstance(model_named("Mixtral-8x7B"), Model)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_cards_have_a_source_and_an_architecture(gpu) -> None:
    assert gpu.source and gpu.arch in ARCHS
    # A sparse peak in the table would make every MFU half of what it is.
    assert gpu.peak < 2.6e15 and 80e9 <= gpu.memory <= 288e9 and 3e12 < gpu.hbm <= 8e12
