"""`fusedce plan`: what it prints, its JSON, its exit codes; the launch line is one that `fusedce train` takes."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fusedce import cli
from fusedce.plan import launch, show
from fusedce.plan.command import EXAMPLES, PlanConfig, job_of
from fusedce.plan.recipe import solve
from fusedce.train.config import SftConfig, check
from fusedce.train.mesh import choose_layout
from fusedce.train.run import parse
from tests.house.source import ROOT, read

SMALL = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A folder with a small model's config."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return str(tmp_path)


def test_the_plan_on_a_screen(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(["plan", "--gpus", "32", "--sweep"]) == 0
    out = capsys.readouterr().out
    for text in ("qwen3-30b-a3b", "one layout", "EP", "the node", "memory", "of 80 GB", "MFU model", "MFU hardware"):
        assert text in out
    assert "81 configurations" in out and "none of them need be tried" in out
    assert "next card up, H200 SXM" in out and "torchrun --nnodes 4 --nproc-per-node 8" in out


def test_json_is_whole(capsys) -> None:
    assert cli.main(["plan", "--gpus", "32", "--json", "--sweep"]) == 0
    found = json.loads(capsys.readouterr().out)
    layout = found["layout"]
    assert layout["pp"] * layout["tp"] * layout["cp"] * layout["dp"] == 32
    assert sum(found["peak"]["parts"].values()) == pytest.approx(found["peak"]["bytes"])
    assert sum(found["step"]["parts"].values()) == pytest.approx(found["step"]["seconds"])
    assert len(found["sweep"]) == 81 and found["mfu"]["model"] < found["mfu"]["hardware"]
    assert found["peak"]["bytes"] == max(found["moments"].values()) <= found["gpu"]["memory"]


def test_comparison(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    cards = ["plan", "--model", "qwen3.5-35b-a3b", "--gpus", "32", "--compare", "h100,mi300x,mi355x"]
    assert cli.main(cards) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("H100 SXM", "MI300X", "MI355X", "simplest CP that fits"))
    assert cli.main([*cards, "--json"]) == 0
    assert [entry["gpu"]["name"] for entry in json.loads(capsys.readouterr().out)] == ["h100", "mi300x", "mi355x"]
    assert cli.main(["plan", "--gpus", "1", "--model", "deepseek-v3-like", "--compare", "h100,b200"]) == 1
    assert "nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "qwen3"], 2, "model is 'qwen3'"),
        (["--gpu", "h10"], 2, "did you mean h100?"),
        (["--compare", "h100,x"], 2, "gpu is 'x'"),
        (["--compare", "h100", "--sweep"], 2, "--compare and --sweep do not go together"),
        (["--gpus", "0"], 2, "gpus is 0"),
        (["--seq-len", "-5"], 2, "seq_len is -5"),
        (["--tokens-per-step", "1000"], 2, "expected a multiple of seq_len = 131072"),
        (["--recompute", "1.5"], 2, "recompute is 1.5"),
        (["--reserve-gb", "80"], 2, "reserve_gb is 80.0"),
        (["--gpus", "32", "--png", "nowhere/plan.png"], 2, "nowhere/plan.png: No such file"),
        (["--model", "deepseek-v3-like", "--gpus", "8"], 1, "the smallest peak is"),
    ],
)
def test_exit_codes(arguments: list[str], code: int, message: str, capsys) -> None:
    assert cli.main(["plan", *arguments]) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("fusedce plan: ")


def test_a_library_of_the_extra_that_is_missing_is_named(capsys, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "fusedce.plan.command")
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.main(["plan"]) == 1
    assert capsys.readouterr().err == "fusedce plan needs tyro: pip install 'fusedce[train]'\n"


def test_picture(tmp_path: Path, capsys) -> None:
    assert cli.main(["plan", "--gpus", "32", "--png", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_launch_on_one_card_is_a_run_of_the_trainer(small: str) -> None:
    answer = solve(job_of(PlanConfig(small, gpus=1, seq_len=512, tokens_per_step=4096)))
    line, *remarks = launch.commands(answer)
    assert all(remark.startswith("#") for remark in remarks)
    words = shlex.split(line)
    assert words[:3] == ["fusedce", "train", "sft"]
    config = parse(words[2:])
    check(config)
    assert isinstance(config, SftConfig) and (config.seq_len, config.batch_size, config.micro_batch) == (512, 8, 1)
    model = config.model
    assert (model.hidden_size, model.num_experts, model.top_k, model.vocab_size, model.tied) == (64, 8, 2, 300, True)


def test_launch_on_several_cards_is_a_run_of_the_trainer_where_it_has_the_mesh(small: str) -> None:
    answer = solve(job_of(PlanConfig(small, gpus=16, seq_len=512, tokens_per_step=16384)))
    (line,) = launch.commands(answer)
    words = shlex.split(line)
    assert words[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "8"]
    config = parse(words[words.index("fusedce.train") + 1 :])
    check(config)
    assert isinstance(config, SftConfig) and config.batch_size == 32 and config.ep == answer.layout.ep == 4
    assert choose_layout(16, 8, config.model.num_experts, config.ep).efsdp == 4
    assert config.model.moe_chunks == answer.layout.chunks
    apart = replace(answer, best=replace(answer.best, layout=replace(answer.layout, cp=2, dp=8)))
    assert "TRAIN.py" in launch.commands(apart)[0] and "fusedce.train" not in launch.commands(apart)[0]


def test_a_model_that_the_trainer_cannot_build_is_not_promised() -> None:
    answer = solve(job_of(PlanConfig("gpt-oss-20b", gpu="mi355x", gpus=1, seq_len=1024, dtypes="bf16")))
    assert answer.layout.world == 1 and not any(line.startswith("fusedce") for line in launch.commands(answer))


def test_bars_are_as_long_as_their_total() -> None:
    assert show.bar({"a": 1.0, "b": 1.0}, 4.0, 8).plain == "████····"
    assert show.bar({"a": 1.0, "b": 0.0, "c": 9.0}, 4.0, 8).plain == "████████"


def test_every_example_of_the_help_is_a_command_line(capsys) -> None:
    lines = re.findall(r"^  fusedce plan (.*?)(?:  .*)?$", EXAMPLES, re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        if "config.json" not in line and "png" not in line and "--run" not in line:
            assert cli.main(["plan", *shlex.split(line)]) == 0
    capsys.readouterr()


def test_a_plan_needs_no_torch(tmp_path: Path) -> None:
    """With torch away, imported from the files themselves: `import fusedce` brings it, and so does tyro."""
    code = (
        "import sys, types, importlib\n"
        "sys.modules.update(dict.fromkeys(['torch', 'triton', 'matplotlib', 'tyro', 'numpy']))\n"
        f"package = types.ModuleType('fusedce'); package.__path__ = [{str(ROOT / 'fusedce')!r}]\n"
        "sys.modules['fusedce'] = package\n"
        "layout, recipe, gpus, models, report = (importlib.import_module('fusedce.plan.' + name)\n"
        "    for name in ('layout', 'recipe', 'gpus', 'models', 'report'))\n"
        "card, model = gpus.GPUS['h100'], models.MODELS['qwen3-30b-a3b']\n"
        "job = layout.Job(model, card, 32, 131072, 131072 * 32, layout.POLICIES['fp32-shards'], 6e9)\n"
        "print(report.as_dict(recipe.solve(job))['layout']['ep'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "8\n"


def test_rates_come_from_the_rows_of_the_benchmarks() -> None:
    rows = read("fusedce/plan/measured.csv").splitlines()
    assert len(rows) > 1 and rows[0].startswith("op,provider,case")
