"""What torch expects of the MoE ops (opcheck, gradcheck, fullgraph compile) and what a user expects of their errors."""

import dataclasses

import pytest
import torch
from torch.library import opcheck

import fusedce
from fusedce.options import MoEPlan
from tests.conftest import Place
from tests.linear_ce_cases import with_gradients
from tests.moe_cases import Case, ours, upstream

OPS = torch.ops.fusedce
F64 = torch.float64
CHECKED = [Case(5, 4, 3, 4, 2, F64), Case(9, 8, 6, 5, 2), Case(6, 8, 4, 3, 3, torch.bfloat16), Case(1, 1, 1, 1, 1),
           Case(0, 3, 2, 3, 2), Case(7, 5, 3, 6, 1, torch.float16, loads="half")]  # fmt: skip


def on(place: Place, case: Case) -> Case:
    """The case, in fp16 where a backend has no fp64."""
    narrow = case.dtype == F64 and place.backend != "eager"
    return dataclasses.replace(case, dtype=torch.float16) if narrow else case


def leaves(case: Case, place: Place, needs_grad: bool = True) -> tuple[list[torch.Tensor], MoEPlan]:
    """hidden, gate_up_proj, down_proj, top_k_weights as leaves, and the plan."""
    *tensors, index = case.inputs(place.device)
    plan = fusedce.moe_plan(index, case.num_experts, backend=place.backend)
    return [t.requires_grad_(needs_grad) for t in tensors], plan


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_opcheck_experts_dispatch_combine(case: Case, needs_grad: bool, place: Place) -> None:
    tensors, plan = leaves(on(place, case), place, needs_grad)
    keywords = {"backend": place.backend}
    opcheck(OPS.moe_experts.default, (*tensors, plan.offsets, plan.row_slot, plan.slot_row), keywords)
    opcheck(OPS.moe_dispatch.default, (tensors[0], plan.row_slot, plan.slot_row), keywords)
    rows = torch.randn(plan.row_slot.shape[0], 5, device=place.device, requires_grad=needs_grad)
    opcheck(OPS.moe_combine.default, (rows, plan.row_slot, plan.slot_row), keywords)


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_opcheck_route_and_plan(case: Case, place: Place) -> None:
    case = on(place, case)
    logits = torch.randn(case.num_tokens, case.num_experts, device=place.device, dtype=case.dtype, requires_grad=True)
    for score, renormalize in (("softmax", True), ("sigmoid", False)):
        keywords = {"score": score, "renormalize": renormalize, "scale": 2.0, "backend": place.backend}
        opcheck(OPS.moe_route.default, (logits, case.top_k), keywords)
    opcheck(OPS.moe_plan.default, (case.index(place.device), case.num_experts), {"backend": place.backend})


@pytest.mark.parametrize(
    "mask", [[True] * 6, [True, *[False] * 5], [False, True] * 3, [False, False, True, False, False, False]]
)
def test_opcheck_backward(mask: list[bool], place: Place) -> None:
    tensors, plan = leaves(Case(9, 8, 6, 5, 2), place, needs_grad=False)
    parts = (plan.offsets, plan.row_slot, plan.slot_row)
    biases = torch.randn(5, 12, device=place.device), torch.randn(5, 8, device=place.device)
    rows, pre_act = OPS.moe_experts(*tensors, *parts, *biases, backend=place.backend)
    settings = ("swiglu", 7.0, False, "pre_activation", False)
    arguments = (torch.randn_like(rows), *tensors, *parts, *biases, pre_act, *settings, mask, place.backend)
    opcheck(OPS.moe_experts_backward.default, arguments)
    logits = torch.randn(9, 5, device=place.device)
    weights, index = fusedce.moe_route(logits, 2, backend=place.backend)
    opcheck(OPS.moe_route_backward.default, (weights, logits, index, "softmax", True, 1.0, place.backend))


@pytest.mark.parametrize(
    "case", [Case(5, 4, 3, 4, 2, F64), Case(6, 3, 5, 3, 3, F64), Case(4, 2, 2, 3, 1, F64, "half")], ids=str
)
def test_gradcheck_experts(case: Case) -> None:
    *tensors, index = case.inputs("cpu")
    plan = fusedce.moe_plan(index, case.num_experts)

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = fusedce.moe_experts(*tensors, plan)
        return rows, fusedce.moe_combine(rows, plan)

    assert torch.autograd.gradcheck(run, [t.requires_grad_() for t in tensors])
    assert torch.autograd.gradcheck(lambda hidden: fusedce.moe_dispatch(hidden, plan), tensors[0])
    assert torch.autograd.gradgradcheck(lambda hidden: fusedce.moe_dispatch(hidden, plan), tensors[0])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_gradcheck_route(score: str, renormalize: bool) -> None:
    logits = torch.randn(5, 6, dtype=F64, requires_grad=True)

    def run(logits: torch.Tensor) -> torch.Tensor:
        return fusedce.moe_route(logits, 2, score=score, renormalize=renormalize, scale=1.5).top_k_weights

    assert torch.autograd.gradcheck(run, logits)


def layer(logits, hidden, gate_up, down, backend):  # type: ignore[no-untyped-def]
    """Route, plan, experts, combine: what a model's block does."""
    weights, index = fusedce.moe_route(logits, 2, backend=backend)
    return ours(backend, hidden, gate_up, down, weights, index)


def test_fullgraph_compile_is_bitwise_eager(place: Place) -> None:
    case = Case(30, 12, 10, 5, 2)
    hidden, gate_up, down, *_ = case.inputs(place.device)
    logits, grads = torch.randn(30, 5, device=place.device), [upstream(case, "random", place.device)]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = with_gradients(lambda *t: layer(*t, place.backend), (logits, hidden, gate_up, down), grads)
    out = with_gradients(lambda *t: compiled(*t, place.backend), (logits, hidden, gate_up, down), grads)
    assert all(torch.equal(e, o) for e, o in zip(expected, out, strict=True))


def test_compile_with_dynamic_tokens(place: Place) -> None:
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (5, 8, 13):
        hidden, gate_up, down, *_ = Case(num_tokens, 12, 10, 5, 2).inputs(place.device)
        logits = torch.randn(num_tokens, 5, device=place.device)
        expected = layer(logits, hidden, gate_up, down, place.backend)[0]
        assert torch.equal(compiled(logits, hidden, gate_up, down, place.backend)[0], expected)


def test_meta_tensors_have_shapes_only() -> None:
    hidden, gate_up, down, *_ = (t.to("meta") for t in Case(4, 8, 6, 5, 2).inputs("cpu"))
    (out,) = layer(torch.empty(4, 5, device="meta"), hidden, gate_up, down, "auto")
    assert out.shape == (4, 8)


def test_second_backward_and_double_backward(place: Place) -> None:
    """Gradients of a graph that is walked twice are the same; a gradient of a gradient is refused, never wrong."""
    (hidden, *rest), plan = leaves(Case(12, 8, 6, 4, 2), place)
    out = fusedce.moe_combine(
        fusedce.moe_experts(hidden, *rest, plan, backend=place.backend), plan, backend=place.backend
    )
    first = torch.autograd.grad(out.sum(), (hidden, *rest), retain_graph=True)
    second = torch.autograd.grad(out.sum(), (hidden, *rest), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    (grad,) = torch.autograd.grad(out.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()
    logits = torch.randn(4, 5, device=place.device, requires_grad=True)
    weights = fusedce.moe_route(logits, 2, backend=place.backend).top_k_weights
    (grad,) = torch.autograd.grad(weights.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_input_changed_in_place_before_backward(place: Place) -> None:
    (hidden, *rest), plan = leaves(Case(6, 4, 3, 3, 2), place)
    rows = fusedce.moe_experts(hidden, *rest, plan, backend=place.backend)
    with torch.no_grad():
        rest[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rows.sum().backward()


def test_autocast_casts_as_linear_does(place: Place) -> None:
    tensors, plan = leaves(Case(12, 8, 6, 4, 2), place)
    with torch.autocast(place.device, torch.bfloat16):
        rows = fusedce.moe_experts(*tensors, plan, backend=place.backend)
    cast = [t.detach().bfloat16() for t in tensors[:3]]
    assert torch.equal(rows, fusedce.moe_experts(*cast, tensors[3].detach(), plan, backend=place.backend))
    rows.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in tensors)


H, GU, DN, WT, IX = Case(6, 4, 3, 5, 2).inputs("cpu")
PLAN = fusedce.moe_plan(IX, 5)
EXPERTS = {"hidden": H, "gate_up_proj": GU, "down_proj": DN, "top_k_weights": WT, "plan": PLAN}
ROUTE, INDEX = {"logits": torch.randn(6, 5), "top_k": 2}, {"top_k_index": IX, "num_experts": 5}
GOOD = {"moe_experts": EXPERTS, "moe_route": ROUTE, "moe_plan": INDEX, "moe_dispatch": {"hidden": H, "plan": PLAN},
        "moe_combine": {"rows": torch.randn(12, 4), "plan": PLAN}}  # fmt: skip
BAD = [
    ("moe_experts", ValueError, r"'hidden' has shape \(5, 4\).*\(N, D\) = \(6, any\)", dict(hidden=H[:5])),
    ("moe_experts", ValueError, "'hidden' has shape", dict(hidden=H[0])),
    ("moe_experts", ValueError, r"'down_proj' has shape \(5, 9, 3\)", dict(down_proj=torch.randn(5, 9, 3))),
    ("moe_experts", ValueError, r"'down_proj' has shape \(4, 4, 3\)", dict(down_proj=DN[:4])),
    ("moe_experts", ValueError, r"'gate_up_proj'.*\(5, 6, 4\)", dict(gate_up_proj=GU[:, :3])),
    ("moe_experts", ValueError, "'top_k_weights'", dict(top_k_weights=WT[:, :1])),
    ("moe_experts", ValueError, "F is 0", dict(gate_up_proj=GU[:, :0], down_proj=DN[:, :, :0])),
    ("moe_experts", ValueError, "D is 0", dict(hidden=H[:, :0], gate_up_proj=GU[:, :, :0], down_proj=DN[:, :0])),
    ("moe_experts", TypeError, "'down_proj' has dtype torch.bfloat16", dict(down_proj=DN.bfloat16())),
    ("moe_experts", TypeError, "complex64", dict(hidden=H.to(torch.complex64))),
    ("moe_experts", TypeError, "int64; expected float32", dict(hidden=H.long())),
    ("moe_experts", TypeError, "sparse", dict(hidden=H.to_sparse())),
    ("moe_experts", TypeError, "'plan' has type tuple", dict(plan=(PLAN.offsets, PLAN.row_slot, PLAN.slot_row))),
    ("moe_experts", ValueError, "plan.row_slot", dict(plan=dataclasses.replace(PLAN, row_slot=PLAN.row_slot[:7]))),
    ("moe_experts", ValueError, "'down_proj' is on meta", dict(down_proj=DN.to("meta"))),
    ("moe_experts", ValueError, "'cuda'; expected one of", dict(backend="cuda")),
    ("moe_experts", RuntimeError, "no native kernel", dict(backend="native")),
    ("moe_route", ValueError, "'top_k' is 6; expected 1 to E = 5", dict(top_k=6)),
    ("moe_route", ValueError, "'top_k' is 0", dict(top_k=0)),
    ("moe_route", TypeError, "'top_k' has type bool", dict(top_k=True)),
    ("moe_route", TypeError, "'top_k' has type float", dict(top_k=2.0)),
    ("moe_route", ValueError, r"'logits' has shape \(5,\)", dict(logits=torch.randn(5))),
    ("moe_route", ValueError, "E = 0", dict(logits=torch.randn(3, 0))),
    ("moe_route", TypeError, "int64", dict(logits=torch.ones(3, 5, dtype=torch.int64))),
    ("moe_route", ValueError, "'tanh'; expected one of softmax, sigmoid", dict(score="tanh")),
    ("moe_route", ValueError, "'scale' is nan", dict(scale=float("nan"))),
    ("moe_plan", TypeError, "int32; expected int64", dict(top_k_index=IX.int())),
    ("moe_plan", TypeError, "bool", dict(top_k_index=IX > 2)),
    ("moe_plan", ValueError, "'top_k_index' has shape", dict(top_k_index=IX[0])),
    ("moe_plan", ValueError, r"value \d at row \d+; expected .0, 1", dict(num_experts=1)),
    ("moe_plan", ValueError, "shape.1.' is 0", dict(top_k_index=IX[:, :0])),
    ("moe_plan", ValueError, "'num_experts' is 0", dict(num_experts=0)),
    ("moe_plan", ValueError, r"value -2 at row 0; expected .0, 5", dict(top_k_index=IX - IX[0, 0] - 2)),
    ("moe_plan", ValueError, "check", dict(check="never")),
    ("moe_dispatch", ValueError, "'hidden'", dict(hidden=H[:3])),
    ("moe_combine", ValueError, "'rows'", dict(rows=H)),
    ("moe_combine", TypeError, "'plan'", dict(plan=None)),
]  # fmt: skip


@pytest.mark.parametrize("op, error, message, change", BAD, ids=[f"{b[0]}: {b[2]}" for b in BAD])
def test_bad_input_is_refused_and_the_next_call_works(
    op: str, error: type[Exception], message: str, change: dict[str, object]
) -> None:
    call = getattr(fusedce, op)
    with pytest.raises(error, match=message) as raised:
        call(**{**GOOD[op], **change})
    assert f"fusedce.{op}" in str(raised.value)
    call(**GOOD[op])


@pytest.mark.parametrize("change", [dict(hidden=H[:3]), dict(down_proj=DN[:3]), dict(gate_up_proj=GU[:, :4]),
                                    dict(down_proj=DN.bfloat16()), dict(row_slot=PLAN.row_slot.repeat(2)),
                                    dict(offsets=PLAN.offsets[:4]), dict(slot_row=PLAN.slot_row.long()),
                                    dict(top_k_weights=WT[:2])], ids=lambda change: next(iter(change)))  # fmt: skip
def test_a_direct_call_of_the_op_reads_nothing_out_of_bounds(change: dict[str, torch.Tensor]) -> None:
    plan = {"offsets": PLAN.offsets, "row_slot": PLAN.row_slot, "slot_row": PLAN.slot_row}
    tensors = {"hidden": H, "gate_up_proj": GU, "down_proj": DN, "top_k_weights": WT, **plan}
    with pytest.raises((ValueError, TypeError)):
        OPS.moe_experts(**{**tensors, **change})


@pytest.mark.gpu
def test_no_host_sync_on_a_gpu() -> None:
    """Route to combine, forward and backward, without waiting for the GPU once."""
    hidden, gate_up, down, *_ = (t.requires_grad_(t.is_floating_point()) for t in Case(64, 32, 16, 8, 2).inputs("cuda"))
    logits = torch.randn(64, 8, device="cuda", requires_grad=True)
    grad = torch.randn(64, 32, device="cuda")
    layer(logits, hidden, gate_up, down, "triton")[0].backward(grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(logits, hidden, gate_up, down, "triton")[0].backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
