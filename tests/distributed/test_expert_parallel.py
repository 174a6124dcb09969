"""The experts over 1, 2 and 4 ranks against one rank's in fp64: values and every gradient, by every dispatcher."""

import contextlib
import random
import time
import unittest.mock
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedce
from fusedce import arch
from fusedce.distributed import expert_parallel_moe, expert_pipeline, expert_plan
from fusedce.distributed.dispatchers import DISPATCHERS
from fusedce.distributed.expert_group import MOST_BLOCKS
from fusedce.distributed.local_experts import LocalWeights
from tests.distributed.expert_cases import EVEN, FIRST_HAS_ALL, NAMES, ONE_HAS_NONE, UNEVEN, Problem
from tests.distributed.processes import run
from tests.linear_ce_cases import in_fp64, with_gradients
from tests.moe_cases import Case
from tests.paired import assert_bites, assert_close

PROBLEMS = [
    Problem(Case(29, 7, 5, 8, 6), EVEN),  # more experts a token than ranks
    Problem(Case(24, 8, 3, 4, 1), UNEVEN, "expanded"),  # fewer
    Problem(Case(41, 16, 9, 8, 3, torch.bfloat16), UNEVEN),
    Problem(Case(18, 6, 4, 4, 2), ONE_HAS_NONE, missing=True),
    Problem(Case(18, 6, 4, 4, 3, loads="one"), FIRST_HAS_ALL, "transposed"),
    Problem(Case(30, 5, 4, 8, 2, loads="half"), EVEN),  # the upper ranks receive nothing
    Problem(Case(1, 4, 3, 4, 4), EVEN),
    Problem(Case(0, 4, 3, 4, 2), EVEN),
]
CHUNKS = (1, 2, 5)


def check_ranks(device: str) -> None:
    """All problems, dispatchers and chunk counts on this rank."""
    for problem in PROBLEMS:
        gold, twin = problem.references(device)
        for name, g, t in zip(NAMES, gold, twin, strict=True):
            if g.count_nonzero() and len(g) > 1:
                assert_bites(g, t, f"{problem} {name}")
        for dispatcher in DISPATCHERS:
            for num_chunks in CHUNKS:
                out = problem.ours(dispatcher, num_chunks, device)
                for name, o, g, t in zip(NAMES, out, gold, twin, strict=True):
                    assert_close(o, g, t, f"{problem} {dispatcher} {num_chunks} {name}")
            again = problem.ours(dispatcher, num_chunks, device)
            for name, o, a in zip(NAMES, out, again, strict=True):
                assert torch.equal(o, a), f"{problem} {dispatcher} {name} differs when repeated"
    check_no_grad(device)
    check_options(device)
    check_units(device)
    check_delays(device)


def check_options(device: str) -> None:
    """Biases, another activation, interleaved gates, nothing kept but the plan: as one rank's op has them."""
    problem = Problem(Case(23, 6, 5, 4, 2), UNEVEN)
    *tensors, index = problem.inputs(device)
    torch.manual_seed(4)
    biases = [torch.randn(4, 10).to(device), torch.randn(4, 6).to(device)]
    grad = problem.upstream(device)
    mine = problem.layout.tokens(23)
    plan = expert_plan(tensors[0][mine], index[mine], 4, num_chunks=3)
    settings = dict(activation="gpt_oss", limit=1.5, interleaved=True, save="plan")

    def one(hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *biases: Tensor) -> list[Tensor]:
        plan = fusedce.moe_plan(index.to(hidden.device), 4)
        options = dict(gate_up_bias=biases[0], down_bias=biases[1], combine=True, **settings)
        return [fusedce.moe_experts(hidden, gate_up, down, weights, plan, **options)]

    def many(hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *biases: Tensor) -> list[Tensor]:
        options = dict(gate_up_bias=biases[0], down_bias=biases[1], **settings)
        return [expert_parallel_moe(hidden, gate_up, down, weights, plan, **options)]

    gold = with_gradients(one, in_fp64([*tensors, *biases]), [grad.cpu().double()])
    twin = with_gradients(one, [*tensors, *biases], [grad])
    local = [*problem.local(tensors), *(bias[problem.experts] for bias in biases)]
    out = with_gradients(many, local, [grad[mine]])
    for at, part in enumerate((mine, mine, problem.experts, problem.experts, mine, problem.experts, problem.experts)):
        assert_close(out[at], gold[at][part], twin[at][part], f"options, result {at}")


def check_no_grad(device: str) -> None:
    """Without gradients two chunks' rows are all that is held, and the result is the same."""
    problem = PROBLEMS[0]
    hidden, gate_up, down, weights, index = problem.local(problem.inputs(device))
    for dispatcher in DISPATCHERS:
        plan = expert_plan(hidden, index, 8, dispatcher=dispatcher, num_chunks=5)
        with torch.no_grad():
            out = expert_parallel_moe(hidden, gate_up, down, weights, plan)
        kept = expert_parallel_moe(hidden.clone().requires_grad_(), gate_up, down, weights, plan)
        assert torch.equal(out, kept) and not out.requires_grad
        assert expert_pipeline.Received.of(hidden, plan, keep=False).buffer.shape[0] == 2


def check_units(device: str) -> None:
    """Chunks' experts leave units to the transfers that run beside them; a layer in one piece has none beside it."""
    problem, usual = Problem(Case(23, 6, 5, 4, 2), EVEN), arch.of_device(device).num_units
    seen: list[int] = []

    def watched(original: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object) -> object:
            seen.append(arch.of_device(device).num_units)
            return original(*args)

        return run

    for num_chunks, free in ((1, 0), (3, MOST_BLOCKS)):
        seen.clear()
        with contextlib.ExitStack() as stack:
            for name in ("forward", "backward"):
                patched = watched(getattr(LocalWeights, name))
                stack.enter_context(unittest.mock.patch.object(LocalWeights, name, patched))
            problem.ours("deduplicated", num_chunks, device)
        assert len(seen) > num_chunks and set(seen) == {usual - free}
        assert arch.of_device(device).num_units == usual


def check_delays(device: str) -> None:
    """Whatever comes late, kernels or transfers, the bits are the same: every use of a buffer waits for its filling."""
    chance = random.Random(dist.get_rank())

    def late(original: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object) -> object:
            if device == "cuda":
                torch.cuda._sleep(chance.randrange(1_000_000))
            else:
                time.sleep(chance.random() * 2e-3)
            return original(*args)

        return run

    problem = Problem(Case(40, 16, 8, 8, 3), UNEVEN)
    for dispatcher in DISPATCHERS:
        expected = problem.ours(dispatcher, 4, device)
        with contextlib.ExitStack() as stack:
            for owner, name in (
                (expert_pipeline, "start_all_to_all"),
                (expert_pipeline, "start_all_gather"),
                (LocalWeights, "forward"),
                (LocalWeights, "backward"),
            ):
                stack.enter_context(unittest.mock.patch.object(owner, name, late(getattr(owner, name))))
            for _ in range(170 if device == "cuda" else 2):
                again = problem.ours(dispatcher, 4, device)
                assert all(torch.equal(e, a) for e, a in zip(expected, again, strict=True))


def check_kernels(device: str) -> None:
    """By the Triton kernels: against the gold, and result and token gradients of the same bits for any chunks."""
    problem = Problem(Case(9, 16, 8, 4, 3), UNEVEN)
    gold, twin = problem.references(device)
    for dispatcher in ("deduplicated", "all_gather"):
        results = [problem.ours(dispatcher, num_chunks, device, "triton") for num_chunks in (1, 2)]
        for name, one, two, g, t in zip(NAMES, *results, gold, twin, strict=True):
            assert_close(two, g, t, f"{dispatcher} {name}")
            if name in ("out", "d_hidden", "d_top_k_weights"):
                assert torch.equal(one, two), f"{dispatcher} {name} depends on the chunks"


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_mo_a04_a06_a08_a09_a12_a13_a15_ranks_agree_with_one(num_ranks: int) -> None:
    run(__name__, "check_ranks", num_ranks)


@pytest.mark.multigpu
def test_two_gpus_agree_with_one() -> None:
    run(__name__, "check_ranks", 2, "cuda")
