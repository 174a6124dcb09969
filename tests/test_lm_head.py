"""FusedLMHead: owned and tied weights, options kept, the shift, logits for generation."""

import copy
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedce
from fusedce.nn.lm_head import FusedLMHead

OPTIONS = dict(temperature=0.7, softcap=2.0, ignore_index=-1)


class Tied(nn.Module):
    """An embedding and a head over the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 8)
        self.head = FusedLMHead.tied_to(self.embed)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids), ids, shift=True)


def draw(*sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    target = torch.randint(0, 29, sizes)
    target.view(-1)[1] = -1
    return torch.randn(*sizes, 8, requires_grad=True), target


def plain_logits(head: FusedLMHead, hidden: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, head.weight, head.bias)
    return 2.0 * torch.tanh(logits / 2.0) / 0.7


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradients(bias: bool, reduction: str) -> None:
    head, (hidden, target) = FusedLMHead(8, 29, bias=bias, **OPTIONS), draw(3, 5)
    loss = head(hidden, target, reduction=reduction)
    plain = F.cross_entropy(
        plain_logits(head, hidden).flatten(0, 1), target.flatten(), reduction=reduction, ignore_index=-1
    )
    expected = plain.reshape(loss.shape)
    assert torch.allclose(loss, expected, rtol=1e-5, atol=1e-6)
    rates = torch.rand_like(loss)
    wanted = [hidden, *head.parameters()]
    assert len(wanted) == 2 + bias
    for ours, theirs in zip(
        torch.autograd.grad(loss, wanted, rates), torch.autograd.grad(expected, wanted, rates), strict=True
    ):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_logprobs_and_logits_agree() -> None:
    head, (hidden, target) = FusedLMHead(8, 29, bias=True, **OPTIONS), draw(7)
    out, logits = head.logprobs(hidden, target), head.logits(hidden)
    assert torch.allclose(logits, plain_logits(head, hidden))
    logp = logits.log_softmax(-1)
    counts = target != -1
    assert torch.allclose(out.logprob, logp.gather(1, target.clamp(min=0)[:, None])[:, 0] * counts, atol=1e-5)
    assert torch.allclose(out.entropy, -(logp.exp() * logp).sum(-1) * counts, atol=1e-5)
    assert torch.allclose(out.lse, logits.logsumexp(-1) * counts, atol=1e-5)
    assert head.logprobs(hidden, target, with_entropy=False).entropy is None
    assert torch.equal(FusedLMHead.tied_to(head.weight).logits(hidden), F.linear(hidden, head.weight))


def test_shift_predicts_the_next_token() -> None:
    head, (hidden, target) = FusedLMHead(8, 29, **OPTIONS), draw(3, 6)
    before = target.clone()
    assert torch.allclose(head(hidden, target, shift=True), head(hidden[:, :-1], target[:, 1:]))
    shifted, plain = head.logprobs(hidden, target, shift=True), head.logprobs(hidden[:, :-1], target[:, 1:])
    for ours, theirs in zip(shifted, plain, strict=True):
        assert torch.allclose(ours[:, :-1], theirs) and not ours[:, -1].any()
    assert head(hidden, target, shift=True, reduction="none").shape == target.shape
    assert torch.equal(target, before)


def test_tied_weight_is_one_parameter() -> None:
    model, ids = Tied(), torch.randint(0, 29, (2, 6))
    assert model.head.weight is model.embed.weight and model.head.bias is None
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == ["embed.weight"]
    assert list(model.state_dict()) == ["embed.weight"]
    model(ids).backward()
    tied, untied = model.embed.weight.grad, nn.Parameter(model.embed.weight.detach().clone())
    logits = F.linear(F.embedding(ids, untied), untied)[:, :-1]
    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert torch.allclose(tied, untied.grad, rtol=1e-5, atol=1e-7)


def test_tied_head_follows_its_source() -> None:
    model, ids = Tied(), torch.randint(0, 29, (2, 6))
    model.embed.weight = nn.Parameter(torch.randn(31, 8))
    assert model.head.weight is model.embed.weight
    model.double()
    assert model(ids).dtype == torch.float64
    for twin in (copy.deepcopy(model), ForkingPickler.loads(ForkingPickler.dumps(model))):
        assert twin.head.weight is twin.embed.weight and twin.embed.weight is not model.embed.weight
        assert torch.equal(twin(ids), model(ids))


@pytest.mark.parametrize("bias", [False, True])
def test_tied_to_a_linear_layer_or_a_parameter(bias: bool) -> None:
    linear, (hidden, target) = nn.Linear(8, 29, bias=bias), draw(7)
    head = FusedLMHead.tied_to(linear, **OPTIONS)
    assert isinstance(head, FusedLMHead) and not list(head.parameters()) and not head.state_dict()
    expected = fusedce.linear_cross_entropy(hidden, linear.weight, target, linear_bias=linear.bias, **OPTIONS)
    assert torch.equal(head(hidden, target), expected)
    assert FusedLMHead.tied_to(linear.weight).weight is linear.weight
    before = linear.weight.clone()
    head.reset_parameters()
    assert torch.equal(linear.weight, before)


def test_wrong_sources_are_refused() -> None:
    for source in (nn.Dropout(), nn.LayerNorm(8), nn.Parameter(torch.ones(3))):
        with pytest.raises(TypeError, match=type(source).__name__):
            FusedLMHead.tied_to(source)


def test_owned_head_as_a_module() -> None:
    head = FusedLMHead(8, 29, bias=True, dtype=torch.bfloat16, device="meta", **OPTIONS)
    assert {name: (tuple(p.shape), p.dtype) for name, p in head.named_parameters()} == {
        "weight": ((29, 8), torch.bfloat16),
        "bias": ((29,), torch.bfloat16),
    }
    assert "temperature=0.7" in repr(head) and "vocab_size=29" in repr(FusedLMHead.tied_to(nn.Embedding(29, 8)))
    weight = FusedLMHead(64, 29).weight
    assert weight.abs().max() <= 64**-0.5 and weight.std() > 0
