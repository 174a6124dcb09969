"""moe_experts with each activation, biases, interleaved gates, what is kept and summed rows, against fp64."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

import fusedce
from fusedce.options import ACTIVATIONS, SAVES
from tests.conftest import Place
from tests.linear_ce_cases import in_fp64, with_gradients
from tests.moe_cases import NAMES, Case, upstream
from tests.paired import assert_bites, assert_close

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BIASES = ("d_gate_up_bias", "d_down_bias")


@dataclasses.dataclass(frozen=True)
class Options:
    """One setting of moe_experts. limit: low, so that the clamp bites."""

    activation: str = "swiglu"
    interleaved: bool = False
    save: str = "pre_activation"
    combine: bool = True
    limit: float = 1.0

    def __str__(self) -> str:
        return "-".join(str(value) for value in dataclasses.astuple(self))


def inputs(case: Case, device: str) -> tuple[Tensor, ...]:
    """Those of the case, then both biases, index last."""
    *tensors, index = case.inputs(device)
    generator = torch.Generator().manual_seed(5)
    sizes = (case.num_experts, 2 * case.ffn), (case.num_experts, case.depth)
    biases = (0.5 * torch.randn(*size, generator=generator).to(device, case.dtype) for size in sizes)
    return *tensors, *biases, index


def activated(gate: Tensor, up: Tensor, options: Options) -> Tensor:
    """As the models' own code has it."""
    if options.activation == "gpt_oss":
        gate, up = gate.clamp(max=options.limit), up.clamp(-options.limit, options.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    bend = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": lambda x: F.gelu(x, approximate="tanh")}
    return bend[options.activation](gate) * up


def plain(options: Options, *tensors: Tensor) -> list[Tensor]:
    """[out] by plain torch in the inputs' dtype."""
    hidden, gate_up, down, weights, gate_up_bias, down_bias, index = tensors
    rows = hidden.new_zeros((*index.shape, hidden.shape[1]))
    for expert in range(down.shape[0]):
        token, choice = (index == expert).nonzero(as_tuple=True)
        both = F.linear(hidden[token], gate_up[expert], gate_up_bias[expert])
        gate, up = (both[:, ::2], both[:, 1::2]) if options.interleaved else both.chunk(2, 1)
        out = F.linear(activated(gate, up, options), down[expert], down_bias[expert])
        rows = rows.index_put((token, choice), out * weights[token, choice].to(out.dtype)[:, None])
    return [rows.sum(1)]


def ours(place: Place, options: Options, *tensors: Tensor) -> list[Tensor]:
    """[out] by the ops."""
    hidden, gate_up, down, weights, gate_up_bias, down_bias, index = tensors
    plan = fusedce.moe_plan(index, down.shape[0], backend=place.backend)
    out = fusedce.moe_experts(
        hidden, gate_up, down, weights, plan, gate_up_bias=gate_up_bias, down_bias=down_bias, backend=place.backend,
        activation=options.activation, limit=options.limit, interleaved=options.interleaved, save=options.save,
        combine=options.combine,
    )  # fmt: skip
    return [out if options.combine else fusedce.moe_combine(out, plan, backend=place.backend)]


def check(case: Case, options: Options, place: Place) -> None:
    tensors, grads = inputs(case, place.device), [upstream(case, "random", place.device)]
    out = with_gradients(lambda *t: ours(place, options, *t), tensors, grads)
    twin = with_gradients(lambda *t: plain(options, *t), tensors, grads)
    gold = with_gradients(lambda *t: plain(options, *t), in_fp64(tensors), [g.cpu() for g in grads])
    for name, o, g, t in zip((*NAMES, *BIASES), out, gold, twin, strict=True):
        assert_close(o, g, t, name)
        if case.num_tokens >= 16 and g.shape[0] >= 2:
            assert_bites(g, t, name)


EACH = [Options(activation, interleaved) for activation in ACTIVATIONS for interleaved in (False, True)]
KEPT = [Options(save=save, combine=combine) for save in SAVES for combine in (False, True)][:3]
KEPT += [Options("gpt_oss", True, "plan", False)]


# 16 bits take other tiles and another rounding, whatever the options.
SETTINGS = [(options, FP32) for options in EACH + KEPT]
SETTINGS += [(Options("gpt_oss", True, combine=False), BF16), (Options("geglu", save="plan"), FP16)]


@pytest.mark.parametrize("options, dtype", [pytest.param(*s, id=f"{s[1]}-{s[0]}") for s in SETTINGS])
def test_values_and_every_gradient(options: Options, dtype: torch.dtype, place: Place) -> None:
    check(Case(37, 24, 20, 5, 2, dtype=dtype), options, place)


@pytest.mark.parametrize("size", [1, 8, 31, 97])
def test_sizes_that_divide_by_nothing(size: int, place: Place) -> None:
    options = Options("gpt_oss", True, combine=False)
    check(Case(18, size, 9, 3, 1), options, place)
    check(Case(18, 9, size, 3, 1), options, place)


@pytest.mark.parametrize("size", [192, 1000, 2880])
def test_sizes_of_several_tiles(size: int, place: Place) -> None:
    """megablocks#114; 2,880 is gpt-oss's."""
    check(Case(17, size, 9, 2, 1), Options("gpt_oss", True), place)
    check(Case(17, 9, size, 2, 1), Options(), place)


@pytest.mark.parametrize("options", EACH, ids=str)
def test_gradcheck(options: Options) -> None:
    *tensors, index = inputs(Case(5, 4, 3, 3, 2, FP64), "cpu")
    place = Place("cpu", "eager")
    for save in SAVES:
        setting = dataclasses.replace(options, save=save)
        leaves = [t.requires_grad_() for t in tensors]
        assert torch.autograd.gradcheck(lambda *t, s=setting: ours(place, s, *t, index)[0], leaves)


@pytest.mark.parametrize("options", [*KEPT, Options("gpt_oss", True), Options("geglu")], ids=str)
@pytest.mark.parametrize("needs_grad", [True, False])
def test_opcheck(options: Options, needs_grad: bool, place: Place) -> None:
    *tensors, index = inputs(Case(9, 8, 6, 4, 2), place.device)
    plan = fusedce.moe_plan(index, 4, backend=place.backend)
    hidden, gate_up, down, weights, *biases = [t.requires_grad_(needs_grad) for t in tensors]
    arguments = (hidden, gate_up, down, weights, plan.offsets, plan.row_slot, plan.slot_row, *biases)
    opcheck(torch.ops.fusedce.moe_experts.default, arguments, {**dataclasses.asdict(options), "backend": place.backend})


def test_fullgraph_compile_is_bitwise_eager(place: Place) -> None:
    case, options = Case(30, 12, 10, 5, 2), Options("gpt_oss", True, "plan")
    tensors, grads = inputs(case, place.device), [upstream(case, "random", place.device)]
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    expected = with_gradients(lambda *t: ours(place, options, *t), tensors, grads)
    out = with_gradients(lambda *t: compiled(place, options, *t), tensors, grads)
    assert all(torch.equal(e, o) for e, o in zip(expected, out, strict=True))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss"])
def test_what_is_kept_and_summed_changes_no_bit(activation: str, dtype: torch.dtype, place: Place) -> None:
    """The backward makes the pre-activation again as the forward made it, and rounds it as the forward kept it. Sums
    are of rounded rows in the Triton backend, of unrounded ones in plain torch."""
    case = Case(40, 24, 20, 5, 2, dtype=dtype)
    tensors, grads = inputs(case, place.device), [upstream(case, "random", place.device)]
    runs = [
        with_gradients(lambda *t, o=Options(activation, save=s, combine=c): ours(place, o, *t), tensors, grads)
        for s, c in (("pre_activation", True), ("plan", True), ("pre_activation", False))
    ]
    if dtype == FP32 or place.backend == "triton":
        for first, again, split in zip(*runs, strict=True):
            assert torch.equal(first, again)
            assert torch.equal(first, split)


def test_nothing_but_the_arguments_is_kept_with_the_plan_alone(place: Place) -> None:
    hidden, gate_up, down, weights, *_, index = inputs(Case(64, 16, 32, 4, 2), place.device)
    plan = fusedce.moe_plan(index, 4, backend=place.backend)
    leaves = [t.requires_grad_() for t in (hidden, gate_up, down, weights)]
    given = {t.untyped_storage().data_ptr() for t in (*leaves, plan.offsets, plan.row_slot, plan.slot_row)}
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in given:
            kept[save] = kept.get(save, 0) + tensor.numel()
        return tensor

    for save in SAVES:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            fusedce.moe_experts(*leaves, plan, save=save, combine=True, backend=place.backend)
    assert kept.get("plan", 0) == 0
    assert kept["pre_activation"] == 64 * 2 * 2 * 32


def test_weights_stored_the_other_way_round(place: Place) -> None:
    """As gpt-oss stores them, (E, D, 2F) and (E, F, D): read there, and the gradients come back in that order."""
    case, options = Case(33, 24, 20, 4, 2), Options("gpt_oss", True)
    tensors, grads = inputs(case, place.device), [upstream(case, "random", place.device)]
    expected = with_gradients(lambda *t: ours(place, options, *t), tensors, grads)
    turned = [t.mT.contiguous() if i in (1, 2) else t for i, t in enumerate(tensors)]

    def run(hidden: Tensor, gate_up: Tensor, down: Tensor, *rest: Tensor) -> list[Tensor]:
        return ours(place, options, hidden, gate_up.mT, down.mT, *rest)

    out = with_gradients(run, turned, grads)
    for name, o, e in zip((*NAMES, *BIASES), out, expected, strict=True):
        e = e.mT if name in ("d_gate_up_proj", "d_down_proj") else e
        assert torch.equal(o, e) if place.backend == "triton" else torch.allclose(o, e, atol=1e-5), name


@pytest.mark.parametrize("mask", [tuple(bool(bits >> i & 1) for i in range(6)) for bits in (1, 8, 16, 40)])
def test_each_gradient_is_the_same_with_others_wanted(mask: tuple[bool, ...], place: Place) -> None:
    case, options = Case(20, 12, 10, 4, 2), Options("gpt_oss", True)
    *tensors, index = inputs(case, place.device)
    grad = upstream(case, "random", place.device)
    every = with_gradients(lambda *t: ours(place, options, *t), (*tensors, index), [grad])[1:]
    leaves = [t.clone().requires_grad_(wanted) for t, wanted in zip(tensors, mask, strict=True)]
    ours(place, options, *leaves, index)[0].backward(grad)
    for leaf, expected, wanted in zip(leaves, every, mask, strict=True):
        assert (leaf.grad is not None) == wanted
        assert not wanted or torch.equal(leaf.grad, expected)


def test_a_bias_makes_nothing_of_padding_and_of_slots_without_a_row(place: Place) -> None:
    """Weights, biases and neighbours that are not finite stay with their own expert."""
    hidden, gate_up, down, weights, gate_up_bias, down_bias, _ = inputs(Case(12, 8, 6, 3, 1), place.device)
    index = torch.tensor([0] * 5 + [1] * 3 + [2] * 4, device=place.device)[:, None]
    gate_up[1], down_bias[1], gate_up_bias[1, 3] = torch.inf, torch.inf, torch.nan
    tensors = (hidden, gate_up, down, weights, gate_up_bias, down_bias, index)
    grads = [torch.randn_like(hidden)]
    out, *gradients = with_gradients(lambda *t: ours(place, Options("gpt_oss"), *t), tensors, grads)
    assert out.isfinite().all(1).tolist() == [True] * 5 + [False] * 3 + [True] * 4
    for gradient in (*gradients[1:3], *gradients[4:]):
        assert gradient[0].isfinite().all() and gradient[2].isfinite().all()


BAD = [
    (ValueError, "'activation' is 'relu'; expected one of swiglu, geglu", dict(activation="relu")),
    (ValueError, "'save' is 'all'; expected one of pre_activation, plan", dict(save="all")),
    (ValueError, "'limit' is 0", dict(limit=0.0)),
    (ValueError, r"'gate_up_bias' has shape \(3, 5\).*\(E, 2F\)", dict(gate_up_bias=torch.randn(3, 5))),
    (ValueError, r"'down_bias' has shape \(8,\).*\(E, D\)", dict(down_bias=torch.randn(8))),
    (TypeError, "'down_bias' has dtype torch.bfloat16", dict(down_bias=torch.randn(3, 8).bfloat16())),
    (TypeError, "'gate_up_bias' has type int", dict(gate_up_bias=0)),
]


@pytest.mark.parametrize("error, message, change", BAD, ids=[b[1] for b in BAD])
def test_bad_options_are_refused(error: type[Exception], message: str, change: dict[str, object]) -> None:
    hidden, gate_up, down, weights, _, _, index = inputs(Case(12, 8, 6, 3, 1), "cpu")
    with pytest.raises(error, match=message):
        fusedce.moe_experts(hidden, gate_up, down, weights, fusedce.moe_plan(index, 3), **change)


DIRECT = [dict(activation="relu"), dict(save="all"), dict(gate_up_bias=torch.randn(3, 5)),
          dict(down_bias=torch.randn(3, 8).double())]  # fmt: skip


@pytest.mark.parametrize("change", DIRECT, ids=lambda change: next(iter(change)))
def test_a_direct_call_of_the_op_is_checked_too(change: dict[str, object]) -> None:
    hidden, gate_up, down, weights, _, _, index = inputs(Case(12, 8, 6, 3, 1), "cpu")
    plan = fusedce.moe_plan(index, 3)
    with pytest.raises((ValueError, TypeError)):
        torch.ops.fusedce.moe_experts(
            hidden, gate_up, down, weights, plan.offsets, plan.row_slot, plan.slot_row, **change
        )
