"""Qwen3-MoE as transformers writes it: a model's config.json, and weights by their names there, an expert at a time.

transformers need not be installed. What `tensors` yields is what a rollout engine takes as an update of its weights.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fusedce.train import ranks
from fusedce.train.config import Config, ConfigError, ModelConfig
from fusedce.train.mesh import World
from fusedce.train.model import LM
from fusedce.train.weights import Where, copy_weights, whole

# Our key, theirs, and what theirs is if the file does not say.
KEYS = (
    ("vocab_size", "vocab_size", None),
    ("hidden_size", "hidden_size", None),
    ("num_layers", "num_hidden_layers", None),
    ("num_heads", "num_attention_heads", None),
    ("num_kv_heads", "num_key_value_heads", None),
    ("head_dim", "head_dim", None),
    ("ffn_size", "moe_intermediate_size", None),
    ("num_experts", "num_experts", None),
    ("top_k", "num_experts_per_tok", None),
    ("tied", "tie_word_embeddings", False),
    ("norm_eps", "rms_norm_eps", 1e-6),
    ("renormalize", "norm_topk_prob", False),
)
# What the trainer's model has not, and the values that mean its absence.
ABSENT = {
    "attention_bias": (False, None),
    "use_sliding_window": (False, None),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1, None),
    "hidden_act": ("silu", None),
}
STARTS = {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.norm", "layers": "model.layers"}
PARTS = (
    (".attn_norm.", ".input_layernorm."),
    (".moe_norm.", ".post_attention_layernorm."),
    (".attn.", ".self_attn."),
    (".moe.router.", ".mlp.gate."),
    (".moe.", ".mlp."),
)


def with_model(config: Config) -> Config:
    """The config with the sizes of `config.hf`; how it computes stays. ConfigError for what is no Qwen3-MoE."""
    path = Path(config.hf)
    path = path if path.suffix == ".json" else path / "config.json"
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"hf: {path}: {getattr(error, 'strerror', None) or 'no JSON'}") from error
    if not isinstance(theirs, dict) or theirs.get("model_type") != "qwen3_moe":
        raise ConfigError(f"hf: {path}: expected a config of model_type qwen3_moe")
    theirs.setdefault("num_experts", theirs.get("num_local_experts"))  # as transformers 5 writes it
    for key, values in ABSENT.items():
        if theirs.get(key) not in values:
            raise ConfigError(f"hf: {path}: {key} is {theirs[key]!r}; the trainer's model has no such thing")
    sizes: dict[str, Any] = {ours: theirs.get(key, default) for ours, key, default in KEYS}
    if missing := [key for ours, key, _ in KEYS if sizes[ours] is None]:
        raise ConfigError(f"hf: {path} has no {missing[0]}")
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"hf: {path}: rope_type is {kind!r}; expected default")
    sizes["rope_theta"] = float(theirs.get("rope_theta") or rope.get("rope_theta") or 10_000.0)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, learned_positions=0, **sizes))


def their_config(config: ModelConfig) -> dict[str, Any]:
    """config.json's contents; learned positions have no place in it."""
    sizes = {theirs: getattr(config, ours) for ours, theirs, _ in KEYS}
    fixed = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu"}
    rope = {
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }
    return {**fixed, **sizes, **rope, "decoder_sparse_step": 1, "mlp_only_layers": [], "dtype": "float32"}


def their_names(name: str, num_experts: int) -> list[str]:
    """Their names of what one weight of ours holds: itself, or the experts' in order, gate before up."""
    start, rest = name.split(".", 1)
    name = f"{STARTS[start]}.{rest}"
    for ours, theirs in PARTS:
        name = name.replace(ours, theirs)
    stem, _, kind = name.rpartition(".")
    if not stem.endswith(".experts"):
        return [name]
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    return [f"{stem}.{expert}.{part}.weight" for expert in range(num_experts) for part in parts]


def tensors(weights: Mapping[str, Tensor], num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """Their names and whole tensors, gathered a weight at a time: every rank goes through all of them."""
    for name, weight in weights.items():
        full, theirs = whole(weight), their_names(name, num_experts)
        # (E, 2F, D) is gate and up of each expert, (E, D, F) one matrix
        parts = full.flatten(0, 1).chunk(len(theirs)) if len(theirs) > 1 else (full,)
        yield from zip(theirs, parts, strict=True)


def save(weights: Mapping[str, Tensor], config: ModelConfig, folder: Path, world: World) -> None:
    """Write config.json and model.safetensors, fp32. A collective call; rank 0 writes."""
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors(weights, config.num_experts):
        if world.first:
            kept[name] = tensor.cpu().contiguous().clone()

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(their_config(config), indent=1))
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    ranks.together(write, only=0)


def load(model: LM, folder: Path) -> None:
    """Fill the model's weights from a folder's safetensors: each rank reads what it holds. ConfigError for a weight
    that is missing, left over, or of another shape.
    """
    try:
        files = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
    except SafetensorError as error:
        raise ConfigError(f"hf: {folder} has a damaged .safetensors file: {error}") from error
    if not files:
        raise ConfigError(f"hf: no .safetensors file in {folder}; name its config.json to start from random weights")
    found = {key: file for file in files for key in file.keys()}  # noqa: SIM118, a file is no dictionary
    parameters = dict(model.named_parameters())
    num_experts = model.config.num_experts
    names = {name: their_names(name, num_experts) for name in parameters}
    wanted = {theirs for each in names.values() for theirs in each}
    for key in sorted(wanted ^ found.keys() - ({"lm_head.weight"} if model.config.tied else set())):
        raise ConfigError(f"hf: {folder} has {'no' if key in wanted else 'an unknown'} {key}")

    def read(name: str, where: Where) -> Tensor:
        theirs = names[name]
        if len(theirs) == 1:
            return found[theirs[0]].get_slice(theirs[0])[where]
        if where[0].start == where[0].stop:
            return torch.empty([each.stop - each.start for each in where])
        parts = len(theirs) // num_experts
        rows = torch.cat([found[key].get_tensor(key) for key in theirs[where[0].start * parts : where[0].stop * parts]])
        return rows.unflatten(0, (where[0].stop - where[0].start, -1))[:, where[1], where[2]]

    copy_weights(model, read, {name: _shape(found, each, num_experts) for name, each in names.items()})


def _shape(found: Mapping[str, Any], names: list[str], num_experts: int) -> torch.Size:
    rows, *rest = found[names[0]].get_slice(names[0]).get_shape()
    if len(names) == 1:
        return torch.Size((rows, *rest))
    return torch.Size((num_experts, rows * (len(names) // num_experts), *rest))
