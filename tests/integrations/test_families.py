"""Every causal LM of transformers: fused right, or refused by name, and never wrong."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fusedce.integrations.transformers import fuse_lm_head
from tests.integrations.tiny import SIZES, assert_same, loss_and_gradients

pytestmark = pytest.mark.slow

# The names that configs give to their sizes. A config takes those that it has.
NAMES = dict(
    **SIZES,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_heads", "n_head"), 4),
    decoder_attention_heads=4,
    **dict.fromkeys(("num_experts_per_tok", "n_layer", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("n_embd", "d_model"), 32),
    **dict.fromkeys(("ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 48),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "state_size"), 8),
    layer_types=None,
    is_decoder=True,
    final_logit_softcapping=3.0,
    logits_scaling=3.0,
)
MOST_PARAMETERS = 20_000_000
# Types whose smallest config needs sizes of its own, or a kernel that a CPU has not, cannot be built here. A floor on
# the others keeps this test from passing by building nothing.
LEAST_FUSED = 100


def build(kind: str) -> PreTrainedModel | None:
    """A small model of this type with finite logits, or None where the names above do not lead to one."""
    try:
        default = AutoConfig.for_model(kind)
        if default.get_text_config() is not default:
            return None
        config = AutoConfig.for_model(kind, **{k: v for k, v in NAMES.items() if hasattr(default, k)})
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            return None
        model = AutoModelForCausalLM.from_config(config).float().eval()
        stock = loss_and_gradients(model, **inputs())
    except Exception:  # whatever a config of another's making raises
        return None
    return model if stock["loss"].isfinite() else None


def inputs() -> dict[str, torch.Tensor]:
    input_ids = torch.arange(3, 27).reshape(2, 12)
    return dict(input_ids=input_ids, labels=input_ids.masked_fill(input_ids < 7, -100))


def outcome(kind: str) -> str:
    """ "fused", "unbuilt", or the sentence that refuses it; fails where the fused loss or a gradient is wrong."""
    model = build(kind)
    if model is None:
        return "unbuilt"
    expected = loss_and_gradients(model, **inputs())
    try:
        with fuse_lm_head(model):
            out = loss_and_gradients(model, **inputs())
    except (TypeError, NotImplementedError) as refused:
        return str(refused)
    # some types leave parameters with gradients that cancel to rounding
    assert_same(out, expected, rtol=1e-4)
    return "fused"


VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
QWEN_VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
QWEN_ROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]))


@pytest.mark.parametrize(
    "kind, vision, text",
    [("gemma3", VISION, {}), ("llava", VISION, {}), ("qwen3_vl", QWEN_VISION, QWEN_ROPE)],
    ids=["gemma3", "llava", "qwen3_vl"],
)
def test_models_of_images_and_text(kind: str, vision: dict[str, int], text: dict[str, object]) -> None:
    """Their loss on text, which goes through the same head and `loss_function`."""
    default = AutoConfig.for_model(kind)
    sizes = {k: v for k, v in SIZES.items() if hasattr(default.get_text_config(), k)}
    text_config = type(default.get_text_config())(**sizes, **text)
    model = AutoModelForImageTextToText.from_config(
        type(default)(text_config=text_config.to_dict(), vision_config=vision)
    )
    expected = loss_and_gradients(model, **inputs())
    with fuse_lm_head(model):
        assert_same(loss_and_gradients(model, **inputs()), expected)


@pytest.mark.timeout(900)
def test_every_type_is_right_or_refused() -> None:
    outcomes = {kind: outcome(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    refused = {kind: what for kind, what in outcomes.items() if what not in ("fused", "unbuilt")}
    assert all(what.startswith("fusedce") for what in refused.values()), refused
    assert sum(what == "fused" for what in outcomes.values()) >= LEAST_FUSED, outcomes
