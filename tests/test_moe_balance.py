"""The losses on a router: values, gradients, masked tokens, sequences and layers; and balancing without a loss."""

import math

import pytest
import torch
from torch import Tensor

import fusedce
from fusedce.options import RouterBalance
from tests.conftest import Place
from tests.linear_ce_cases import in_fp64, with_gradients
from tests.paired import assert_bites, assert_close

F32, BF16 = torch.float32, torch.bfloat16
# B, S, E, K
SIZES = [(1, 40, 6, 2, F32), (3, 17, 8, 2, BF16), (2, 33, 40, 5, F32), (4, 1, 3, 3, F32), (1, 3, 512, 1, torch.float16),
         (40, 2, 5, 1, BF16)]  # fmt: skip
MASKS = ["none", "bool", "weights"]


def mask_of(kind: str, num_tokens: int, device: str) -> Tensor | None:
    generator = torch.Generator().manual_seed(num_tokens)
    kept = torch.rand(num_tokens, generator=generator) < 0.7
    kept[0] = True
    if kind == "none":
        return None
    return kept.to(device) if kind == "bool" else (kept * torch.rand(num_tokens, generator=generator)).to(device)


def plain(logits: Tensor, index: Tensor, mask: Tensor | None, sequences: int, score: str) -> list[Tensor]:
    """[share, square] by plain torch."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    kept = torch.ones(logits.shape[0]) if mask is None else mask
    kept = kept.to(logits)[:, None]
    scores = logits.softmax(1) if score == "softmax" else logits.sigmoid()
    share = kept * scores / scores.sum(1, keepdim=True)
    square = kept[:, 0] * logits.logsumexp(1).square()
    return [share.view(sequences, -1, logits.shape[1]).sum(1), square.view(sequences, -1).sum(1)]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sums_and_gradient(sizes: tuple, score: str, kind: str, place: Place) -> None:
    sequences, length, num_experts, top_k, dtype = sizes
    generator = torch.Generator().manual_seed(1)
    logits = (2 * torch.randn(sequences * length, num_experts, generator=generator)).to(place.device, dtype)
    index = torch.randint(-1, num_experts, (sequences * length, top_k), generator=generator).to(place.device)
    mask = mask_of(kind, sequences * length, place.device)
    keywords = dict(mask=mask, num_sequences=sequences, score=score, backend=place.backend)
    balance = fusedce.moe_balance(logits, index, **keywords)
    kept = torch.ones(sequences * length, device=place.device) if mask is None else mask.float()
    load = torch.stack([((index == e).sum(1) * kept).view(sequences, -1).sum(1) for e in range(num_experts)], 1)
    assert torch.allclose(balance.load, load) and not balance.load.requires_grad
    assert torch.allclose(balance.tokens, kept.view(sequences, -1).sum(1)) and balance.top_k == top_k

    def ours(logits: Tensor) -> list[Tensor]:
        balance = fusedce.moe_balance(logits, index, **keywords)
        return [balance.share, balance.square]

    grads = [torch.randn(s, generator=generator).to(place.device) for s in ((sequences, num_experts), (sequences,))]
    out = with_gradients(ours, [logits], grads)
    twin = with_gradients(lambda x: plain(x, index, mask, sequences, score), [logits], grads)
    gold = with_gradients(
        lambda x: plain(x, index, mask, sequences, score), in_fp64([logits]), [g.cpu() for g in grads]
    )
    for name, o, g, t in zip(("share", "square", "d_logits"), out, gold, twin, strict=True):
        assert o.dtype == (dtype if name == "d_logits" else torch.float32)
        assert_close(o, g, t, name)
    if length * sequences >= 16:
        assert_bites(gold[2], twin[2], "d_logits")


def test_masked_tokens_may_hold_anything(place: Place) -> None:
    logits = torch.randn(12, 5, device=place.device)
    index = torch.randint(0, 5, (12, 2), device=place.device)
    mask = torch.ones(3, 4, device=place.device, dtype=torch.int64)
    mask[:, 3] = 0
    expected = fusedce.moe_balance(logits, index, mask=mask, num_sequences=3, backend=place.backend)
    logits[3], logits[7, 1] = math.nan, math.inf
    index[3], index[7] = 2**40, -7
    logits.requires_grad_()
    out = fusedce.moe_balance(logits, index, mask=mask, num_sequences=3, backend=place.backend)
    for name in ("load", "share", "square", "tokens"):
        assert torch.equal(getattr(out, name), getattr(expected, name)), name
    (out.share.square().sum() + out.square.sum()).backward()
    assert not logits.grad[3::4].any() and logits.grad.isfinite().all() and logits.grad[0].all()


def mixtral_loss(layers: list[Tensor], top_k: int, mask: Tensor | None) -> Tensor:
    """The formula of the Switch loss, all layers pooled, from one-hot choices."""
    probabilities = torch.cat(layers).softmax(1)
    num_experts = probabilities.shape[1]
    chosen = torch.nn.functional.one_hot(probabilities.topk(top_k).indices, num_experts).sum(1).to(probabilities)
    kept = torch.ones(probabilities.shape[0]) if mask is None else mask.reshape(-1).repeat(len(layers))
    kept = kept.to(probabilities)[:, None]
    f, p = (chosen * kept).sum(0) / kept.sum(), (probabilities * kept).sum(0) / kept.sum()
    return num_experts * (f * p).sum()


@pytest.mark.parametrize("masked", [False, True])
def test_load_balance_loss(masked: bool, place: Place) -> None:
    layers = [torch.randn(24, 6, device=place.device).requires_grad_() for _ in range(3)]
    mask = torch.rand(2, 12, device=place.device) < 0.6 if masked else None
    balances = []
    for logits in layers:
        index = fusedce.moe_route(logits, 2, backend=place.backend).top_k_index
        balances.append(fusedce.moe_balance(logits, index, mask=mask, num_sequences=2, backend=place.backend))
    gold = [logits.detach().cpu().double().requires_grad_() for logits in layers]
    expected = mixtral_loss(gold, 2, None if mask is None else mask.cpu())
    loss = fusedce.load_balance_loss(balances)
    assert torch.allclose(loss.cpu().double(), expected, rtol=1e-5)
    grads, golden = torch.autograd.grad(loss, layers), torch.autograd.grad(expected, gold)
    for ours, theirs in zip(grads, golden, strict=True):
        assert torch.allclose(ours.cpu().double(), theirs, atol=1e-6 * float(theirs.abs().max()) + 1e-9)
    z = torch.cat(gold).logsumexp(1).square()
    kept = torch.ones(72) if mask is None else mask.cpu().reshape(-1).repeat(3).double()
    assert torch.allclose(fusedce.router_z_loss(balances).cpu().double(), (z * kept).sum() / kept.sum(), rtol=1e-5)
    alone = fusedce.load_balance_loss(balances[0])
    assert torch.allclose(
        alone.cpu().double(), mixtral_loss(gold[:1], 2, None if mask is None else mask.cpu()), rtol=1e-5
    )


def test_sequence_balance_loss(place: Place) -> None:
    """DeepSeek-V3's, equations 17 to 20: f over a sequence's top-K, shares of its sigmoid scores."""
    logits = torch.randn(3 * 8, 5, device=place.device, requires_grad=True)
    index = fusedce.moe_route(logits, 2, score="sigmoid", backend=place.backend).top_k_index
    balance = fusedce.moe_balance(logits, index, num_sequences=3, score="sigmoid", backend=place.backend)
    gold = logits.detach().cpu().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for part in range(3):
        rows = slice(part * 8, part * 8 + 8)
        scores = gold[rows].sigmoid()
        shares = scores / scores.sum(1, keepdim=True)
        f = torch.stack([(index[rows].cpu() == e).sum() for e in range(5)]) * 5 / (2 * 8)
        total = total + (f * shares.mean(0)).sum() / 3
    loss = fusedce.sequence_balance_loss(balance)
    assert torch.allclose(loss.cpu().double(), total, rtol=1e-5)
    (grad,), (golden,) = torch.autograd.grad(loss, logits), torch.autograd.grad(total, gold)
    assert torch.allclose(grad.cpu().double(), golden, atol=1e-7)
    assert torch.allclose(fusedce.sequence_balance_loss([balance, balance]), loss)


def test_even_loads_are_the_least_and_no_token_is_no_loss(place: Place) -> None:
    logits = torch.zeros(8, 4, device=place.device)
    even = torch.tensor([[0, 1], [2, 3]] * 4, device=place.device)
    balance = fusedce.moe_balance(logits, even, backend=place.backend)
    assert torch.allclose(fusedce.load_balance_loss(balance), torch.tensor(2.0, device=place.device))
    assert torch.allclose(fusedce.sequence_balance_loss(balance), torch.tensor(1.0, device=place.device))
    for rows, mask in ((0, None), (8, torch.zeros(8, device=place.device))):
        leaf = logits[:rows].clone().requires_grad_()
        balance = fusedce.moe_balance(leaf, even[:rows], mask=mask, backend=place.backend)
        losses = (fusedce.load_balance_loss, fusedce.sequence_balance_loss, fusedce.router_z_loss)
        values = torch.stack([loss(balance) for loss in losses])
        values.sum().backward()
        assert not values.any() and not leaf.grad.any()


def test_layers_must_be_of_one_kind() -> None:
    balances = [fusedce.moe_balance(torch.randn(4, e), torch.zeros(4, 1, dtype=torch.int64)) for e in (3, 4)]
    for layers in ([], balances):
        with pytest.raises(ValueError, match="argument 'balances'"):
            fusedce.load_balance_loss(layers)
    assert isinstance(balances[0], RouterBalance)


def test_update_correction_moves_by_the_sign(device: str) -> None:
    correction = torch.zeros(5, device=device, requires_grad=True)
    counts = torch.tensor([10, 0, 5, 5, 5], device=device)
    fusedce.update_correction(correction, counts, 0.25)
    fusedce.update_correction(correction, counts.float(), 0.25)
    assert correction.tolist() == [-0.5, 0.5, 0.0, 0.0, 0.0]
    thirds = torch.zeros(3, device=device)  # a mean that no float holds
    fusedce.update_correction(thirds, torch.tensor([1, 0, 0], device=device), 1.0)
    assert thirds.tolist() == [-1.0, 1.0, 1.0]


def test_update_correction_balances_a_skewed_router() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(512, 8, generator=generator) + torch.linspace(2, -2, 8)
    correction = torch.zeros(8)
    spread = []
    for _ in range(300):
        index = fusedce.moe_route(logits, 2, score="sigmoid", correction=correction).top_k_index
        counts = fusedce.moe_plan(index, 8).counts
        spread.append(int(counts.max() - counts.min()))
        fusedce.update_correction(correction, counts, 0.01)
    assert spread[0] > 200 and max(spread[-10:]) < 40
