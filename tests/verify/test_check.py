"""`fusedce verify` finds what is planted, calls the op it names, and has a problem for every op."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusedce import cli, eager
from fusedce.doctor.facts import versions
from fusedce.ops import registry
from fusedce.verify.check import check, check_all, evaluate
from fusedce.verify.primitives import LARGE, PRIMITIVES, SMALL, Primitive, Sizes
from fusedce.verify.tolerance import margin
from tests.paired import assert_bites

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.fixture(autouse=True)
def as_users_have_it() -> None:
    """Without the mode that the tests run in: poison is what `fusedce verify` has to see to itself."""
    torch.use_deterministic_algorithms(False)


def named(op: str) -> Primitive:
    return next(primitive for primitive in PRIMITIVES if primitive.op == op)


def test_every_op_of_the_registry_has_a_problem() -> None:
    assert [primitive.op for primitive in PRIMITIVES] == list(registry.OPS)


class Recorded(TorchDispatchMode):
    """The ops of ours that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusedce":
            self.ops.add(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("primitive", PRIMITIVES, ids=lambda primitive: primitive.op)
def test_a_problem_calls_its_op_and_its_bar_bites(primitive: Primitive, sizes: Sizes) -> None:
    rounded = primitive.make(sizes, BF16)
    leaves = [t if t is None else t.clone().requires_grad_(t.is_floating_point()) for t in rounded]
    with Recorded() as recorded:
        primitive.ours("eager", *leaves)
    assert primitive.op in recorded.ops
    wide = [t if t is None or not t.is_floating_point() else t.double() for t in rounded]
    gold, twin = evaluate(primitive, primitive.plain, wide), evaluate(primitive, primitive.plain, rounded)
    given = [name for name, t in zip(primitive.inputs, rounded, strict=True) if t is not None and t.is_floating_point()]
    differentiable = primitive.op not in ("linear_parts", "linear_argmax", "moe_plan", "moe_plan_chunks")
    assert {name for name in gold if name.startswith("d_")} == {f"d_{name}" for name in given if differentiable}
    for name, tensor in gold.items():
        assert tensor.ne(0).any(), name
        if tensor.is_floating_point() and tensor.dim() and tensor.shape[0] >= 16:
            assert_bites(tensor, twin[name], name)


def test_what_is_right_passes() -> None:
    ran = [result for result in check_all(CPU) if result.status != "not run"]
    assert {(r.op, r.dtype) for r in ran} == {
        (op, d) for op in registry.OPS for d in ("float32", "bfloat16", "float16")
    }
    assert all(result.status == "pass" and result.worst is not None and result.worst <= 1 for result in ran)
    assert all(result.worst > 0 for result in ran if result.op in ("linear_logprob", "linear_ce_sum", "moe_experts"))


def planted(op: str, backend_function: str, fault: Any, monkeypatch: pytest.MonkeyPatch, repeats: int = 2) -> Any:
    """The result with a fault in the kernels' dtype; fp64, the standard, is left alone."""
    right = getattr(eager, backend_function)

    def wrong(*arguments: Any, **keywords: Any) -> Any:
        out = right(*arguments, **keywords)
        return fault(out) if arguments[0] is None or arguments[0].dtype != torch.float64 else out

    monkeypatch.setattr(eager, backend_function, wrong)
    return check(named(op), "eager", BF16, CPU, repeats)


def test_a_wrong_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(out: Any) -> Any:
        out[0][3] += 0.5
        return out

    result = planted("linear_logprob", "linear_logprob", fault, monkeypatch)
    assert result.status == "fail" and result.where == "logprob" and "largest error" in result.reason


def test_an_unwritten_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(out: Any) -> Any:
        out[7] = torch.empty_like(out[7])
        return out

    result = planted("moe_dispatch", "moe_dispatch", fault, monkeypatch)
    assert result.status == "fail" and "NaN" in result.reason and result.worst == math.inf


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = eager.moe_experts_backward

    def wrong(*arguments: Any) -> Any:
        d_hidden, d_gate_up, *rest = right(*arguments)
        return d_hidden, d_gate_up * (1.1 if d_gate_up.dtype == BF16 else 1), *rest

    monkeypatch.setattr(eager, "moe_experts_backward", wrong)
    result = check(named("moe_experts"), "eager", BF16, CPU, 2)
    assert result.status == "fail" and result.where == "d_gate_up_proj"


def test_other_bits_from_the_same_inputs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = iter((0.0, 1e-7, 0.0))

    def fault(out: Any) -> Any:
        return (out[0] + next(turn), *out[1:])

    result = planted("linear_logprob", "linear_logprob", fault, monkeypatch)
    assert result.status == "fail" and result.reason == "repeat: logprob: other bits from the same inputs"


def test_a_wrong_whole_number_and_an_exception_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(out: Any) -> Any:
        return out + 1

    assert "67 of 67 differ" in planted("linear_argmax", "linear_argmax", off_by_one, monkeypatch).reason

    def refuse(out: Any) -> Any:
        raise RuntimeError("out of registers")

    result = planted("linear_parts", "linear_parts", refuse, monkeypatch)
    assert result.status == "fail" and result.reason == "call: RuntimeError: out of registers"


def test_a_standard_that_is_wrong_itself_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = eager.linear_logprob
    monkeypatch.setattr(eager, "linear_logprob", lambda *a: (right(*a)[0] * 1.01, *right(*a)[1:]))
    result = check(named("linear_logprob"), "eager", BF16, CPU, 1)
    assert result.status == "fail" and "disagree in fp64" in result.reason


def test_memory_s_settings_come_back() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    assert check(named("moe_plan"), "eager", BF16, CPU, 1).status == "pass"
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_the_share_of_the_bar() -> None:
    gold = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    twin = (gold + 0.01).float()
    assert margin(gold.float(), gold, twin).ratio == 0
    half = margin((gold + 0.01).float(), gold, twin)
    assert half.broken is None and half.ratio == pytest.approx(0.5, rel=1e-3)
    beyond = margin((gold + 0.021).float(), gold, twin)
    assert beyond.broken and beyond.ratio == pytest.approx(1.05, rel=1e-3)
    assert margin(gold.float()[:1], gold, twin).ratio == math.inf


def test_the_command_and_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "here.json"
    arguments = ["verify", "--op", "linear_argmax,moe_plan", "--device", "cpu", "--record", str(record)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "6 pass, 0 fail, 12 not run" in printed and "Triton needs a GPU" in printed
    found = json.loads(record.read_text())
    assert found["passed"] and found["versions"] == versions() and found["machine"]["vendor"] == "cpu"
    assert {result["op"] for result in found["results"]} == {"linear_argmax", "moe_plan"}
    assert sorted(tmp_path.iterdir()) == [record]
    assert cli.main([*arguments[:5], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]


def test_the_command_fails_where_an_op_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(eager, "linear_argmax", lambda hidden, *_: torch.full(hidden.shape[:1], -7))
    assert cli.main(["verify", "--op", "linear_argmax", "--backend", "eager", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["passed"] and found["results"][0]["worst"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "linear_cee"], "op is 'linear_cee'; expected one of linear_logprob, "),
        (["--backend", "cuda"], "backend is 'cuda'; expected one of eager, triton, native"),
        (["--backend", "native", "--device", "cpu"], "nothing to check: the native kernels need a GPU"),
        (["--device", "tpu"], "device is 'tpu'; expected cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "device is 'cuda:99', and torch sees "),
        (["--repeats", "0"], "repeats is 0; expected at least 1"),
        (["--op", "moe_plan", "--record", "nowhere/x.json"], "nowhere"),
    ],
)
def test_what_cannot_be_asked_for(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("fusedce verify: ") and error.count("\n") == 1


@pytest.mark.gpu
def test_this_gpu_s_backends_pass() -> None:
    results = check_all(torch.device("cuda"))
    assert not [result for result in results if result.status == "fail"]
    assert {r.op for r in results if r.backend == "triton" and r.status == "pass"} == set(registry.OPS)
