"""The numbers of the article behind this project, recomputed; docs/article.md tells what they mean."""

import ast
import math
import operator
import re

import numpy as np
import pytest
import torch

import fusedce
from fusedce.plan.flops import Forward, forward
from fusedce.plan.gpus import GPUS
from fusedce.plan.layout import POLICIES, Job, Layout
from fusedce.plan.memory import peak
from fusedce.plan.models import MODELS
from fusedce.plan.recipe import solve
from fusedce.plan.seconds import overlapped
from tests.house.source import read

GB = 1e9
TOKENS, VOCAB = 65_536, 124_160
QWEN3, QWEN35 = MODELS["qwen3-30b-a3b"], MODELS["qwen3.5-35b-a3b"]


def near(value: float, said: float, within: float) -> bool:
    """Whether a number is what is said of it, to the digits that it is said with."""
    return abs(value - said) <= within


def long_job(gpu: str = "h100", reserve: float = 0.0) -> Job:
    """The article's: Qwen3.5-35B at 128K on 32 cards."""
    policy = POLICIES["fp32-shards"]
    return Job(QWEN35, GPUS[gpu], 32, 131_072, 32 * 131_072, policy, reserve * GPUS[gpu].memory)


# ── 3: the logits ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_logits_take_what_the_article_says() -> None:
    assert near(TOKENS * VOCAB * 2 / GB, 16.27, 0.005)
    assert near(2 * TOKENS * VOCAB * 2 / GB, 32.55, 0.005)
    assert TOKENS * VOCAB * 4 == 2 * TOKENS * VOCAB * 2


def test_the_vocabulary_is_a_shard_of_two() -> None:
    assert QWEN35.vocab == 2 * VOCAB == 2 * 970 * 128
    # Unsharded, a single bf16 copy is what the article gives for two.
    assert near(TOKENS * QWEN35.vocab * 2 / GB, 32.55, 0.005)


def test_an_upcast_loss_holds_ten_bytes_a_logit() -> None:
    assert near(TOKENS * VOCAB * (2 + 4 + 4) / GB, 81, 0.5)


# ── 2 and 7: FLOPs, recompute and the two MFUs ──────────────────────────────────────────────────────────────────────


def test_full_recompute_costs_a_third_of_the_gemms_only() -> None:
    assert near(8 / 6 - 1, 0.33, 0.005)
    assert 2 / 8 == 0.25  # of what is executed
    for seq_len, tax in ((4096, 0.32), (131_072, 0.29)):
        found = forward(QWEN3, seq_len)
        # The whole forward again, head and all, over forward and backward with attention's own recompute.
        assert found.total / found.executed(0) == pytest.approx(tax, abs=0.005)
        # The head is not computed again here: its loss has the gradients ready.
        assert found.executed(1) / found.executed(0) - 1 == pytest.approx(tax - 0.01, abs=0.02)


def share_of_weights(found: Forward) -> float:
    """Of the forward: everything that does not grow with the sequence."""
    return (found.gemms + found.recurrence) / found.total


def test_six_n_is_a_small_part_at_long_sequences() -> None:
    assert share_of_weights(forward(QWEN3, 4096)) == pytest.approx(0.79, abs=0.005)
    assert share_of_weights(forward(QWEN3, 131_072)) == pytest.approx(0.11, abs=0.006)
    assert share_of_weights(forward(QWEN35, 131_072)) == pytest.approx(0.36, abs=0.005)
    long = forward(QWEN3, 131_072)
    assert long.model / 1e9 == pytest.approx(172.9, abs=0.05)
    assert near(6 * QWEN3.active_params / 1e9, 18.2, 0.06)
    assert long.not_causal() / long.model == pytest.approx(1.9, abs=0.01)


def test_utilization() -> None:
    assert near(186 / 989, 0.188, 0.0005)
    assert near(186 / 1979, 0.094, 0.0005)
    assert near(186 / 989 * 6 / 8, 0.14, 0.002)
    assert near(1979 / 989, 2, 0.002)
    assert GPUS["h100"].peak == pytest.approx(989e12, rel=1e-3)


# ── 5: overlap ──────────────────────────────────────────────────────────────────────────────────────────────────────


def speedup(exchange: float, chunks: int) -> float:
    return 1 / overlapped(exchange, 1 - exchange, chunks)


def test_the_overlap_hides_a_fifth() -> None:
    assert near(1 - 1 / 1.2397, 0.193, 0.0005)
    for chunks, share in ((32, 0.200), (2, 0.387)):
        assert speedup(share, chunks) == pytest.approx(1.2397, abs=0.0015)


def test_the_depth_of_the_pipeline() -> None:
    assert [length // 2048 for length in (16_384, 32_768, 65_536)] == [8, 16, 32]
    for chunks, efficiency in ((8, 0.89), (16, 0.94), (32, 0.97)):
        assert chunks / (chunks + 1) == pytest.approx(efficiency, abs=0.005)
        # Two balanced stages: of the work, k parts of 2k, in the time of k + 1 parts.
        assert overlapped(1.0, 1.0, chunks) == pytest.approx((chunks + 1) / chunks)


def test_the_layer_s_gain_shrinks_with_the_sequence() -> None:
    assert forward(QWEN3, 4096).experts / forward(QWEN3, 4096).total == pytest.approx(0.47, abs=0.005)
    assert forward(QWEN3, 131_072).experts / forward(QWEN3, 131_072).total == pytest.approx(0.06, abs=0.005)
    long = forward(QWEN35, 131_072)
    shared = 2.0 * QWEN35.moe_layers * 3 * QWEN35.hidden * QWEN35.shared_ffn
    assert near((long.experts + shared) / long.total, 0.136, 0.002)


# ── 4: what stays ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_static_memory() -> None:
    assert near(55.91 - 47.03, 8.88, 0.005)
    assert near((55.91 - 47.03) / 55.91, 0.159, 0.0005)
    assert [POLICIES[name].static for name in ("fp32-shards", "bf16-grads", "master")] == [16, 16, 18]
    assert near(35e9 * 16 / 32 / GB, 17.5, 1e-9)
    # The article's static memory is more than its peak: they are of different runs.
    assert 47.03 > 38


def test_the_peak_at_128k() -> None:
    """CP 4, all layers recomputed: beside the article's 37 to 38 GB, of which it does not say what it counts."""
    job = long_job()
    window = peak(job, Layout(cp=4, dp=8, ep=8, recomputed=40)).total / GB
    assert near(window, 33.8, 0.05)
    whole, parts = (peak(job, Layout(dp=32, ep=8, recomputed=40, chunks=c)).total / GB for c in (1, 8))
    # Without CP the card would be full; in chunks there is room.
    assert near(whole, 75.3, 0.05) and near(parts, 54.6, 0.05)


# ── 6: the recipe ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_layout_instead_of_81() -> None:
    assert 3**4 == 81
    layout = solve(long_job(reserve=0.10)).layout
    assert (layout.tp, layout.pp, layout.ep) == (1, 1, 8)
    # The article's windows of 16K to 32K tokens a rank are CP 8 and CP 4.
    assert [131_072 // cp for cp in (8, 4)] == [16_384, 32_768]


# ── 8: other cards ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_shares_of_other_cards() -> None:
    assert near(38 / 192, 0.198, 0.0005) and near(38 / 288, 0.132, 0.0005)
    assert near(192 / 80, 2.4, 1e-9) and near(288 / 80, 3.6, 1e-9)
    assert near(186e12 / GPUS["mi300x"].peak, 0.142, 0.0005)
    assert near(186e12 / GPUS["mi355x"].peak, 0.074, 0.0005)


def test_more_memory_recomputes_less_and_needs_less_context_parallelism() -> None:
    answers = [solve(long_job(name, 0.10)) for name in ("h100", "mi300x", "mi355x")]
    simplest = [answer.simplest.layout for answer in answers]
    assert all(layout.cp == 1 for layout in simplest)
    assert simplest[0].recomputed > simplest[1].recomputed > simplest[2].recomputed > 0
    assert answers[0].layout.cp > answers[1].layout.cp == answers[2].layout.cp == 2


def test_without_the_running_maximum_exp_overflows_in_every_format() -> None:
    with np.errstate(over="ignore"):
        assert np.isfinite(np.exp(np.float32(88))) and np.isinf(np.exp(np.float32(89)))
    assert math.log(torch.finfo(torch.bfloat16).max) == pytest.approx(88.7, abs=0.03)
    assert torch.tensor(89.0, dtype=torch.bfloat16).exp().isinf()
    hidden, weight = torch.full((2, 4), 100.0), torch.eye(5, 4) * 10
    loss = fusedce.linear_cross_entropy(hidden, weight, torch.tensor([0, 4]))
    assert loss.isfinite()  # logits of 1,000


# ── the page ────────────────────────────────────────────────────────────────────────────────────────────────────────

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value(node: ast.AST) -> float:
    """Of an expression of numbers and + - * /."""
    if isinstance(node, ast.Expression):
        return value(node.body)
    if isinstance(node, ast.Constant):
        return float(node.value)
    if isinstance(node, ast.UnaryOp):
        return -value(node.operand)
    assert isinstance(node, ast.BinOp), ast.dump(node)
    return OPERATORS[type(node.op)](value(node.left), value(node.right))


def sums(page: str) -> list[tuple[str, str]]:
    """Every `expression = result` of a page."""
    return re.findall(r"`([\d(][^`=]*) = ([\d.,]+)`", page)


def test_every_sum_on_the_page_is_right() -> None:
    found = sums(read("docs/article.md"))
    assert len(found) >= 20
    for expression, result in found:
        plain = expression.replace(",", "").replace("×", "*").replace("−", "-")
        digits = len(result.partition(".")[2])
        wanted = float(result.replace(",", ""))
        assert round(value(ast.parse(plain, mode="eval")), digits) == wanted, f"{expression} = {result}"


def test_the_page_s_sums_would_be_refused() -> None:
    assert sums("`1 + 1 = 3` and `2 × 2 = 4`") == [("1 + 1", "3"), ("2 × 2", "4")]
    assert round(value(ast.parse("1 + 1", mode="eval")), 0) != 3
