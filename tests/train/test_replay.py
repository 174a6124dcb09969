"""Router replay: zero flips against any rollout, live scores with their gradient, and less of a mismatch."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusedce import moe_replay
from fusedce.nn import Router
from fusedce.train import replay
from fusedce.train.losses import PolicyOptions, policy_loss, token_weights
from fusedce.train.model import LM, generate
from fusedce.train.weights import init_weights
from tests.train.conftest import TINY

ROWS, PROMPT, ANSWER = 6, 5, 4


def build(**changes: object) -> LM:
    config = replace(TINY, vocab_size=11, num_layers=3, num_experts=8, **changes)
    return init_weights(LM(config), int(torch.randint(1000, ())))


def rollout(model: LM) -> tuple[Tensor, replay.Choices]:
    """Prompts with answers that the model gave, and its routing."""
    prompts = torch.randint(11, (ROWS, PROMPT))
    with replay.recorded(model, ROWS) as choices:
        answers = generate(model, prompts, ANSWER)
    return torch.cat((prompts, answers), 1), choices


def chosen(model: LM, ids: Tensor, given: replay.Choices | None = None) -> replay.Choices:
    with replay.recorded(model, len(ids)) as choices:
        if given is None:
            model(ids[:, :-1])
        else:
            with replay.replayed(model, given):
                model(ids[:, :-1])
    return choices


def logprob(model: LM, ids: Tensor) -> Tensor:
    return model.head(model(ids[:, :-1])[:, -ANSWER:], ids[:, -ANSWER:]).logprob


def test_a_generation_is_recorded_token_by_token() -> None:
    """The cache's forwards, one after the other, chose what one forward of all tokens does."""
    model = build()
    ids, choices = rollout(model)
    assert len(choices) == 3 and all(index.shape == (ROWS, PROMPT + ANSWER - 1, 2) for index in choices)
    assert not replay.route_flips(choices, chosen(model, ids))
    assert not any(
        router._forward_hooks or router._forward_pre_hooks for router in model.modules() if isinstance(router, Router)
    )


@pytest.mark.parametrize("recompute", [0.0, 1.0])
@pytest.mark.parametrize("ties", [False, True])
def test_the_selection_is_replayed_and_the_scores_are_live(recompute: float, ties: bool) -> None:
    """By a model that would choose otherwise, also one whose experts are all tied; the gradient is the router's own."""
    ids, choices = rollout(build())
    model = build(recompute=recompute)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if ties:
        for router in routers:
            torch.nn.init.zeros_(router.weight)
    assert replay.route_flips(chosen(model, ids), choices) > 0.1
    assert not replay.route_flips(chosen(model, ids, choices), choices)
    seen = []
    hook = routers[1].register_forward_hook(lambda module, args, routing: seen.append((args[0].detach(), routing)))
    with replay.replayed(model, choices):
        logprob(model, ids).sum().backward()
    hook.remove()
    assert len(seen) == 1 + (recompute > 0)
    for hidden, routing in seen:
        live = moe_replay(routers[1].logits(hidden), choices[1].flatten(0, 1))
        assert torch.equal(routing.top_k_index, choices[1].flatten(0, 1))
        assert torch.equal(routing.top_k_weights, live.top_k_weights)
    assert all(router.weight.grad.any() for router in routers)


def test_micro_batches_replay_their_rows() -> None:
    ids, choices = rollout(build())
    model = build(recompute=1.0)
    grads = []
    for parts in ([slice(0, ROWS)], [slice(0, 2), slice(2, ROWS)]):
        model.zero_grad()
        for part in parts:
            with replay.replayed(model, replay.rows(choices, part)):
                logprob(model, ids[part]).sum().backward()
        grads.append(model.layers[0].moe.router.weight.grad.clone())
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_replay_takes_the_flips_out_of_the_mismatch() -> None:
    """A sampler in bf16 whose router is a little off: without replay some tokens go elsewhere; with it none do."""
    model = build()
    torch.nn.init.normal_(model.head.weight, std=0.5)
    engine = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.copy_(parameter.bfloat16().float())
        for module in engine.modules():
            if isinstance(module, Router):
                module.weight += 0.02 * torch.randn_like(module.weight)
    ids, choices = rollout(engine)
    weights = token_weights(torch.ones(ROWS, ANSWER, dtype=torch.bool), "token")
    with torch.no_grad():
        sampled, free = logprob(engine, ids), logprob(model, ids)
        with replay.replayed(model, choices):
            held = logprob(model, ids)
        assert replay.route_flips(chosen(model, ids), choices) > 0
        kls = [
            policy_loss(lp, None, torch.ones(ROWS), weights, PolicyOptions(), rollout_logprob=sampled).mismatch_kl
            for lp in (free, held)
        ]
    assert 0 < kls[1] < 0.5 * kls[0]


def test_flips_are_counted_by_slot() -> None:
    ours = [torch.tensor([[[0, 1], [2, 3]]]), torch.tensor([[[0, 1], [2, 3]]])]
    theirs = [torch.tensor([[[1, 0], [2, 5]]]), torch.tensor([[[1, 0], [6, 7]]])]
    assert float(replay.route_flips(ours, theirs)) == pytest.approx((0 + 0.75) / 2)
    assert float(replay.route_flips(ours, theirs, torch.tensor([[False, True]]))) == pytest.approx(0.75)
    assert float(replay.route_flips(ours, theirs, torch.tensor([[False, False]]))) == 0.0


def test_choices_of_another_model() -> None:
    (ids, choices), model = rollout(build()), build()
    with pytest.raises(ValueError, match="of 2 routers for a model of 3"), replay.replayed(model, choices[:2]):
        raise AssertionError("entered")
    few = replay.rows(choices, slice(0, 2))
    with pytest.raises(ValueError, match="top_k_index"), replay.replayed(model, few):
        model(ids)
