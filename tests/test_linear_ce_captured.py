"""On a GPU: the functions of the head wait for nothing, forward or backward, and a CUDA graph of them replays."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusedce
from tests.linear_ce_cases import Case

ROWS, VOCAB, DEPTH = 200, 1000, 64


def argmax(hidden: Tensor, weight: Tensor, target: Tensor, main_grad: Tensor) -> list[Tensor]:
    return [fusedce.linear_argmax(hidden, weight, target=target, backend="triton")]


def logprob_of(hidden: Tensor, weight: Tensor, target: Tensor, main_grad: Tensor) -> list[Tensor]:
    ids = torch.stack((target, (target + 7) % VOCAB, target), 1)
    values = fusedce.linear_logprob_of(hidden, weight, ids, softcap=5.0, backend="triton")
    return [values.detach(), *torch.autograd.grad(values.sum(), (hidden, weight))]


def heads(hidden: Tensor, weight: Tensor, target: Tensor, main_grad: Tensor) -> list[Tensor]:
    pair = (hidden.reshape(2, 4, -1, DEPTH), weight, target[: ROWS // 2].reshape(4, -1))
    out = fusedce.linear_cross_entropy_heads(*pair, head_weight=(1.0, 0.3), shift=True, backend="triton")
    return [out.loss.detach(), out.head_loss, *torch.autograd.grad(out.loss, (hidden, weight))]


def into_main_grad(hidden: Tensor, weight: Tensor, target: Tensor, main_grad: Tensor) -> list[Tensor]:
    main_grad.zero_()
    options = {"main_grad": main_grad, "backend": "triton"}
    loss = fusedce.linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, **options)
    loss = loss + fusedce.linear_logprob(hidden, weight, target, **options).logprob.sum()
    loss = loss + fusedce.linear_policy_loss(hidden, weight, target, torch.exp, **options)
    grad, nothing = torch.autograd.grad(loss, (hidden, weight), allow_unused=True)
    assert nothing is None
    return [loss.detach(), grad, main_grad.clone()]


@pytest.mark.gpu
@pytest.mark.parametrize("run", [argmax, logprob_of, heads, into_main_grad])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_sync_and_graph_capture(run: Callable, dtype: torch.dtype) -> None:
    """Bit by bit, with new inputs at every replay."""
    hidden, weight, target, _ = Case(ROWS, VOCAB, DEPTH, dtype=dtype).inputs("cuda")
    hidden.requires_grad_(), weight.requires_grad_()
    main_grad = torch.zeros(VOCAB, DEPTH, device="cuda")
    torch.use_deterministic_algorithms(False)
    run(hidden, weight, target, main_grad)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(hidden, weight, target, main_grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(hidden, weight, target, main_grad)
    for _ in range(3):
        with torch.no_grad():
            hidden.copy_(torch.randn_like(hidden))
        graph.replay()
        assert all(torch.equal(c, e) for c, e in zip(captured, run(hidden, weight, target, main_grad), strict=True))


@pytest.mark.gpu
def test_logprobs_of_more_than_2_31_elements() -> None:
    """LC-A03, PK-A14: slots × D and N × V past 2³¹. First and last rows against a slice."""
    for rows, vocab, depth, slots in ((70_001, 300, 512, 64), (14_200, 151_936, 128, 3)):
        generator = torch.Generator("cuda").manual_seed(0)
        hidden = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        weight = torch.randn(vocab, depth, device="cuda", dtype=torch.bfloat16, generator=generator) * depth**-0.5
        ids = torch.randint(0, vocab, (rows, slots), device="cuda", generator=generator)
        values = fusedce.linear_logprob_of(hidden, weight, ids, backend="triton")
        values.sum().backward()
        words = fusedce.linear_argmax(hidden.detach(), weight, backend="triton")
        for ends in (slice(0, 64), slice(rows - 64, rows)):
            part = hidden[ends].detach().double().requires_grad_()
            logits = part @ weight.double().t()
            gold = logits.log_softmax(1).gather(1, ids[ends])
            gold.sum().backward()
            assert (values[ends].double() - gold).abs().max() < 1e-4
            assert (hidden.grad[ends].double() - part.grad).norm() < 1e-2 * part.grad.norm()
            assert (logits.gather(1, words[ends, None])[:, 0] >= logits.amax(1) - 1e-4).all()
