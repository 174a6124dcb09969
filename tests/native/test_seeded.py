"""The scalar loss where Hopper's kernels have more to do than one small chunk: over several chunks, whose sums are
added in place, with d_hidden by our own GEMM or the vendor's; on every backend."""

import pytest
import torch
from torch import Tensor

import fusedce
from fusedce import hip
from fusedce.hip import hopper
from tests.conftest import Place
from tests.linear_ce_cases import with_gradients
from tests.test_linear_ce_loss import Loss, check

NATIVE = True

BF16 = torch.bfloat16
ON_GPU = ("triton", *(("native",) if hip.unavailable() is None else ()))
# Rows, words and depth that end in the midst of a tile.
CASES = [
    Loss(700, 1501, 264, BF16, reduction="sum"),
    Loss(700, 1501, 48, BF16, bias=True, z_loss=0.01, row_temperature=True, reduction="sum"),
    Loss(300, 1501, 264, BF16, bias=True, softcap=4.0, reduction="mean"),
]


@pytest.fixture(params=[0.0, 2.0], ids=["own", "vendor"], autouse=True)
def d_hidden_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose GEMM makes d_hidden, whatever fills the chip; and chunks of 256 rows."""
    monkeypatch.setattr(hopper, "FULL", request.param)
    monkeypatch.setenv("FUSEDCE_WORKSPACE_MB", "1")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients(case: Loss, place: Place) -> None:
    check(case, place)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bits_repeat(case: Loss, place: Place) -> None:
    *leaves, target, class_weight, token_weight, temperature = case.tensors(place.device)
    run = case.fused(place, (target, class_weight, token_weight, temperature))
    leaves = [t for t in leaves if t is not None]
    one = [torch.ones((), device=place.device)]
    for first, second in zip(with_gradients(run, leaves, one), with_gradients(run, leaves, one), strict=True):
        assert torch.equal(first, second)


def test_weight_s_rows_may_be_far_apart(place: Place) -> None:
    """By a multiple of 16 bytes, and by what no copy engine can take."""
    hidden, weight, _, target, *_ = Loss(66, 301, 48, BF16).tensors(place.device)

    def results(of: Tensor) -> list[Tensor]:
        leaf, rows = of.detach().requires_grad_(), hidden.detach().clone().requires_grad_()
        loss = fusedce.linear_cross_entropy(rows, leaf, target, backend=place.backend)
        return [loss.detach(), *torch.autograd.grad(loss, (rows, leaf))]

    expected = results(weight)
    for padding in (8, 3):
        wide = torch.full((301, 48 + padding), float("nan"), dtype=BF16, device=place.device)[:, :48]
        for out, plain in zip(results(wide.copy_(weight)), expected, strict=True):
            torch.testing.assert_close(out, plain, rtol=2**-6, atol=2**-12)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
def test_no_sync_and_graph_capture(backend: str) -> None:
    """No host sync in the loss and its gradients; a CUDA graph of them replays with new inputs, targets too unlikely
    for the first try among them."""
    hidden, weight, bias, target, *_ = Loss(300, 1501, 64, BF16, bias=True).tensors("cuda")
    bias[target[1]] = -300.0
    for leaf in (hidden, weight, bias):
        leaf.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        loss = fusedce.linear_cross_entropy(hidden, weight, target, linear_bias=bias, backend=backend)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))

    torch.use_deterministic_algorithms(False)
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            hidden.copy_(torch.randn_like(hidden))
        graph.replay()
        assert all(torch.equal(c, e) for c, e in zip(captured, step(), strict=True))
