"""ExpertParallelMoE against nn.MoE on one rank; plans that are kept in recompute; what all ranks refuse together."""

import contextlib
import itertools
import unittest.mock
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.expert_parallel import model
from fusedce import env, flags
from fusedce.distributed import (
    ExpertParallelMoE,
    auto_chunks,
    choose_dispatcher,
    collectives,
    expert_counts,
    expert_parallel_moe,
    expert_plan,
    keep_plans,
    new_expert_group,
)
from fusedce.distributed.dispatchers import DISPATCHERS
from fusedce.nn import MoE, router
from fusedce.options import ExpertOptions
from tests.distributed.processes import run
from tests.paired import assert_close

SIZES = (12, 10, 8, 3)  # D, F, E, K


def tokens(num_tokens: int, seed: int = 3) -> Tensor:
    """The same on every rank."""
    return torch.randn(num_tokens, SIZES[0], generator=torch.Generator().manual_seed(seed))


def pair(**options: object) -> tuple[MoE, ExpertParallelMoE]:
    """One rank's block and the ranks' of the same weights."""
    torch.manual_seed(5)
    whole = MoE(*SIZES)
    split = ExpertParallelMoE(*SIZES, **options)
    split.router.load_state_dict(whole.router.state_dict())
    split.load_experts(whole.gate_up_proj, whole.down_proj)
    return whole, split


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """How many collectives, copies to the host and choices of experts are made inside."""
    seen: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        for name, owner, attribute in (
            ("collectives", dist, "all_to_all_single"),
            ("collectives", collectives, "all_gather"),
            ("copies", expert_counts, "on_host"),
            ("routings", router, "moe_route"),
        ):
            original = getattr(owner, attribute)

            def counting(*args: object, _name: str = name, _original=original, **keywords: object):  # type: ignore[no-untyped-def]
                seen[_name] += 1
                return _original(*args, **keywords)

            stack.enter_context(unittest.mock.patch.object(owner, attribute, counting))
        yield seen


def grads(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, torch.sin(out.detach() * 3), retain_graph=True)


# ── run on every rank ───────────────────────────────────────────────────────────────────────────────────────────────


def check_layer(device: str) -> None:
    """The block, its gradients and the gathered weights, tokens on one rank alone and then on all."""
    for dispatcher, busy in itertools.product(DISPATCHERS, ("first", "all")):
        whole, split = pair(dispatcher=dispatcher, num_chunks=3)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        bounds = [22 * at // ranks for at in range(ranks + 1)] if busy == "all" else [0] + [22] * ranks
        mine = slice(bounds[rank], bounds[rank + 1])
        d_out = torch.cos(torch.arange(22.0 * SIZES[0])).view(22, SIZES[0])
        ours = gradients(split, split.experts, tokens(22)[mine], d_out[mine])
        dist.all_reduce(ours[2])  # each rank has the router's gradient of its own tokens
        twin = gradients(whole, whole, tokens(22), d_out)
        gold = gradients(whole.double(), whole, tokens(22).double(), d_out.double())
        for results in (twin, gold):
            results[:2] = [result[mine] for result in results[:2]]
            results[3:] = [result[split.local_experts] for result in results[3:]]
        for name, o, g, t in zip(("out", "d_hidden", "d_router", "d_gate_up", "d_down"), ours, gold, twin, strict=True):
            assert_close(o, g, t, f"{dispatcher} {busy} {name}")
        for o, g in zip(ours[2:], gold[2:], strict=True):
            assert abs(float((o.double() * g).sum() / g.square().sum()) - 1) <= 1e-5, "a gradient of another scale"
        weights = (whole.gate_up_proj, whole.down_proj)
        assert all(torch.equal(g.double(), w) for g, w in zip(split.gathered_experts(), weights, strict=True))


def gradients(block: nn.Module, experts: nn.Module, hidden: Tensor, d_out: Tensor) -> list[Tensor]:
    """out, and the gradients of hidden, the router and the experts' projections."""
    hidden = hidden.clone().requires_grad_()
    out = block(hidden)
    leaves = (hidden, block.router.weight, experts.gate_up_proj, experts.down_proj)  # type: ignore[union-attr]
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def check_kept_plans(device: str) -> None:
    """A recompute makes no routing, no counts, no copy to the host, and the same bits; ties as well."""
    for num_chunks, ties in itertools.product((1, 4), (False, True)):
        _, first = pair(num_chunks=num_chunks)
        _, second = pair(num_chunks=num_chunks, dispatcher="naive")
        second.experts.settings = ExpertOptions(activation="geglu", save="plan")
        if ties:
            nn.init.zeros_(first.router.weight)
        region = nn.Sequential(first, nn.Tanh(), second, nn.Tanh())
        hidden = tokens(9 + 4 * dist.get_rank()).requires_grad_()
        out = region(hidden)
        expected = (out, *grads(out, hidden, *region.parameters()))
        with counted() as forward:
            out = checkpoint(region, hidden, use_reentrant=False, context_fn=keep_plans)
        with counted() as backward:
            again = (out, *grads(out, hidden, *region.parameters()))
        assert forward == {"collectives": 2 * (3 + 2 * num_chunks), "copies": 2, "routings": 2}
        # of the recompute and of the backward: the weights and two of each chunk
        assert backward == {"collectives": 4 * (1 + 2 * num_chunks)}
        third = grads(out, hidden, *region.parameters())
        for a, b in (*zip(expected, again, strict=True), *zip(expected[1:], third, strict=True)):
            assert torch.equal(a, b)


def check_own_recompute(device: str) -> None:
    """The contexts by hand, two forwards before a backward, a router that differs later on, and too many layers."""
    _, moe = pair(num_chunks=2)
    hidden = tokens(10).requires_grad_()
    product = checkpoint(moe, hidden, use_reentrant=False, context_fn=keep_plans) * checkpoint(
        moe, 2 * hidden, use_reentrant=False, context_fn=keep_plans
    )
    plain = moe(hidden) * moe(2 * hidden)
    assert all(torch.equal(a, b) for a, b in zip(grads(product, hidden), grads(plain, hidden), strict=True))
    forward, recompute = keep_plans()
    with forward, torch.no_grad():
        out = moe(hidden)
    for _ in range(2):
        with recompute, counted() as seen:
            assert torch.equal(moe(hidden), out) and "copies" not in seen and "routings" not in seen
    with recompute:
        moe(hidden)
        with pytest.raises(RuntimeError, match="asks for plan 2 of a forward that made 1"):
            moe(hidden)
    out = checkpoint(moe, hidden, use_reentrant=False, context_fn=keep_plans)
    if dist.get_rank() == 0:
        moe.router.weight.data.neg_()  # another choice of experts, were it made again
    assert grads(out, hidden)[0].isfinite().all()


def check_replay(device: str) -> None:
    """Experts that were chosen elsewhere, some slots of which take no part."""
    whole, split = pair()
    hidden = tokens(14, seed=dist.get_rank())
    index = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(at))[:3] for at in range(14)])
    index[3, 1], index[5] = -1, -1
    for routing in (split.router(hidden, index),):
        expected = whole(hidden, whole.route(hidden, index))
        for out in (split(hidden, routing), split(hidden, plan=split.plan(hidden, index))):
            torch.testing.assert_close(out, expected)
            assert not out[5].any()
    with torch.autocast("cpu", torch.bfloat16):
        assert split(hidden).dtype == torch.bfloat16


def check_gradcheck(device: str) -> None:
    """Numerical gradients: a rank's tokens are independent of the other's, so both check at once."""
    for dispatcher in DISPATCHERS:
        hidden, weights = tokens(4).double(), torch.rand(4, 2).double()
        index = torch.tensor([[0, 3], [1, 2], [3, -1], [2, 2]])
        gate_up, down = torch.randn(2, 6, SIZES[0]).double(), torch.randn(2, SIZES[0], 3).double()
        plan = expert_plan(hidden, index, 4, dispatcher=dispatcher, num_chunks=2)

        def layer(hidden: Tensor, weights: Tensor, gate_up=gate_up, down=down, plan=plan) -> Tensor:  # type: ignore[no-untyped-def]
            return expert_parallel_moe(hidden, gate_up, down, weights, plan)

        assert torch.autograd.gradcheck(layer, (hidden.requires_grad_(), weights.requires_grad_()))


def check_refusals(device: str) -> None:
    """What one rank is given wrong, all ranks refuse at once, and the next call works."""
    ranks, odd = dist.get_world_size(), dist.get_rank() == dist.get_world_size() - 1
    hidden, index = tokens(6), torch.arange(18).view(6, 3) % 8

    out_of_range = index.clone()
    out_of_range[2, 1] = 8

    def plan(**changed: object) -> object:
        arguments = dict(hidden=hidden, top_k_index=index, num_experts=8) | (changed if odd else {})
        return expert_plan(**arguments)  # type: ignore[arg-type]

    for message, changed in (
        ("the ranks do not agree on D: rank 0 has 12, rank 1 has 11", dict(hidden=hidden[:, :11])),
        ("agree on dtype: rank 0 has torch.float32, rank 1 has torch.float16", dict(hidden=hidden.half())),
        ("agree on E: rank 0 has 8, rank 1 has 16", dict(num_experts=16)),
        ("agree on K", dict(top_k_index=index[:, :2])),
        ("agree on num_chunks", dict(num_chunks=2)),
        ("agree on dispatcher: .* naive", dict(dispatcher="naive")),
    ):
        with pytest.raises(ValueError, match=message):
            plan(**changed)
    for message, changed in (
        (r"'num_experts' is 9; expected a multiple of the group's 2 ranks", dict(num_experts=9)),
        (r"'top_k_index' has the value 8 at row 7; expected \[0, 8\)", dict(top_k_index=out_of_range)),
        ("argument 'hidden' has type NoneType", dict(hidden=None)),
        ("argument 'num_chunks' is 65; expected 1 to the most = 64", dict(num_chunks=65)),
    ):
        told = message if odd else f"rank {ranks - 1} of the group refused its arguments"
        with pytest.raises((ValueError, TypeError), match=told):
            plan(**changed)
    # As on a GPU, where only the exchange tells.
    with (
        unittest.mock.patch.object(flags, "report_outside"),
        pytest.raises(ValueError, match="rank 1 of the group refused"),
    ):
        plan(top_k_index=out_of_range)
    assert plan() is not None
    with pytest.raises(ValueError, match="num_experts is 9; expected a multiple"):
        ExpertParallelMoE(4, 4, 9, 2)
    with pytest.raises(ValueError, match="num_ranks is 3; expected a divisor of 2 ranks"):
        new_expert_group(3)
    group = new_expert_group(1)
    assert group.size() == 1 and pair(group=group)[1](hidden).shape == hidden.shape


def check_two_ranks(device: str) -> None:
    """All that two ranks show, in one start of them."""
    for check in (check_layer, check_kept_plans, check_own_recompute, check_replay, check_gradcheck, check_refusals):
        check(device)


# ── the tests ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_mo_a17_fs_a07_two_ranks() -> None:
    run(__name__, "check_two_ranks", 2)


def test_the_choice_of_a_dispatcher_follows_from_the_rows_that_cross() -> None:
    expected = {
        (1, 8): "deduplicated",
        (2, 8): "all_gather",
        (4, 8): "all_gather",
        (8, 8): "deduplicated",
        (2, 2): "deduplicated",
        (64, 8): "deduplicated",
    }
    for sizes, name in expected.items():
        chosen, reason = choose_dispatcher(*sizes)
        assert chosen == name and DISPATCHERS[name].because in reason
    rows = {name: [round(each.rows(r, 8), 2) for r in (2, 4, 8)] for name, each in DISPATCHERS.items()}
    assert rows == {"naive": [4, 6, 7], "deduplicated": [1.0, 2.7, 4.59], "all_gather": [1, 3, 7]}


def test_the_pipeline_s_model_is_the_longer_part_with_a_ramp_and_a_drain() -> None:
    assert [model(8.0, 4.0, chunks) for chunks in (1, 2, 4)] == [12.0, 10.0, 9.0]
    assert [model(4.0, 8.0, chunks) for chunks in (1, 2, 4)] == [12.0, 10.0, 9.0]


def test_a_group_can_tell_that_nothing_will_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert not env.one_device_queue()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert env.one_device_queue()


def test_chunks_have_about_a_thousand_rows_an_expert() -> None:
    assert [auto_chunks(n, 8, 128, 2) for n in (0, 4096, 16384, 32768, 65536, 131072)] == [1, 1, 2, 4, 8, 8]
