"""Weight gradients of the experts that are added to fp32 main gradients."""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import fusedce
from tests.conftest import Place
from tests.moe_cases import Case, upstream
from tests.paired import assert_close
from tests.test_moe_options import Options, inputs, plain

BF16, FP32 = torch.bfloat16, torch.float32


def backward(case: Case, place: Place, main_grads: dict[str, Tensor], **change: object) -> list[Tensor | None]:
    """The gradients that autograd gets."""
    hidden, gate_up, down, weights, *biases, index = inputs(case, place.device)
    leaves = [t.requires_grad_() for t in (hidden, gate_up, down, weights)]
    plan = fusedce.moe_plan(index, case.num_experts, backend=place.backend)
    settings = {"combine": True, "backend": place.backend, **change}
    out = fusedce.moe_experts(*leaves, plan, gate_up_bias=biases[0], down_bias=biases[1], **main_grads, **settings)
    out.backward(upstream(case, "random", place.device))
    return [t.grad for t in leaves]


def zeros(case: Case, place: Place, transposed: bool = False) -> dict[str, Tensor]:
    """Main gradients that hold ones, to tell an addition from an overwriting."""
    gate_up = (case.num_experts, 2 * case.ffn, case.depth)
    down = (case.num_experts, case.depth, case.ffn)
    made = {}
    for name, (experts, height, width) in (("gate_up_main_grad", gate_up), ("down_main_grad", down)):
        size = (experts, width, height) if transposed else (experts, height, width)
        ones = torch.ones(size, device=place.device)
        made[name] = ones.mT if transposed else ones
    return made


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_gradients_are_added_in_fp32(dtype: torch.dtype, transposed: bool, place: Place) -> None:
    """The first is closer to fp64 than any bf16 gradient; the second of two adds to the first; autograd gets none."""
    case = Case(45, 24, 20, 4, 2, dtype=dtype)
    expected = backward(case, place, {})
    main = zeros(case, place, transposed)
    grads = backward(case, place, main)
    assert grads[1] is None and grads[2] is None
    assert torch.equal(grads[0], expected[0]) and torch.equal(grads[3], expected[3])
    wide = [t.double().cpu() for t in inputs(case, place.device)[:-1]]
    leaves = [t.requires_grad_() for t in wide]
    out = plain(Options(), *leaves, case.index("cpu"))[0]
    gold = torch.autograd.grad(out, leaves[1:3], upstream(case, "random", "cpu").double())
    for (name, added), exact, rounded in zip(main.items(), gold, expected[1:3], strict=True):
        assert_close(added - 1, exact, rounded.float(), name)
    before = {name: added.clone() for name, added in main.items()}
    backward(case, place, main)
    for name, added in main.items():
        assert torch.allclose(added - before[name], before[name] - 1, atol=1e-4), name


def test_one_of_the_two_alone(place: Place) -> None:
    case = Case(30, 16, 12, 4, 2)
    expected, main = backward(case, place, {}), zeros(case, place)
    grads = backward(case, place, {"down_main_grad": main["down_main_grad"]})
    assert grads[2] is None and torch.equal(grads[1], expected[1])
    assert torch.allclose(main["down_main_grad"] - 1, expected[2], atol=1e-5)


def test_an_expert_without_rows_leaves_its_main_gradient(place: Place) -> None:
    case = Case(30, 16, 12, 6, 2, loads="half")
    main = zeros(case, place)
    backward(case, place, main, save="plan")
    for added in main.values():
        assert torch.equal(added[3:], torch.ones_like(added[3:])) and not torch.equal(added[:3], added[3:])


def test_other_backwards_may_come_in_between(place: Place) -> None:
    """Pipelines run several forwards before the first backward, and each backward changes the main gradients."""
    case, main = Case(20, 8, 6, 3, 2), None
    hidden, gate_up, down, weights, *_, index = inputs(case, place.device)
    plan = fusedce.moe_plan(index, 3, backend=place.backend)
    main = zeros(case, place)
    gate_up.requires_grad_(), down.requires_grad_()
    outs = [
        fusedce.moe_experts(hidden, gate_up, down, weights, plan, combine=True, backend=place.backend, **main)
        for _ in range(2)
    ]
    for out in outs:
        out.sum().backward()
    single = zeros(case, place)
    fusedce.moe_experts(
        hidden, gate_up, down, weights, plan, combine=True, backend=place.backend, **single
    ).sum().backward()
    for name in main:
        assert torch.allclose(main[name] - 1, 2 * (single[name] - 1), atol=1e-4), name


def test_fullgraph_compile_adds_the_same(place: Place) -> None:
    case = Case(20, 8, 6, 3, 2)
    hidden, gate_up, down, weights, *_, index = inputs(case, place.device)
    leaves = [t.requires_grad_() for t in (hidden, gate_up, down, weights)]

    def run(*tensors: Tensor) -> Tensor:
        *tensors, first, second = tensors
        plan = fusedce.moe_plan(index, 3, backend=place.backend)
        given = {"gate_up_main_grad": first, "down_main_grad": second}
        return fusedce.moe_experts(*tensors, plan, combine=True, backend=place.backend, **given)

    plainly, compiled = zeros(case, place), zeros(case, place)
    run(*leaves, *plainly.values()).sum().backward()
    torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves, *compiled.values()).sum().backward()
    assert all(torch.equal(plainly[name], compiled[name]) for name in plainly)
    assert gate_up.grad is None


def test_opcheck_and_no_double_backward(place: Place) -> None:
    case = Case(9, 8, 6, 4, 2)
    hidden, gate_up, down, weights, *biases, index = inputs(case, place.device)
    plan = fusedce.moe_plan(index, 4, backend=place.backend)
    parts = (plan.offsets, plan.row_slot, plan.slot_row)
    rows, pre_act = torch.ops.fusedce.moe_experts(
        hidden, gate_up, down, weights, *parts, *biases, combine=True, backend=place.backend
    )
    settings = ("swiglu", 7.0, False, "pre_activation", True, [True] * 6)
    opcheck(
        torch.ops.fusedce.moe_experts_backward_into.default,
        (torch.randn_like(rows), hidden, gate_up, down, weights, *parts, *biases, pre_act, *settings,
         *zeros(case, place).values(), place.backend),
    )  # fmt: skip
    gate_up.requires_grad_(), hidden.requires_grad_()
    out = fusedce.moe_experts(hidden, gate_up, down, weights, plan, backend=place.backend, **zeros(case, place))
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(out.sum(), hidden, create_graph=True)


BAD = [
    (TypeError, "bfloat16; expected float32", dict(down_main_grad=torch.zeros(3, 8, 6).bfloat16())),
    (ValueError, r"'gate_up_main_grad' has shape \(3, 8, 12\)", dict(gate_up_main_grad=torch.zeros(3, 8, 12))),
]


@pytest.mark.parametrize("error, message, change", BAD, ids=[b[1] for b in BAD])
def test_bad_main_gradients_are_refused(error: type[Exception], message: str, change: dict[str, Tensor]) -> None:
    hidden, gate_up, down, weights, *_, index = inputs(Case(12, 8, 6, 3, 1), "cpu")
    plan = fusedce.moe_plan(index, 3)
    with pytest.raises(error, match=message):
        fusedce.moe_experts(hidden, gate_up, down, weights, plan, **change)
    with pytest.raises((ValueError, TypeError)):
        torch.ops.fusedce.moe_experts(
            hidden, gate_up, down, weights, plan.offsets, plan.row_slot, plan.slot_row, **change
        )
