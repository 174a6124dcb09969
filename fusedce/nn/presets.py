"""How the model families of transformers route, read from their configs. A row a family; transformers is not
imported."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["MoEPreset", "RouterPreset", "moe_preset", "router_preset"]


@dataclass(frozen=True)
class RouterPreset:
    """The sizes of a router and its `RouterOptions`, as keywords."""

    hidden_size: int
    num_experts: int
    top_k: int
    options: dict[str, Any]


@dataclass(frozen=True)
class MoEPreset:
    """The sizes of a block beside its router's. shared_ffn_size: 0 without shared experts."""

    ffn_size: int
    shared_ffn_size: int
    shared_gate: bool


def _softmax(config: Any) -> dict[str, Any]:
    return dict(renormalize=bool(config.norm_topk_prob))


def _renormalized(config: Any) -> dict[str, Any]:
    return {}


def _gpt_oss(config: Any) -> dict[str, Any]:
    # Its softmax over the chosen logits is ours over all, renormalized.
    return dict(bias=True)


def _deepseek_v2(config: Any) -> dict[str, Any]:
    groups = {}
    if config.topk_method == "group_limited_greedy":
        groups = dict(num_groups=config.n_group, top_groups=config.topk_group, group_best=1)
    # transformers does not renormalize here, whatever norm_topk_prob says.
    return dict(renormalize=False, scale=config.routed_scaling_factor, fp32_logits=True, **groups)


def _deepseek_v3(config: Any) -> dict[str, Any]:
    return dict(
        score="sigmoid",
        renormalize=bool(config.norm_topk_prob),
        scale=config.routed_scaling_factor,
        num_groups=config.n_group or 1,
        top_groups=config.topk_group or 1,
        correction=True,
        fp32_logits=True,
    )


@dataclass(frozen=True)
class _Family:
    """options: the router's. num_experts, ffn: names in the config. shared: "", "gated" or "summed"."""

    options: Callable[[Any], dict[str, Any]]
    num_experts: str = "num_experts"
    ffn: str = "moe_intermediate_size"
    shared: str = ""


FAMILIES = {
    "mixtral": _Family(_renormalized, "num_local_experts", "intermediate_size"),
    "olmoe": _Family(_softmax, ffn="intermediate_size"),
    "qwen2_moe": _Family(_softmax, shared="gated"),
    "qwen3_moe": _Family(_softmax),
    "qwen3_next": _Family(_softmax, shared="gated"),
    "qwen3_5_moe_text": _Family(_renormalized, shared="gated"),
    "gpt_oss": _Family(_gpt_oss, "num_local_experts", "intermediate_size"),
    "deepseek_v2": _Family(_deepseek_v2, "n_routed_experts", shared="summed"),
    "deepseek_v3": _Family(_deepseek_v3, "n_routed_experts", shared="summed"),
    "glm4_moe": _Family(_deepseek_v3, "n_routed_experts", shared="summed"),
}


def router_preset(config: Any) -> RouterPreset:
    """The router of a config with a `model_type` of FAMILIES; ValueError for another."""
    family = _family(config)
    num_experts = getattr(config, family.num_experts)
    return RouterPreset(config.hidden_size, num_experts, config.num_experts_per_tok, family.options(config))


def moe_preset(config: Any) -> MoEPreset:
    """The block of such a config; ValueError also where its experts are not SwiGLU without biases."""
    family = _family(config)
    activation = getattr(config, "hidden_act", None)
    if activation != "silu" or config.model_type == "gpt_oss":
        raise ValueError(
            f"fusedce: the experts of {config.model_type} with hidden_act {activation!r} are not plain SwiGLU"
        )
    shared = 0
    if family.shared == "gated":
        shared = config.shared_expert_intermediate_size
    elif family.shared == "summed":
        shared = config.moe_intermediate_size * (config.n_shared_experts or 0)
    return MoEPreset(getattr(config, family.ffn), shared, family.shared == "gated")


def _family(config: Any) -> _Family:
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in FAMILIES:
        raise ValueError(f"fusedce: no preset for model_type {kind!r}; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[kind]
