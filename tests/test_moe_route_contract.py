"""What torch expects of the ops of routing (opcheck, gradcheck, fullgraph compile), and what they refuse."""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import fusedce
from tests.conftest import Place
from tests.linear_ce_cases import with_gradients

OPS = torch.ops.fusedce
F64 = torch.float64
SIZES = [(6, 8, 3, torch.float32), (0, 4, 2, torch.float32), (1, 1, 1, torch.float16), (5, 12, 4, torch.bfloat16)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_opcheck(sizes: tuple, place: Place) -> None:
    num_tokens, num_experts, top_k, dtype = sizes
    logits = torch.randn(num_tokens, num_experts, device=place.device, dtype=dtype, requires_grad=True)
    correction = torch.rand(num_experts, device=place.device)
    groups = dict(num_groups=4, top_groups=2) if num_experts % 4 == 0 else {}
    keywords = dict(score="sigmoid", backend=place.backend)
    opcheck(OPS.moe_route.default, (logits, min(top_k, 2), correction), keywords | groups)
    index = torch.randint(-1, num_experts, (num_tokens, top_k), device=place.device)
    for score, renormalize in (("softmax", False), ("sigmoid", True)):
        options = dict(score=score, renormalize=renormalize, scale=2.0, backend=place.backend)
        opcheck(OPS.moe_replay.default, (logits, index), options)
    mask = torch.rand(num_tokens, device=place.device)
    for masked, sequences in ((None, 1), (mask, max(num_tokens, 1))):
        opcheck(OPS.moe_balance.default, (logits, index, masked), dict(num_sequences=sequences, **keywords))
    for chunks in (1, 4):
        opcheck(OPS.moe_plan_chunks.default, (index, num_experts, chunks), dict(backend=place.backend))


def test_opcheck_backwards(place: Place) -> None:
    logits, mask = torch.randn(6, 5, device=place.device).t().contiguous().t(), torch.rand(6, device=place.device)
    index = torch.randint(-1, 5, (6, 3), device=place.device)
    d_weights = torch.randn(6, 3, device=place.device)
    opcheck(OPS.moe_route_backward.default, (d_weights, logits, index, "softmax", True, 1.0, place.backend))
    d_share, d_square = torch.randn(2, 5, device=place.device), torch.randn(2, device=place.device)
    for masked in (None, mask):
        opcheck(OPS.moe_balance_backward.default, (d_share, d_square, logits, masked, 2, "sigmoid", place.backend))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradcheck(score: str, renormalize: bool) -> None:
    logits = torch.randn(6, 8, dtype=F64, requires_grad=True)
    index = torch.tensor([[0, 3, 3], [-1, -1, -1], [7, 1, -1], [2, 2, 2], [4, 5, 6], [1, 0, 7]])
    options = dict(score=score, renormalize=renormalize, scale=1.5)
    grouped = dict(num_groups=4, top_groups=2, correction=torch.linspace(0, 1, 8, dtype=F64))
    assert torch.autograd.gradcheck(lambda x: fusedce.moe_replay(x, index, **options).top_k_weights, logits)
    assert torch.autograd.gradcheck(lambda x: fusedce.moe_route(x, 3, **options, **grouped).top_k_weights, logits)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradcheck_losses(score: str) -> None:
    logits, index = torch.randn(6, 8, dtype=F64, requires_grad=True), torch.randint(-1, 8, (6, 3))
    mask = torch.tensor([1.0, 0.5, 0.0, 1.0, 1.0, 2.0], dtype=F64)

    def losses(logits: Tensor) -> tuple[Tensor, ...]:
        balance = fusedce.moe_balance(logits, index, mask=mask, num_sequences=2, score=score)
        names = (fusedce.load_balance_loss, fusedce.sequence_balance_loss, fusedce.router_z_loss)
        return balance.share, balance.square, *(loss([balance, balance]) for loss in names)

    assert torch.autograd.gradcheck(losses, logits)


def routed(logits: Tensor, hidden: Tensor, gate_up: Tensor, down: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """A block with groups, and its losses."""
    options = dict(score="sigmoid", num_groups=4, top_groups=2, backend=backend)
    weights, index = fusedce.moe_route(logits, 2, **options)
    again = fusedce.moe_replay(logits, index, score="sigmoid", renormalize=False, backend=backend)
    balance = fusedce.moe_balance(logits, index, num_sequences=2, score="sigmoid", backend=backend)
    plan = fusedce.moe_plan_chunks(index, down.shape[0], 1, backend=backend).chunk(0)
    rows = fusedce.moe_experts(hidden, gate_up, down, weights * again.top_k_weights, plan, backend=backend)
    losses = (
        fusedce.load_balance_loss(balance) + fusedce.sequence_balance_loss(balance) + fusedce.router_z_loss(balance)
    )
    return fusedce.moe_combine(rows, plan, backend=backend), losses


def test_fullgraph_compile_is_bitwise_eager(place: Place) -> None:
    tensors = [torch.randn(s, device=place.device) for s in ((10, 8), (10, 6), (8, 12, 6), (8, 6, 6))]
    grads = [torch.randn(10, 6, device=place.device), torch.tensor(0.3, device=place.device)]
    compiled = torch.compile(routed, fullgraph=True, backend="aot_eager")
    expected = with_gradients(lambda *t: routed(*t, place.backend), tensors, grads)
    out = with_gradients(lambda *t: compiled(*t, place.backend), tensors, grads)
    assert all(torch.equal(a, b) for a, b in zip(expected, out, strict=True))


def test_compile_with_dynamic_tokens(place: Place) -> None:
    compiled = torch.compile(routed, fullgraph=True, dynamic=True, backend="aot_eager")
    weights = [torch.randn(s, device=place.device) for s in ((8, 12, 6), (8, 6, 6))]
    for num_tokens in (6, 10, 14):
        tensors = [torch.randn(num_tokens, width, device=place.device) for width in (8, 6)]
        expected = routed(*tensors, *weights, place.backend)
        out = compiled(*tensors, *weights, place.backend)
        assert all(torch.equal(a, b) for a, b in zip(expected, out, strict=True))


def test_double_backward_is_refused(place: Place) -> None:
    logits = torch.randn(4, 5, device=place.device, requires_grad=True)
    index = torch.zeros(4, 1, dtype=torch.int64, device=place.device)
    outputs = (
        fusedce.moe_replay(logits, index, renormalize=False, backend=place.backend).top_k_weights,
        fusedce.moe_balance(logits, index, backend=place.backend).share,
    )
    for out in outputs:
        (grad,) = torch.autograd.grad(out.square().sum(), logits, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            grad.sum().backward()


L, IX = torch.randn(6, 8), torch.randint(0, 8, (6, 2))
GOOD = {
    "moe_route": dict(logits=L, top_k=2),
    "moe_replay": dict(logits=L, top_k_index=IX),
    "moe_balance": dict(logits=L, top_k_index=IX),
    "moe_plan_chunks": dict(top_k_index=IX, num_experts=8, num_chunks=2),
    "moe_rank_index": dict(top_k_index=IX, num_experts=8, num_ranks=2),
    "update_correction": dict(correction=torch.zeros(8), counts=torch.arange(8), rate=0.1),
}
BAD = [
    ("moe_route", ValueError, r"'correction' has shape \(7,\)", dict(correction=torch.zeros(7))),
    ("moe_route", TypeError, "int64; expected float32", dict(correction=torch.zeros(8, dtype=torch.int64))),
    ("moe_route", ValueError, "'correction' is on meta", dict(correction=torch.zeros(8, device="meta"))),
    ("moe_route", ValueError, "'num_groups' is 3; expected a divisor of E = 8", dict(num_groups=3)),
    ("moe_route", ValueError, "'num_groups' is 0", dict(num_groups=0)),
    ("moe_route", ValueError, "'top_groups' is 3; expected 1 to num_groups = 2", dict(num_groups=2, top_groups=3)),
    ("moe_route", ValueError, "'group_best' is 0", dict(num_groups=2, group_best=0)),
    ("moe_route", TypeError, "'num_groups' has type float", dict(num_groups=2.0)),
    ("moe_route", ValueError, "'top_k' is 5; expected 1 to top_groups·E/G = 4", dict(num_groups=2, top_k=5)),
    ("moe_replay", ValueError, r"'top_k_index' has shape \(5, 2\)", dict(top_k_index=IX[:5])),
    ("moe_replay", TypeError, "int32; expected int64", dict(top_k_index=IX.int())),
    ("moe_replay", ValueError, "the value -2 at row 0", dict(top_k_index=IX * 0 - 2)),
    ("moe_replay", ValueError, "E is 0", dict(logits=L[:, :0])),
    ("moe_replay", ValueError, "check", dict(check="never")),
    ("moe_balance", ValueError, "'num_sequences' is 4; expected a divisor of N = 6", dict(num_sequences=4)),
    ("moe_balance", ValueError, r"'mask' has shape \(2, 2\).*N = 6 elements", dict(mask=torch.ones(2, 2))),
    ("moe_balance", TypeError, "complex64", dict(mask=torch.ones(6, dtype=torch.complex64))),
    ("moe_balance", ValueError, "'tanh'; expected one of", dict(score="tanh")),
    ("moe_balance", RuntimeError, "no native kernel", dict(backend="native")),
    ("moe_plan_chunks", ValueError, "'num_chunks' is 0", dict(num_chunks=0)),
    ("moe_plan_chunks", ValueError, "'num_chunks' is 65536", dict(num_chunks=65536)),
    ("moe_plan_chunks", ValueError, "the value -5 at row 0", dict(top_k_index=IX * 0 - 5)),
    ("moe_rank_index", ValueError, "'num_ranks' is 9; expected 1 to E = 8", dict(num_ranks=9)),
    ("moe_rank_index", ValueError, "'num_ranks' is 3; expected a divisor of E = 8", dict(num_ranks=3)),
    ("update_correction", ValueError, r"'counts' has shape \(7,\)", dict(counts=torch.arange(7))),
    ("update_correction", TypeError, "int64; expected float32", dict(correction=torch.zeros(8, dtype=torch.int64))),
    ("update_correction", ValueError, "'rate' is 0", dict(rate=0)),
]


@pytest.mark.parametrize("name, error, message, change", BAD, ids=[f"{b[0]}: {b[2]}" for b in BAD])
def test_bad_input_is_refused_and_the_next_call_works(
    name: str, error: type[Exception], message: str, change: dict[str, object]
) -> None:
    call = getattr(fusedce, name)
    with pytest.raises(error, match=message) as raised:
        call(**{**GOOD[name], **change})
    assert f"fusedce.{name}" in str(raised.value)
    call(**GOOD[name])


@pytest.mark.parametrize(
    "call",
    [
        lambda: OPS.moe_route(L, 5, num_groups=4, top_groups=2),
        lambda: OPS.moe_route(L, 2, num_groups=3, top_groups=2),
        lambda: OPS.moe_route(L, 2, torch.zeros(7)),
        lambda: OPS.moe_replay(L, IX[:5]),
        lambda: OPS.moe_replay(L, IX.int()),
        lambda: OPS.moe_balance(L, IX, torch.ones(5)),
        lambda: OPS.moe_balance(L, IX, None, num_sequences=4),
        lambda: OPS.moe_plan_chunks(IX, 8, 0),
        lambda: OPS.moe_plan_chunks(IX[:, :0], 8, 1),
    ],
)
def test_a_direct_call_of_an_op_reads_nothing_out_of_bounds(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((ValueError, TypeError), match="fusedce.moe_"):
        call()


def test_meta_tensors_have_shapes_only() -> None:
    sizes = ((10, 8), (10, 6), (8, 12, 6), (8, 6, 6))
    out, losses = routed(*(torch.empty(s, device="meta") for s in sizes), "auto")
    assert out.shape == (10, 6) and losses.shape == ()


@pytest.mark.gpu
def test_no_host_sync_on_a_gpu() -> None:
    sizes = ((10, 8), (10, 6), (8, 12, 6), (8, 6, 6))
    tensors = [torch.randn(s, device="cuda", requires_grad=True) for s in sizes]
    correction, counts = torch.zeros(8, device="cuda"), torch.arange(8, device="cuda")
    index = torch.randint(0, 8, (10, 2), device="cuda")

    def step() -> None:
        out, losses = routed(*tensors, "triton")
        (out.sum() + losses).backward()
        ranks = fusedce.moe_rank_index(index, 8, 2)
        fusedce.moe_plan_chunks(ranks, 2, 3, backend="triton").rank_counts(2)
        fusedce.update_correction(correction, counts, 0.1)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
