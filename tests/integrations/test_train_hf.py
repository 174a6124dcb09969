"""The reference trainer's model against transformers' Qwen3-MoE: its config, its logits, its files, both ways."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from fusedce.train import hf
from fusedce.train import run as run_module
from fusedce.train.config import ConfigError, GrpoConfig, ModelConfig
from fusedce.train.mesh import alone
from fusedce.train.sharding import build

WHERE = alone(torch.device("cpu"))


def theirs(folder: Path, **changes: object) -> Qwen3MoeForCausalLM:
    """A small random model, saved in `folder`. Norms are not all 1, so that none is taken for another."""
    torch.manual_seed(3)
    values: dict[str, object] = dict(
        vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True, tie_word_embeddings=False,
        rope_theta=50_000.0, rms_norm_eps=1e-5, intermediate_size=40, max_position_embeddings=64,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**values, **changes})).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif "gate.weight" in name:
            parameter.data.mul_(20)
    model.save_pretrained(folder)
    return model


def ours(folder: Path):  # type: ignore[no-untyped-def]
    config = hf.with_model(GrpoConfig(hf=str(folder)))
    model = build(config.model, WHERE, 0)
    hf.load(model, folder)
    return model


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"norm_topk_prob": False}], ids=str)
def test_logits_are_theirs(tmp_path: Path, changes: dict[str, object]) -> None:
    expected, ids = theirs(tmp_path, **changes), torch.randint(97, (3, 20))
    model = ours(tmp_path)
    with torch.no_grad():
        gold = expected(ids).logits
        logits = model.head.logits(model(ids))
    assert (logits - gold).abs().max() <= 2e-5 * gold.abs().max()
    other = replace(model.config, renormalize=not model.config.renormalize)
    blind = build(other, WHERE, 0)
    hf.load(blind, tmp_path)
    assert (blind.head.logits(blind(ids)) - gold).abs().max() > 1e-3 * gold.abs().max()


@pytest.mark.parametrize("tied", [False, True])
def test_round_trip_is_bit_equal(tmp_path: Path, tied: bool) -> None:
    """Their file, our model, our file: the same names and bits; and transformers reads it."""
    expected = theirs(tmp_path / "theirs", tie_word_embeddings=tied)
    model = ours(tmp_path / "theirs")
    hf.save(dict(model.named_parameters()), model.config, tmp_path / "ours", WHERE)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys() and ("lm_head.weight" in before) != tied
    assert "model.layers.2.mlp.experts.7.up_proj.weight" in before
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert isinstance(read, Qwen3MoeForCausalLM)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, read.state_dict()[name]), name
    ids = torch.randint(97, (2, 9))
    assert torch.equal(read(ids).logits, expected(ids).logits)


def test_refusals(tmp_path: Path) -> None:
    theirs(tmp_path)
    path = tmp_path / "config.json"
    good = json.loads(path.read_text())
    for change, message in (
        ({"model_type": "llama"}, "expected a config of model_type qwen3_moe"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers is"),
        ({"num_local_experts": None}, "has no num_experts"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
    ):
        path.write_text(json.dumps(good | change))
        with pytest.raises(ConfigError, match=message):
            hf.with_model(GrpoConfig(hf=str(tmp_path)))
    path.write_text(json.dumps(good | {"num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match="has an unknown model.layers.2"):
        ours(tmp_path)
    path.write_text(json.dumps(good | {"moe_intermediate_size": 12}))
    with pytest.raises(ConfigError, match="gate_up_proj is .* here and .* in the checkpoint"):
        ours(tmp_path)
    path.write_text(json.dumps(good))
    file = tmp_path / "model.safetensors"
    kept = {k: v for k, v in load_file(file).items() if "experts.5.down" not in k}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="has no model.layers.0.mlp.experts.5.down_proj"):
        ours(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        hf.with_model(GrpoConfig(hf=str(tmp_path / "nothing")))


def test_a_run_from_their_model_to_one_of_theirs(tmp_path: Path) -> None:
    theirs(tmp_path / "start")
    config = GrpoConfig(
        steps=2, device="cpu", hf=str(tmp_path / "start"), export=str(tmp_path / "end"), out=str(tmp_path / "run"),
        num_prompts=4, eval_prompts=8, model=ModelConfig(backend="eager"),
    )  # fmt: skip
    assert run_module.run(config) == 0
    start, end = (load_file(tmp_path / name / "model.safetensors") for name in ("start", "end"))
    assert start.keys() == end.keys() and all(not torch.equal(start[k], end[k]) for k in ("lm_head.weight",))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "end").config.num_experts == 8
