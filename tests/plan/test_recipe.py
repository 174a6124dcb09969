"""The recipe: what it takes fits, follows its order, and is held against a search by the same model."""

import itertools
from dataclasses import replace

import pytest

from fusedce.plan.gpus import GPUS
from fusedce.plan.layout import POLICIES, Job, Layout, refuse
from fusedce.plan.memory import moments, peak
from fusedce.plan.models import MODELS, Model
from fusedce.plan.reasons import reasons
from fusedce.plan.recipe import CHUNKS, SIMPLICITY, NothingFitsError, solve
from fusedce.plan.seconds import overlapped, rows_sent, step
from fusedce.plan.sweep import compare, grid, next_up


def job(
    model: str = "qwen3-30b-a3b", gpu: str = "h100", gpus: int = 32, seq_len: int = 131_072, rounds: int = 1
) -> Job:
    card = GPUS[gpu]
    tokens = seq_len * gpus * rounds
    return Job(MODELS[model], card, gpus, seq_len, tokens, POLICIES["fp32-shards"], 0.08 * card.memory)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3.5-35b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize("gpus", [8, 12, 13, 31, 64])
def test_the_answer_fits_and_can_run(model: str, gpu: str, gpus: int) -> None:
    answer = solve(job(model, gpu, gpus, 32_768))
    assert refuse(answer.job, answer.layout) is None
    assert answer.best.peak.total <= answer.job.gpu.memory
    assert answer.layout.world == answer.job.gpus <= gpus
    assert answer.best.peak == peak(answer.job, answer.layout) and answer.best.step == step(answer.job, answer.layout)
    dims = [reason.dim for reason in reasons(answer)]
    assert dims == ["EP", "CP", "recompute", "MoE chunks", "TP", "PP", "DP", "linear CE"]
    assert all(reason.value and reason.bound_by for reason in reasons(answer))


def test_one_layer_less_recomputed_would_not_fit() -> None:
    answer = solve(job())
    layout = answer.simplest.layout
    assert 0 < layout.recomputed < 48
    fewer = replace(layout, recomputed=layout.recomputed - 1)
    assert peak(answer.job, fewer).total > answer.job.gpu.memory


@pytest.mark.parametrize("gpu", ["h100", "mi300x", "mi355x"])
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3.5-35b-a3b", "deepseek-v3-like"])
def test_nothing_of_its_own_dimensions_is_much_faster(model: str, gpu: str) -> None:
    """Every EP and CP with every chunk count and every tenth recompute, by brute force."""
    asked = job(model, gpu, 256 if model.startswith("deepseek") else 32)
    answer = solve(asked)
    fastest = float("inf")
    for ep, cp, chunks in itertools.product((8, 16, 32), (1, 2, 4, 8, 16, 32), CHUNKS):
        layout = Layout(cp=cp, dp=asked.gpus // cp, ep=ep, chunks=chunks)
        rows = layout.local_tokens(asked) * 8 * ep / asked.model.experts / chunks
        if refuse(asked, layout) or rows < 256:
            continue
        for recomputed in range(0, asked.model.layers + 1, 10):
            tried = replace(layout, recomputed=recomputed)
            if peak(asked, tried).total <= asked.gpu.memory:
                fastest = min(fastest, step(asked, tried).total)
    assert answer.best.step.total <= fastest * SIMPLICITY * 1.001


def test_simplest_is_taken_unless_it_is_slow() -> None:
    for gpu in ("h100", "mi300x"):
        answer = solve(job(gpu=gpu))
        assert answer.simplest.layout.cp <= answer.layout.cp
        if answer.simplest.layout != answer.layout:
            assert answer.simplest.step.total > SIMPLICITY * answer.best.step.total
            assert "slower" in reasons(answer)[1].bound_by


def test_more_memory_recomputes_less() -> None:
    found = compare(job("qwen3.5-35b-a3b"), [GPUS[name] for name in ("h100", "h200", "mi300x", "mi355x")], None)
    recomputed = [answer.simplest.layout.recomputed for _, answer in found]
    assert recomputed == sorted(recomputed, reverse=True) and recomputed[0] > recomputed[-1]


def test_a_batch_too_small_for_the_ranks_forces_context_parallelism() -> None:
    answer = solve(replace(job(seq_len=32_768), tokens_per_step=4 * 32_768))
    assert answer.layout.dp <= 4 and answer.layout.cp * answer.layout.tp * answer.layout.pp >= 8


def test_an_odd_number_of_cards_is_used_as_far_as_it_goes() -> None:
    answer = solve(job(gpus=13, seq_len=16_384))
    assert answer.layout.world == 13 and answer.layout.ep == 1


def test_a_dense_model_is_planned_too() -> None:
    llama = Model("llama", 32, 4096, 32, 8, 128, 128_256, 0, 0, 14_336, dense_layers=32, dense_ffn=14_336)
    assert llama.params == pytest.approx(8.03e9, rel=0.001)
    answer = solve(replace(job(gpus=8, seq_len=32_768), model=llama))
    assert (answer.layout.ep, answer.layout.chunks) == (1, 1)
    assert [reason.value for reason in reasons(answer) if reason.bound_by == "no experts"] == ["1", "1"]
    assert "experts" not in answer.best.step.parts and "exchange" not in answer.best.step.parts


def test_more_experts_parallel_than_the_node_has_a_reason() -> None:
    asked = job("deepseek-v3-like", "h100", 256)
    answer = solve(asked)
    assert answer.layout.ep > 8
    (reason,) = [reason for reason in reasons(answer) if reason.dim == "EP"]
    assert reason.value == str(answer.layout.ep)
    assert reason.bound_by.startswith("speed: EP 8 with CP") == (answer.simplest.layout.ep == 8)


def test_what_cannot_fit_says_by_how_much() -> None:
    with pytest.raises(NothingFitsError, match=r"smallest peak is \d+\.\d GB a card, and H100 SXM has 80 GB"):
        solve(job("deepseek-v3-like", gpus=8))


def test_asked_recompute_is_kept_or_refused() -> None:
    answer = solve(job("qwen3.5-35b-a3b"), recompute=1.0)
    assert answer.layout.recomputed == 40 and reasons(answer)[2].bound_by == "asked for"
    with pytest.raises(NothingFitsError):
        solve(job(gpus=8), recompute=0.0)


def test_a_grid_has_81_points_and_says_why_not() -> None:
    answer = solve(job())
    points = grid(answer)
    assert len(points) == 81
    assert len({(p.layout.pp, p.layout.tp, p.layout.ep, p.layout.cp) for p in points}) == 81
    assert all(bool(point.refusal) == (point.candidate is None) for point in points)
    chosen = [p for p in points if p.candidate and p.candidate.layout == answer.layout]
    assert len(chosen) == 1 and chosen[0].against(answer.best) == 1


def test_memory_grows_with_what_should_make_it_grow() -> None:
    asked = job()
    base = Layout(cp=4, dp=8, ep=8, recomputed=48, chunks=4)

    def total(layout: Layout, of: Job = asked) -> float:
        return peak(of, layout).total

    assert total(base) < total(replace(base, recomputed=24)) < total(replace(base, recomputed=0))
    assert total(replace(base, chunks=8)) <= total(base) < total(replace(base, chunks=1))
    assert total(replace(base, cp=8, dp=4)) < total(base) < total(replace(base, cp=2, dp=16))
    assert total(replace(base, ep=4)) > total(base)
    assert total(base, replace(asked, policy=POLICIES["master"])) > total(base)
    assert total(base, replace(asked, policy=POLICIES["bf16"])) < total(base)


def test_static_memory_is_what_sixteen_bytes_a_parameter_make() -> None:
    asked = job("qwen3.5-35b-a3b")
    parts = moments(asked, Layout(dp=32, ep=8, recomputed=40))[0].parts
    static = sum(parts[name] for name in ("weights", "gradients", "optimizer"))
    assert static == pytest.approx(16 * asked.model.params / 32)


def test_the_pipeline_model() -> None:
    assert overlapped(2.0, 3.0, 1) == 5.0
    assert overlapped(2.0, 3.0, 4) == overlapped(3.0, 2.0, 4) == 3.5
    assert rows_sent(8, 8) == 7 and rows_sent(1, 8) == 0


def test_a_pipeline_has_its_bubble() -> None:
    asked = job("mixtral-8x7b", "mi355x", 8, 8192, rounds=4)
    parts = step(asked, Layout(pp=2, dp=4, ep=4)).parts
    others = sum(value for name, value in parts.items() if name not in ("bubble", "optimizer"))
    # m = 8 rounds of P = 2: (P − 1) / (m + P − 1) of the time is empty
    assert parts["bubble"] / (others + parts["bubble"]) == pytest.approx(1 / 9)


def test_next_card_up_is_of_the_same_maker() -> None:
    assert next_up(GPUS["h100"]).name == "h200" and next_up(GPUS["mi300x"]).name == "mi325x"
    assert next_up(GPUS["b200"]).name == "mi300x" and next_up(GPUS["mi355x"]) is None
