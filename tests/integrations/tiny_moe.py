"""Small random mixture-of-experts models of transformers, one of each way to route."""

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.integrations.tiny import SIZES, YARN

TOP = dict(num_experts_per_tok=2)
QWEN = dict(TOP, num_experts=6, moe_intermediate_size=24)
SHARED = dict(QWEN, shared_expert_intermediate_size=20)
LINEAR = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
              num_key_value_heads=4)  # fmt: skip
GROUPS = dict(TOP, n_routed_experts=8, moe_intermediate_size=24, n_shared_experts=2, first_k_dense_replace=1,
              n_group=4, topk_group=2, routed_scaling_factor=2.5, num_hidden_layers=3)  # fmt: skip

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**SIZES, **TOP, num_local_experts=6, output_router_logits=True),
    "olmoe": lambda: OlmoeConfig(**SIZES, **TOP, num_experts=6, norm_topk_prob=False, output_router_logits=True),
    "qwen2-moe": lambda: Qwen2MoeConfig(**SIZES, **SHARED, norm_topk_prob=False),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZES, **QWEN, norm_topk_prob=True, output_router_logits=True),
    "qwen3-next": lambda: Qwen3NextConfig(**SIZES, **SHARED, **LINEAR),
    "qwen3.5-moe": lambda: Qwen3_5MoeTextConfig(**SIZES, **SHARED, **LINEAR),
    "deepseek-v2": lambda: DeepseekV2Config(**{**SIZES, **LATENT, **GROUPS}, topk_method="group_limited_greedy"),
    "deepseek-v3": lambda: DeepseekV3Config(**{**SIZES, **LATENT, **GROUPS}),
    "glm4-moe": lambda: Glm4MoeConfig(**{**SIZES, **GROUPS}),
    # A clamp that bites.
    "gpt-oss": lambda: GptOssConfig(**SIZES, **TOP, num_local_experts=6, rope_parameters=YARN, swiglu_limit=0.8),
}
SWIGLU = [family for family in FAMILIES if family != "gpt-oss"]


def tiny_moe(family: str) -> PreTrainedModel:
    """A model in fp32 with stock experts in a plain loop, and a correction that counts where it has one."""
    config = FAMILIES[family]()
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            # routers begin at 0 in some families, where every expert ties
            parameter.copy_(0.25 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    return model
