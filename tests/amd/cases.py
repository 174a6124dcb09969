"""What runs on the emulated GPUs: the package's own ops, through the checks that all backends pass, and which kernels
each of them must reach.

Sizes are small, odd, and end in the midst of a tile: 131 rows and 301 words are 2 × 3 tiles of 128, which 8 does not
divide; 304, 320, 64 and 48 take the other form of the kernels, for sizes that 16 divides. A fifth of the rows is ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass

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
    test_moe_experts,
    test_moe_plan,
    test_moe_route,
)
from tests.conftest import Place
from tests.linear_ce_cases import Case, ours
from tests.sparse_cases import Sparse
from tests.test_linear_ce_loss import Loss

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HERE = Place("cpu", "triton")
RANDOM = ("random", "random", "random")


@dataclass(frozen=True)
class Run:
    """name: of the test; run: raises unless the values are right; kernels: modules under fusedce.triton, with a dot,
    whose kernels it must launch."""

    name: str
    run: Callable[[], object]
    kernels: tuple[str, ...]


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


def sparse_backward(dtype: torch.dtype) -> None:
    """The backward that leaves words out, within its bound, although so few could all be worked."""
    share, budget.MOST_SHARE = budget.MOST_SHARE, 1.0
    try:
        test_linear_sparse.check_rounded(Sparse("policy", num_rows=24, dtype=dtype, has_bias=True), HERE)
    finally:
        budget.MOST_SHARE = share


LINEAR = ("linear_ce.target_logit", "linear_ce.forward", "linear_ce.finish")
SEEDED = tuple(f"linear_ce.{name}" for name in ("target_logit", "seeded", "seeded_rows", "seeded_scale", "reseed"))
ROWS = tuple(f"linear_sparse.{name}" for name in ("live_rows", "d_hidden", "d_weight", "d_bias", "spread"))
PAIRS = tuple(
    f"linear_sparse.{name}"
    for name in ("levels", "pair_count", "pair_fill", "pair_logits", "pair_hidden", "pair_weight")
)
EXPERTS = tuple(
    f"moe.{name}" for name in ("plan_count", "plan", "tile_table", "gate_up", "rows", "combine", "act_backward",
                               "weight_grad", "slot_grad")
)  # fmt: skip


def logprob(*sizes: int, **options: object) -> Run:
    """Values and every gradient of linear_logprob."""
    case = Case(*sizes, **options)
    kernels = (*LINEAR, "linear_ce.backward")
    return Run(f"logprob-{case}", lambda: test_linear_ce.check(case, HERE, RANDOM), kernels)


def rows_of_zero(*sizes: object, **options: object) -> Run:
    """Every gradient where many rows have none."""
    case = Case(*sizes, **options)
    check = test_linear_sparse.test_gradients_with_rows_of_zero
    return Run(f"rows-of-zero-{case}", lambda: check(case, ("random", None, None), HERE), (*LINEAR, *ROWS))


def loss(kernels: tuple[str, ...], *sizes: object, **options: object) -> Run:
    """A scalar loss with its gradients."""
    case = Loss(*sizes, **options)
    return Run(f"loss-{case}", lambda: test_linear_ce_loss.check(case, HERE), kernels)


def greedy(*arguments: object) -> Run:
    """The greedy words of a shape, with or without a bias."""
    name = f"argmax-{arguments}".replace("torch.", "").replace(" ", "")
    return Run(name, lambda: test_linear_argmax.test_no_other_word_is_larger(*arguments, HERE), ("linear_ce.argmax",))


def selected(slots: int, *sizes: int, **options: object) -> Run:
    """Log-probs of several words a row and every gradient."""
    case, kernels = Case(*sizes, **options), (*LINEAR, "linear_ce.backward", "linear_ce.selected")
    return Run(f"logprob-of-{slots}-{case}", lambda: test_linear_logprob_of.check(case, slots, HERE), kernels)


def experts(*sizes: object, **options: object) -> Run:
    """The experts' values and every gradient."""
    case = moe_cases.Case(*sizes, **options)
    return Run(f"experts-{case}", lambda: test_moe_experts.check(case, HERE, "random"), EXPERTS)


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
    rows_of_zero(131, 301, 40, BF16, has_bias=True),
    rows_of_zero(67, 320, 33, FP16, has_bias=True, softcap=3.0),
    Run("words-left-out", lambda: sparse_backward(BF16), (*LINEAR, "linear_ce.tile_mass", *PAIRS)),
    loss(SEEDED, 131, 301, 72, BF16, reduction="sum"),
    loss(SEEDED, 66, 304, 64, BF16, bias=True, z_loss=0.01, row_temperature=True, softcap=4.0),
    loss(SEEDED, 66, 301, 33, BF16, class_weight=True, token_weight=True, label_smoothing=0.2),
    loss((*LINEAR, "linear_ce.backward", "linear_ce.scale"), 66, 301, 48, FP16, bias=True, z_loss=0.01),
    loss((*LINEAR, "linear_ce.backward", "linear_ce.scale"), 66, 301, 33, FP32, row_temperature=True),
    Run("targets-of-no-probability", lambda: test_linear_ce_loss.test_targets_of_no_probability(BF16, HERE), SEEDED),
    Run("shards", lambda: test_linear_parts.test_shards_merge_to_the_whole((0, 64, 130, 131, 301), True, HERE),
        ("linear_ce.parts",)),
    greedy((67, 301, 40), True, BF16),
    greedy((67, 304, 64), False, FP16),
    Run("argmax-ties", lambda: test_linear_argmax.test_the_lowest_of_equal_words(HERE), ("linear_ce.argmax",)),
    selected(5, 37, 301, 40, dtype=BF16),
    selected(40, 19, 304, 64, dtype=FP16, has_bias=True, softcap=3.0, temperature=0.6),
    selected(3, 21, 301, 33, dtype=FP32),
    experts(65, 47, 65, 6, 2, dtype=BF16, loads="half"),
    experts(70, 64, 48, 3, 2, dtype=BF16, loads="one"),
    experts(45, 48, 33, 5, 2, dtype=FP16),
    experts(37, 24, 20, 5, 2, dtype=FP32, loads="half"),
    Run("experts-transposed", lambda: test_moe_experts.test_mo_a11_weights_and_hidden_may_be_views("transposed", HERE),
        EXPERTS),
    Run("slots-without-a-row", lambda: test_moe_plan.test_mo_a08_mo_a16_slots_without_a_row(3, HERE),
        (*EXPERTS, "moe.dispatch")),
    *(Run(f"dispatch-{dtype}", lambda dtype=dtype: dispatch_of(dtype), ("moe.dispatch",))
      for dtype in (BF16, FP16, FP32)),
    *(Run(f"plan-{sizes}-{loads}", lambda sizes=sizes, loads=loads: test_moe_plan.test_plan(sizes, loads, HERE),
          ("moe.plan_count", "moe.plan"))
      for sizes, loads in (((129, 1, 5), "random"), ((77, 8, 40), "half"), ((50, 4, 130), "one"))),
    *(route(sizes, dtype, score, renormalize)
      for dtype, sizes, score, renormalize in (
          (BF16, (65, 128, 8), "softmax", True), (FP16, (33, 33, 5), "sigmoid", True), (FP32, (5, 257, 8), "softmax", False),
          (FP32, (33, 33, 5), "sigmoid", False))),
)  # fmt: skip
