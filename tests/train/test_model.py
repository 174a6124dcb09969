"""The decoder: recompute changes no bit, the cache no token, and the head never sees a prompt it is not asked about."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fusedce.train.mesh import alone
from fusedce.train.model import LM, ExpertLoad, generate
from fusedce.train.weights import init_weights
from tests.train.conftest import TINY

CONFIG = replace(TINY, vocab_size=11, num_layers=3)


def make(**changes: object) -> LM:
    return init_weights(LM(replace(CONFIG, **changes)), seed=1)


def grads(model: LM, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    result = model.head(model(ids[:, :-1]), ids[:, 1:], 0.7)
    (-result.logprob.mean() + 0.1 * result.entropy.square().mean()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", [0.34, 1.0])
def test_recompute_gives_the_same_gradients(recompute: float, tied: bool) -> None:
    ids = torch.randint(CONFIG.vocab_size, (4, 9))
    kept, again = (grads(make(recompute=r, tied=tied), ids) for r in (0.0, recompute))
    assert kept.keys() == again.keys()
    for name, grad in kept.items():
        assert torch.equal(grad, again[name]), name
        assert grad.any(), f"{name} gets no gradient"


def test_recompute_runs_the_blocks_again() -> None:
    calls = dict.fromkeys(range(3), 0)
    model = make(recompute=0.67)
    for index, block in enumerate(model.layers):
        block.moe.register_forward_pre_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    grads(model, torch.randint(CONFIG.vocab_size, (2, 5)))
    assert calls == {0: 2, 1: 2, 2: 1}


def test_head_equals_plain_logits() -> None:
    model, ids = make(), torch.randint(CONFIG.vocab_size, (3, 8))
    hidden = model(ids)
    log_probs = (model.head.logits(hidden) / 0.7).log_softmax(-1)
    result = model.head(hidden, ids, 0.7)
    torch.testing.assert_close(result.logprob, log_probs.gather(-1, ids[..., None])[..., 0])
    torch.testing.assert_close(result.entropy, -(log_probs.exp() * log_probs).sum(-1))
    plain = F.cross_entropy(model.head.logits(hidden).flatten(0, 1), ids.flatten(), reduction="sum")
    torch.testing.assert_close(model.head.cross_entropy(hidden, ids), plain)


def test_a_token_does_not_see_what_follows() -> None:
    model, ids = make(), torch.randint(CONFIG.vocab_size, (2, 8))
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % CONFIG.vocab_size
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().amax() > 1e-3


def test_cached_generation_equals_full_forwards() -> None:
    model, prompts = make(), torch.randint(CONFIG.vocab_size, (5, 4))
    ids = prompts
    for _ in range(6):
        next_id = model.head.logits(model(ids)[:, -1]).argmax(-1, keepdim=True)
        ids = torch.cat((ids, next_id), 1)
    assert torch.equal(generate(model, prompts, 6, temperature=0), ids[:, 4:])


def test_cached_hidden_states_equal_full_ones() -> None:
    model, ids = make(), torch.randint(CONFIG.vocab_size, (5, 9))
    caches = model.new_caches(9)
    parts = [model(ids[:, :4], caches)] + [model(ids[:, i : i + 1], caches) for i in range(4, 9)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids))
    with pytest.raises(RuntimeError, match="one token at a time"):
        model(ids[:, :2], caches)


def test_samples_follow_the_model() -> None:
    model = make()
    prompts = torch.randint(CONFIG.vocab_size, (1, 4)).expand(4000, -1)
    model.head.weight.data.mul_(20)
    probs = (model.head.logits(model(prompts[:1])[:, -1]) / 2.0).softmax(-1)[0]
    drawn = generate(model, prompts, 1, 2.0, torch.Generator().manual_seed(0))
    shares = torch.bincount(drawn[:, 0], minlength=CONFIG.vocab_size) / 4000
    torch.testing.assert_close(shares, probs, atol=0.03, rtol=0)


def test_expert_load_counts_choices() -> None:
    model = make()
    load = ExpertLoad(model)
    model(torch.randint(CONFIG.vocab_size, (3, 7)))
    assert load.counts.sum(1).tolist() == [3 * 7 * CONFIG.top_k] * 3
    assert 1.0 <= load.imbalance(alone(torch.device("cpu"))) <= CONFIG.num_experts / CONFIG.top_k
    for block in model.layers:  # the router then prefers experts 0 and 1 for every token
        block.moe_norm.weight.data.zero_()
    load.reset()
    model(torch.randint(CONFIG.vocab_size, (3, 7)))
    assert load.imbalance(alone(torch.device("cpu"))) == CONFIG.num_experts / CONFIG.top_k
