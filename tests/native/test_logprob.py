"""Per-token log-probs where Hopper's kernels have more to do than one small launch: over several launches and chunks,
rows, words and depth that end in the midst of a tile, operands that TMA cannot take; on every backend."""

import pytest
import torch
from torch import Tensor

import fusedce
from fusedce import hip
from fusedce.hip import hopper
from tests.conftest import Place
from tests.linear_ce_cases import Case
from tests.test_linear_ce import check

NATIVE = True

BF16 = torch.bfloat16
ON_GPU = ("triton", *(("native",) if hip.unavailable() is None else ()))
CASES = [
    Case(700, 1501, 264, BF16),
    Case(700, 1501, 48, BF16, has_bias=True, temperature=0.7),
    Case(300, 1501, 264, BF16, has_bias=True, softcap=4.0),
    Case(300, 257, 72, BF16, softcap=4.0, every_ignored=2),
]
KINDS = [("random", "random", "random"), ("random", None, None), (None, "random", None), (None, None, "random")]


@pytest.fixture(params=[0.0, 2.0], ids=["own", "vendor"])
def small_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of 128 rows forward and chunks of 256 backward; d_hidden by our own GEMM or the vendor's."""
    monkeypatch.setattr(hopper, "FULL", request.param)
    monkeypatch.setattr(hopper, "SUMS_BYTES", 1)
    monkeypatch.setenv("FUSEDCE_WORKSPACE_MB", "1")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("small_steps")
def test_values_and_gradients(case: Case, kinds: tuple[str | None, str | None, str | None], backend: str) -> None:
    check(case, Place("cuda", backend), kinds)


def results(hidden: Tensor, weight: Tensor, target: Tensor, backend: str, **options: object) -> list[Tensor]:
    """logprob, entropy, lse and the gradients of their sum."""
    leaves = [t.detach().requires_grad_() for t in (hidden, weight)]
    out = fusedce.linear_logprob(*leaves, target, backend=backend, **options)
    return [*(o.detach() for o in out), *torch.autograd.grad(sum(o.sum() for o in out), leaves)]


@pytest.mark.parametrize("num_rows", [1, 66])
def test_operands_may_lie_anyhow(num_rows: int, place: Place) -> None:
    """Rows far apart, by a multiple of 16 bytes or not; one row whose stride says nothing; columns side by side."""
    hidden, weight, target, _ = Case(num_rows, 301, 48, BF16, every_ignored=0).inputs(place.device)
    expected = results(hidden, weight, target, place.backend)
    laid = [hidden.t().contiguous().t()]
    for padding in (8, 3):
        wide = torch.full((num_rows, 48 + padding), torch.nan, dtype=BF16, device=place.device)
        laid.append(wide[:, :48].copy_(hidden))
    if num_rows == 1:
        laid.append(hidden.as_strided((1, 48), (5, 1)))
    for rows in laid:
        for out, plain in zip(results(rows, weight, target, place.backend), expected, strict=True):
            torch.testing.assert_close(out, plain, rtol=2**-6, atol=2**-12)


def test_the_forward_s_rows_do_not_feel_one_another(place: Place) -> None:
    """NaN stays in its row, and a row alone has the same bits."""
    hidden, weight, target, _ = Case(300, 1501, 48, BF16, every_ignored=0).inputs(place.device)
    bits = {} if place.backend == "eager" else {"rtol": 0.0, "atol": 0.0}  # torch's GEMM is another for other sizes
    whole = fusedce.linear_logprob(hidden, weight, target, backend=place.backend)
    alone = fusedce.linear_logprob(hidden[137:138], weight, target[137:138], backend=place.backend)
    for many, one in zip(whole, alone, strict=True):
        torch.testing.assert_close(many[137:138], one, **bits)
    hidden[5] = torch.nan
    for many, fresh in zip(whole, fusedce.linear_logprob(hidden, weight, target, backend=place.backend), strict=True):
        assert fresh.isnan().nonzero().flatten().tolist() == [5]
        assert torch.equal(fresh[6:], many[6:]) and torch.equal(fresh[:5], many[:5])


def test_two_equal_logits_of_1e8(place: Place) -> None:
    """Differences to the maximum are what is summed, not logits."""
    weight = torch.zeros(301, 8, dtype=BF16, device=place.device)
    weight[[3, 300], 0] = 1.0
    hidden = torch.full((20, 8), 2.0**27, dtype=BF16, device=place.device)
    logprob, entropy, _, d_hidden, _ = results(
        hidden, weight, torch.full((20,), 300, device=place.device), place.backend, temperature=0.7
    )
    for out in (-logprob, entropy):
        torch.testing.assert_close(out, torch.full_like(out, 0.6931472), rtol=1e-6, atol=0.0)
    # that of the log-prob and of the entropy is 0: both words have the same row
    assert d_hidden.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
def test_no_sync_and_graph_capture(backend: str) -> None:
    """No host sync in the log-probs and their gradients; a CUDA graph of them replays with new inputs."""
    hidden, weight, target, _ = Case(300, 1501, 64, BF16).inputs("cuda")

    def step() -> list[Tensor]:
        return results(hidden, weight, target, backend)

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
        hidden.copy_(torch.randn_like(hidden))
        graph.replay()
        assert all(torch.equal(c, e) for c, e in zip(captured, step(), strict=True))
