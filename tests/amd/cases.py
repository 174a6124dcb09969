"""What runs on the emulated GPUs: the package's own ops, through the checks that all backends pass, and which kernels
each of them must reach.

Sizes are small, odd, and end in the midst of a tile: 131 rows and 301 words are 2 × 3 tiles of 128, which 8 does not
divide; 304, 320, 64 and 48 take the other form of the kernels, for sizes that 16 divides. A fifth of the rows is
ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import torch

import fusedce
from fusedce import budget
from tests import (
    moe_cases,
    test_linear_argmax,
    test_linear_ce,
    test_linear_ce_loss,
    test_linear_logprob_of,
    test_linear_parts,
    test_linear_sparse,
    test_moe_balance,
    test_moe_experts,
    test_moe_options,
    test_moe_plan,
    test_moe_route,
    test_moe_route_choice,
    test_outside,
)
from tests.conftest import Place
from tests.gfx9emu.hip import CHIPS
from tests.linear_ce_cases import Case, ours
from tests.test_linear_ce_loss import Loss

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HERE = Place("cpu", "triton")
RANDOM = ("random", "random", "random")


@dataclass(frozen=True)
class Run:
    """name: of the test; run: raises unless the values are right; kernels: modules under fusedce.triton, with a dot,
    whose kernels it must launch; chips: where it runs. What changes a kernel in the same way on both runs on one."""

    name: str
    run: Callable[[], object]
    kernels: tuple[str, ...]
    chips: tuple[str, ...] = CHIPS

    def once(self) -> "Run":
        """The same on gfx942 alone."""
        return replace(self, chips=CHIPS[:1])


def rows_alone() -> None:
    """A row's results do not depend on the others: bitwise, over tiles and their ends."""
    case = Case(131, 301, 40, dtype=BF16, has_bias=True, every_ignored=0)
    hidden, weight, target, bias = case.inputs("cpu")
    whole = ours(case, "triton", hidden, weight, target, bias)
    for rows in (slice(0, 1), slice(70, 130), slice(130, 131)):
        part = ours(case, "triton", hidden[rows], weight, target[rows], bias)
        assert all(torch.equal(w[rows], p) for w, p in zip(whole, part, strict=True))


def dispatch_of(dtype: torch.dtype) -> None:
    """Each row of the experts is its token's, to the bit, and 0 where the plan names none."""
    case = moe_cases.Case(23, 130, 4, 6, 3, dtype=dtype)
    hidden, *_, index = case.inputs("cpu")
    plan = fusedce.moe_plan(index, 6, backend="triton")
    rows = fusedce.moe_dispatch(hidden, plan, backend="triton")
    assert torch.equal(rows, hidden[plan.row_slot.long() // 3])


def sparse(check: Callable[..., None], *arguments: object) -> None:
    """A check of the backward by pairs, which is left to small problems too."""
    with mock.patch.object(budget, "MOST_SHARE", 1.0):
        check(*arguments, HERE, always=None)


LINEAR = ("linear_ce.target_logit", "linear_ce.forward", "linear_ce.finish")
SEEDED = tuple(f"linear_ce.{name}" for name in ("target_logit", "seeded", "seeded_rows", "seeded_scale", "reseed"))
LIVE = tuple(f"linear_sparse.{name}" for name in ("live_rows", "spread", "d_hidden", "d_weight"))
PAIRS = (
    "linear_ce.tile_mass",
    *(
        f"linear_sparse.{name}"
        for name in ("levels", "pair_count", "pair_fill", "pair_logits", "pair_hidden", "pair_weight")
    ),
)
EXPERTS = tuple(
    f"moe.{name}"
    for name in (
        "plan_count",
        "plan",
        "tile_table",
        "pad",
        "gate_up",
        "rows",
        "combine",
        "act_backward",
        "weight_grad",
        "slot_grad",
    )
)


def logprob(*sizes: int, **options: object) -> Run:
    """Values and every gradient of linear_logprob."""
    case = Case(*sizes, **options)
    kernels = (*LINEAR, "linear_ce.backward")
    return Run(f"logprob-{case}", lambda: test_linear_ce.check(case, HERE, RANDOM), kernels)


def loss(kernels: tuple[str, ...], *sizes: object, **options: object) -> Run:
    """A scalar loss with its gradients."""
    case = Loss(*sizes, **options)
    return Run(f"loss-{case}", lambda: test_linear_ce_loss.check(case, HERE), kernels)


def experts(*sizes: object, **options: object) -> Run:
    """The experts' values and every gradient."""
    case = moe_cases.Case(*sizes, **options)
    return Run(f"experts-{case}", lambda: test_moe_experts.check(case, HERE, "random"), EXPERTS)


def live_rows(*sizes: object, **options: object) -> Run:
    """The backward over the rows that have a gradient."""
    case = Case(*sizes, **options)
    run = partial(test_linear_sparse.test_gradients_with_rows_of_zero, case, RANDOM, HERE)
    return Run(f"live-rows-{case}", run, (*LIVE, *["linear_sparse.d_bias"] * case.has_bias))


def logprob_of(slots: int, *sizes: object, **options: object) -> Run:
    """Log-probs of several words a row, with their gradients."""
    case = Case(*sizes, **options)
    return Run(
        f"several-words-{case}", partial(test_linear_logprob_of.check, case, slots, HERE), ("linear_ce.selected",)
    )


def with_biases(dtype: torch.dtype, *options: object) -> Run:
    """The experts with biases and another activation, save policy or layout."""
    given = test_moe_options.Options(*options)
    run = partial(test_moe_options.check, moe_cases.Case(45, 24, 33, 5, 2, dtype=dtype), given, HERE)
    return Run(f"experts-{given}-{dtype}".replace("torch.", ""), run, (*EXPERTS[:-1], "moe.bias_grad"))


def route(sizes: tuple[int, int, int], dtype: torch.dtype, *options: object) -> Run:
    """Routing weights, ids and the router's gradient."""
    return Run(
        f"route-{sizes}-{dtype}-{options}".replace("torch.", "").replace(" ", ""),
        lambda: test_moe_route.test_weights_index_and_gradient(sizes, options, dtype, HERE),
        ("moe.route", "moe.route_backward"),
    )


RUNS = (
    logprob(131, 301, 80, dtype=BF16),
    logprob(67, 304, 64, dtype=BF16, has_bias=True, softcap=3.0, temperature=0.6),
    logprob(67, 301, 33, dtype=FP16, has_bias=True),
    logprob(67, 320, 48, dtype=FP32, softcap=2.0),
    Run("a-row-alone", rows_alone, LINEAR),
    loss(SEEDED, 131, 301, 72, BF16, reduction="sum"),
    loss(SEEDED, 66, 304, 64, BF16, bias=True, z_loss=0.01, row_temperature=True, softcap=4.0),
    loss(SEEDED, 66, 301, 33, BF16, class_weight=True, token_weight=True, label_smoothing=0.2),
    loss((*LINEAR, "linear_ce.backward", "linear_ce.scale"), 66, 301, 48, FP16, bias=True, z_loss=0.01),
    loss((*LINEAR, "linear_ce.backward", "linear_ce.scale"), 66, 301, 33, FP32, row_temperature=True),
    Run("targets-of-no-probability", lambda: test_linear_ce_loss.test_targets_of_no_probability(BF16, HERE), SEEDED),
    Run(
        "shards",
        lambda: test_linear_parts.test_shards_merge_to_the_whole((0, 64, 130, 131, 301), True, HERE),
        ("linear_ce.parts",),
    ),
    live_rows(37, 129, 24, dtype=BF16, has_bias=True, temperature=0.6),
    live_rows(65, 557, 33, dtype=FP16),
    live_rows(67, 301, 48, dtype=FP32, has_bias=True).once(),
    Run(
        "pairs-fp32",
        partial(sparse, partial(test_linear_sparse.test_the_bound_holds, request=None), "policy", True),
        PAIRS,
    ),
    *(
        Run(f"pairs-{dtype}", partial(sparse, test_linear_sparse.test_rounded_operands, dtype), PAIRS)
        for dtype in (BF16, FP16)
    ),
    *(
        Run(
            f"argmax-{dtype}",
            partial(test_linear_argmax.test_no_other_word_is_larger, (130, 513, 33), dtype == BF16, dtype, HERE),
            ("linear_ce.argmax",),
        )
        for dtype in (BF16, FP16, FP32)
    ),
    logprob_of(7, 24, 301, 48, dtype=BF16, has_bias=True, softcap=3.0),
    logprob_of(40, 17, 257, 33, dtype=FP32).once(),
    experts(65, 47, 65, 6, 2, dtype=BF16, loads="half"),
    experts(70, 64, 48, 3, 2, dtype=BF16, loads="one"),
    experts(45, 48, 33, 5, 2, dtype=FP16),
    experts(37, 24, 20, 5, 2, dtype=FP32, loads="half"),
    with_biases(BF16, "gpt_oss", True),
    with_biases(FP16, "geglu_tanh", False, "plan", False).once(),
    with_biases(FP32, "geglu").once(),
    Run(
        "experts-transposed",
        lambda: test_moe_experts.test_mo_a11_weights_and_hidden_may_be_views("transposed", HERE),
        EXPERTS,
    ).once(),
    Run(
        "slots-without-a-row",
        partial(test_moe_plan.test_mo_a16_slots_without_a_row, 3, HERE),
        (*EXPERTS, "moe.dispatch"),
    ),
    Run("slots-that-take-no-part", partial(test_moe_plan.test_mo_a08_slots_that_take_no_part, HERE), EXPERTS).once(),
    *(
        Run(f"dispatch-{dtype}", lambda dtype=dtype: dispatch_of(dtype), ("moe.dispatch",))
        for dtype in (BF16, FP16, FP32)
    ),
    *(
        Run(
            f"plan-{sizes}-{loads}",
            lambda sizes=sizes, loads=loads: test_moe_plan.test_plan(sizes, loads, HERE),
            ("moe.plan_count", "moe.plan"),
        )
        for sizes, loads in (((129, 1, 5), "random"), ((77, 8, 40), "half"), ((50, 4, 130), "one"))
    ),
    Run("outside", partial(test_outside.test_the_first_of_several, 4097, 2**32 + 3, HERE), ("outside",)),
    Run(
        "plan-in-chunks",
        partial(test_moe_plan.test_chunks_are_the_plans_of_their_tokens, (130, 3, 12, 2), HERE),
        ("moe.plan_count", "moe.plan"),
    ),
    Run(
        "route-by-groups",
        partial(test_moe_route_choice.test_choice_weights_and_gradient, test_moe_route_choice.CHOICES[0], HERE),
        ("moe.route", "moe.route_backward"),
    ),
    Run(
        "replay",
        partial(test_moe_route_choice.test_replay_of_ids_from_elsewhere, "softmax", True, BF16, HERE),
        ("moe.replay",),
    ),
    *(
        Run(
            f"balance-{dtype}-{score}",
            partial(test_moe_balance.test_sums_and_gradient, (2, 33, 40, 5, dtype), score, mask, HERE),
            ("moe.balance", "moe.balance_backward"),
        )
        for dtype, score, mask in ((BF16, "softmax", "weights"), (FP32, "sigmoid", "bool"))
    ),
    *(
        route(sizes, dtype, score, renormalize)
        for dtype, sizes, score, renormalize in (
            (BF16, (65, 128, 8), "softmax", True),
            (FP16, (33, 33, 5), "sigmoid", True),
            (FP32, (5, 257, 8), "softmax", False),
            (FP32, (33, 33, 5), "sigmoid", False),
        )
    ),
)
