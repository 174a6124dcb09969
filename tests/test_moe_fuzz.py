"""Random routings and plans: options meet in every combination, logits tie, hold NaN and lie in memory as they
please."""

import math
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fusedce
from tests.conftest import Place
from tests.linear_ce_cases import in_fp64, with_gradients
from tests.paired import assert_close
from tests.test_linear_ce_fuzz import fuzz
from tests.test_moe_plan import as_lists, reference
from tests.test_moe_route_choice import choose

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Problem:
    """One routing. spoiled: the share of rows with a NaN; layout: "dense", "transposed" or "strided", NaN in
    between."""

    num_tokens: int
    group_size: int
    num_groups: int
    top_groups: int
    group_best: int
    top_k: int
    score: str
    renormalize: bool
    corrected: bool
    dtype: torch.dtype
    layout: str
    spoiled: float

    @property
    def num_experts(self) -> int:
        return self.group_size * self.num_groups

    def logits(self, device: str) -> Tensor:
        """From a grid without symmetry, so that logits tie often and sums of scores only where their logits do."""
        generator = torch.Generator().manual_seed(self.num_tokens + 7 * self.num_experts)
        sizes = (self.num_tokens, self.num_experts)
        logits = torch.randint(-4, 5, sizes, generator=generator) * 0.37 + 0.11
        rows = torch.rand(self.num_tokens, generator=generator) < self.spoiled
        logits[rows, torch.randint(0, self.num_experts, (int(rows.sum()),), generator=generator)] = math.nan
        logits = logits.to(device, self.dtype)
        if self.layout == "transposed":
            return logits.t().contiguous().t()
        if self.layout == "strided":
            wide = torch.full((sizes[0] * 2, sizes[1] * 3), math.nan, device=device, dtype=self.dtype)
            wide[::2, ::3] = logits
            return wide[::2, ::3]
        return logits


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    size, groups = draw(st.integers(1, 12)), draw(st.sampled_from((1, 1, 2, 3, 5, 8)))
    top_groups = draw(st.integers(1, groups))
    return Problem(
        draw(st.integers(0, 40)), size, groups, top_groups, draw(st.integers(1, 2)),
        draw(st.integers(1, min(size * top_groups, 9))), draw(st.sampled_from(("softmax", "sigmoid"))),
        draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(("dense", "transposed", "strided"))), draw(st.sampled_from((0.0, 0.0, 0.2))),
    )  # fmt: skip


@fuzz(120)
@given(problem=problems())
def test_route_then_replay(problem: Problem, place: Place) -> None:
    logits = problem.logits(place.device)
    correction = torch.linspace(-0.31, 0.37, problem.num_experts) if problem.corrected else None
    weighing = dict(score=problem.score, renormalize=problem.renormalize, scale=1.5, backend=place.backend)
    groups = dict(num_groups=problem.num_groups, top_groups=problem.top_groups, group_best=problem.group_best)
    moved = None if correction is None else correction.to(place.device)
    weights, index = fusedce.moe_route(logits, problem.top_k, correction=moved, **groups, **weighing)
    wide = logits.double().cpu()
    clean = [row for row in range(problem.num_tokens) if not wide[row].isnan().any()]
    scores = wide.softmax(1) if problem.score == "softmax" else wide.sigmoid()
    values = scores if correction is None else scores + correction
    for row in range(problem.num_tokens):
        ids = index[row].tolist()
        assert len(set(ids)) == problem.top_k and all(0 <= expert < problem.num_experts for expert in ids)
        if row in clean:
            expected = choose(
                values[row].tolist(), problem.top_k, problem.num_groups, problem.top_groups, problem.group_best
            )
            assert ids == expected
        elif problem.score == "softmax":
            assert weights[row].isnan().all()
    again = fusedce.moe_replay(logits, index, **weighing).top_k_weights
    assert torch.equal(again.nan_to_num(-1.0), weights.nan_to_num(-1.0))
    check_weights(logits[clean], index[clean], problem, weighing)


def check_weights(logits: Tensor, index: Tensor, problem: Problem, weighing: dict) -> None:
    """Values and gradient of a replay in which slots take no part and experts come twice."""
    generator = torch.Generator().manual_seed(problem.num_tokens)
    other = torch.randint(-1, problem.num_experts, index.shape, generator=generator).to(index.device)
    index = torch.where(torch.rand(index.shape, generator=generator).to(index.device) < 0.5, index, other)

    def plain(logits: Tensor) -> list[Tensor]:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        ids = index.to(logits.device)
        scores = logits.softmax(1) if problem.score == "softmax" else logits.sigmoid()
        chosen = torch.where(ids >= 0, scores.gather(1, ids.clamp(min=0)), 0.0)
        total = chosen.sum(1, keepdim=True)
        return [1.5 * (chosen / torch.where(total == 0, 1.0, total) if problem.renormalize else chosen)]

    grads = [torch.rand(index.shape, generator=generator).to(index.device)]
    out = with_gradients(lambda x: [fusedce.moe_replay(x, index, **weighing).top_k_weights], [logits], grads)
    gold, twin = with_gradients(plain, in_fp64([logits]), [grads[0].cpu()]), with_gradients(plain, [logits], grads)
    assert_close(out[0], gold[0], twin[0], "weights")
    # Of two terms that cancel each is up to 1.5 · max |grads|: that is what a gradient's rounding is measured by.
    cancelled = 4 * torch.finfo(torch.float32).eps * 1.5
    error, rounding = (out[1].double().cpu() - gold[1]).abs(), torch.finfo(problem.dtype).eps * gold[1].abs()
    assert (error <= cancelled + rounding).all()


@fuzz(120)
@given(
    num_tokens=st.integers(0, 150),
    top_k=st.integers(1, 8),
    num_experts=st.integers(1, 70),
    num_chunks=st.integers(1, 5),
    lowest=st.sampled_from((-1, 0)),
)
def test_plans_sort_and_undo_themselves(
    num_tokens: int, top_k: int, num_experts: int, num_chunks: int, lowest: int, place: Place
) -> None:
    generator = torch.Generator().manual_seed(num_tokens * 8 + top_k)
    index = torch.randint(lowest, num_experts, (num_tokens, top_k), generator=generator).to(place.device)
    plan = fusedce.moe_plan(index, num_experts, backend=place.backend)
    assert as_lists(plan) == reference(index, num_experts)
    chunks = fusedce.moe_plan_chunks(index, num_experts, num_chunks, backend=place.backend)
    for number in range(num_chunks):
        part = index[slice(*chunks.tokens(number))]
        assert as_lists(chunks.chunk(number)) == reference(part, num_experts)
    hidden = torch.randint(-9, 10, (num_tokens, 3), generator=generator).float().to(place.device)
    rows = fusedce.moe_dispatch(hidden, plan, backend=place.backend)
    back = fusedce.moe_combine(rows, plan, backend=place.backend)
    assert torch.equal(back, hidden * (index >= 0).sum(1, keepdim=True))
    again = fusedce.moe_plan(index.flip(0).flip(0), num_experts, backend=place.backend)
    assert all(torch.equal(getattr(plan, n), getattr(again, n)) for n in ("offsets", "row_slot", "slot_row"))
