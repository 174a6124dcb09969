"""A model's sizes from the config.json that transformers writes, read as JSON: transformers need not be installed."""

import difflib
import json
from pathlib import Path
from typing import Any

from fusedce.plan.models import MODELS, Latent, Linear, Model

Config = dict[str, Any]


def model_named(name: str) -> Model:
    """A preset by name, or the model of a config.json: the file, or the folder that it lies in.

    ValueError, one line, for an unknown name and for a file that is no such config.
    """
    path = Path(name)
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return read(path)
    near = difflib.get_close_matches(name.lower(), MODELS, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; expected a config.json or one of {', '.join(MODELS)}"
    raise ValueError(f"model is {name!r}{hint}")


def read(path: Path) -> Model:
    """The model of a config file. ValueError for a file that cannot be read, or that lacks a size."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"model: {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"model: {path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"model: {path} holds no object")
    # Models that see keep the decoder's config beside the vision tower's.
    inner = config.get("text_config", config)
    tied = inner.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    name = str(path.parent.name or config.get("model_type", "model"))
    return from_config(inner | {"tie_word_embeddings": tied}, name, str(path))


def from_config(config: Config, name: str, source: str) -> Model:
    """The model of a config's dictionary, by the keys that Mixtral, Qwen, DeepSeek, gpt-oss and Llama use."""

    def size(*keys: str, default: int | None = None) -> int:
        for key in keys:
            value = config.get(key)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise ValueError(f"model: {source}: {key} is {value!r}; expected a count")
                return value
        if default is None:
            raise ValueError(f"model: {source} has no {' or '.join(keys)}")
        return default

    layers, hidden, heads = size("num_hidden_layers"), size("hidden_size"), size("num_attention_heads")
    if not layers or not heads:
        raise ValueError(f"model: {source}: no layers or no heads")
    experts = size("num_experts", "num_local_experts", "n_routed_experts", default=0)
    ffn = size("moe_intermediate_size", "intermediate_size")
    shared = size("shared_expert_intermediate_size", default=size("n_shared_experts", default=0) * ffn)
    kinds = _kinds(config, layers)
    dense = _dense_layers(config, layers) if experts else layers
    return Model(
        name,
        layers,
        hidden,
        heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=hidden // heads),
        vocab=size("vocab_size"),
        experts=experts,
        top_k=size("num_experts_per_tok", "num_experts_per_token", "moe_topk") if experts else 0,
        ffn=ffn,
        shared_ffn=shared if experts else 0,
        dense_layers=dense,
        dense_ffn=size("intermediate_size", default=ffn) if dense else 0,
        window=size("sliding_window", default=0),
        sliding_layers=kinds.count("sliding_attention"),
        linear_layers=kinds.count("linear_attention"),
        linear=_linear(size) if "linear_attention" in kinds else None,
        latent=_latent(size) if config.get("kv_lora_rank") else None,
        # Qwen3-Next and Qwen3.5 gate attention's output, and say so by their linear layers only.
        gated=bool(config.get("attn_output_gate", "linear_attention" in kinds)),
        tied=bool(config.get("tie_word_embeddings", False)),
        source=source,
    )


def _linear(size: Any) -> Linear:
    return Linear(
        size("linear_num_key_heads"),
        size("linear_num_value_heads"),
        size("linear_key_head_dim"),
        size("linear_value_head_dim"),
        size("linear_conv_kernel_dim", default=4),
    )


def _latent(size: Any) -> Latent:
    return Latent(
        q_rank=size("q_lora_rank", default=0),
        kv_rank=size("kv_lora_rank"),
        nope_dim=size("qk_nope_head_dim"),
        rope_dim=size("qk_rope_head_dim"),
        v_dim=size("v_head_dim"),
    )


def _kinds(config: Config, layers: int) -> list[str]:
    """Each layer's kind of attention."""
    given = config.get("layer_types")
    if isinstance(given, list):
        return [str(kind) for kind in given]
    model_type = str(config.get("model_type", ""))
    if model_type.startswith(("qwen3_next", "qwen3_5")):
        every = int(config.get("full_attention_interval", 4))
        return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    if model_type == "gpt_oss":
        return ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return ["full_attention"] * layers


def _dense_layers(config: Config, layers: int) -> int:
    """How many layers have no experts: the first ones, the listed ones, or all but every `decoder_sparse_step`-th."""
    listed = {i for i in config.get("mlp_only_layers") or () if i < layers}
    step = int(config.get("decoder_sparse_step") or 1)
    skipped = {i for i in range(layers) if (i + 1) % step}
    return max(int(config.get("first_k_dense_replace") or 0), len(listed | skipped))
