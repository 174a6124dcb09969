"""One problem for every op of the registry: its inputs, our call, and the same in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedce

IGNORE = -100
Results = list[Tensor]
Tensors = list[Tensor | None]


@dataclass(frozen=True)
class Sizes:
    """Of one problem: tokens, vocabulary and hidden; experts, feed-forward and experts a token; whether logits have a
    bias."""

    num_tokens: int
    vocab: int
    depth: int
    num_experts: int
    ffn: int
    top_k: int = 2
    has_bias: bool = True


# The first is odd everywhere, so that every kernel has a tail; on a GPU also one that descriptors can reach, without a
# bias, for which there is another tile.
SMALL = Sizes(67, 301, 47, 5, 19)
LARGE = Sizes(392, 2056, 264, 8, 136, has_bias=False)


@dataclass(frozen=True)
class Primitive:
    """One op.

    inputs, names: what its tensors and its results are called. make: the tensors, of which the floating ones get
    gradients, from sizes, in a dtype. ours: results by a backend. plain: results by plain torch, in the tensors' dtype.
    tokens: what the first result is the sum of, if it is one.
    """

    op: str
    inputs: tuple[str, ...]
    names: tuple[str, ...]
    make: Callable[[Sizes, torch.dtype], Tensors]
    ours: Callable[..., Results]
    plain: Callable[..., Results]
    tokens: Callable[..., Tensor] | None = None


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _wide(logits: Tensor) -> Tensor:
    """Rounded to the tensors' dtype, as plain torch's are; what follows is at least fp32."""
    return logits if logits.dtype == torch.float64 else logits.float()


# ── linear cross-entropy ────────────────────────────────────────────────────────────────────────────────────────────
def _head(sizes: Sizes, dtype: torch.dtype) -> Tensors:
    """hidden, weight, bias or None, target: logits that spread by about 2, as a trained head's do, and ignored rows."""
    draw = _generator(1)
    hidden = torch.randn(sizes.num_tokens, sizes.depth, generator=draw)
    weight = 2 * torch.randn(sizes.vocab, sizes.depth, generator=draw) * sizes.depth**-0.5
    bias = torch.randn(sizes.vocab, generator=draw).to(dtype) if sizes.has_bias else None
    return [hidden.to(dtype), weight.to(dtype), bias, _targets(sizes, IGNORE)]


def _targets(sizes: Sizes, instead: int) -> Tensor:
    target = torch.randint(0, sizes.vocab, (sizes.num_tokens,), generator=_generator(8))
    target[::5] = instead
    return target


def _shard(sizes: Sizes, dtype: torch.dtype) -> Tensors:
    """The same as a shard of a vocabulary, where some targets are in another one."""
    return [*_head(sizes, dtype)[:3], _targets(sizes, -1)]


def _selected(sizes: Sizes, dtype: torch.dtype) -> Tensors:
    """The same with five words a token, some slots ignored, and some rows wholly."""
    ids = torch.randint(0, sizes.vocab, (sizes.num_tokens, 5), generator=_generator(2))
    ids[2::4, 1] = IGNORE
    ids[::5] = IGNORE
    return [*_head(sizes, dtype)[:3], ids]


def _planted(sizes: Sizes, dtype: torch.dtype) -> Tensors:
    """hidden, weight, bias: whole numbers, exact in every dtype, so that the greedy word is too, with its ties."""
    draw = _generator(3)
    hidden = torch.randint(-2, 3, (sizes.num_tokens, sizes.depth), generator=draw)
    weight = torch.randint(-2, 3, (sizes.vocab, sizes.depth), generator=draw)
    bias = torch.randint(-2, 3, (sizes.vocab,), generator=draw).to(dtype) if sizes.has_bias else None
    return [hidden.to(dtype), weight.to(dtype), bias]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _wide(F.linear(hidden, weight, bias))


def _plain_logprob(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Results:
    logits = _logits(hidden, weight, bias)
    log_probs, kept = logits.log_softmax(1), target != IGNORE
    logprob = log_probs.gather(1, torch.where(kept, target, 0)[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(1)
    return [torch.where(kept, x, 0.0) for x in (logprob, entropy, logits.logsumexp(1))]


def _logprob(backend: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Results:
    logprob, entropy, lse = fusedce.linear_logprob(hidden, weight, target, bias=bias, backend=backend)
    assert entropy is not None
    return [logprob, entropy, lse]


def _sparse(backend: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Results:
    """With a budget of 0: rows that have no gradient are left out, and nothing else."""
    options: dict[str, Any] = {"bias": bias, "gradient_budget": 0.0, "backend": backend}
    logprob, entropy, lse = fusedce.linear_logprob(hidden, weight, target, **options)
    assert entropy is not None
    return [logprob, entropy, lse]


def _loss(backend: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Results:
    options: dict[str, Any] = {"linear_bias": bias, "reduction": "sum", "z_loss": 0.01, "backend": backend}
    return [fusedce.linear_cross_entropy(hidden, weight, target, **options)]


def _token_losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    logits = _logits(hidden, weight, bias)
    losses = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="none")
    return losses + torch.where(target != IGNORE, 0.01 * logits.logsumexp(1).square(), 0.0)


def _parts(backend: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Results:
    """The op of a vocabulary's shard has no autograd of its own."""
    with torch.no_grad():
        return [torch.ops.fusedce.linear_parts(hidden, weight, target, bias, backend=backend)]


def _plain_parts(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Results:
    with torch.no_grad():
        logits = _logits(hidden, weight, bias)
        is_target = target[:, None] == torch.arange(logits.shape[1], device=target.device)
        others = torch.where(is_target, -torch.inf, logits)
        gaps = others - others.amax(1, keepdim=True)
        weighed = torch.where(is_target, 0.0, gaps.exp() * gaps)
        of_target = torch.where(is_target, logits, -torch.inf).amax(1)
        return [torch.stack([others.amax(1), gaps.exp().sum(1), weighed.sum(1), of_target], 1)]


def _argmax(backend: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Results:
    return [fusedce.linear_argmax(hidden, weight, bias=bias, backend=backend)]


def _plain_argmax(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Results:
    logits = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    return [(logits == logits.amax(1, keepdim=True)).int().argmax(1)]


def _logprob_of(backend: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor) -> Results:
    return [fusedce.linear_logprob_of(hidden, weight, ids, bias=bias, backend=backend)]


def _plain_logprob_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor) -> Results:
    values = _logits(hidden, weight, bias).log_softmax(1).gather(1, torch.where(ids == IGNORE, 0, ids))
    return [torch.where(ids == IGNORE, 0.0, values)]


# ── mixture of experts ──────────────────────────────────────────────────────────────────────────────────────────────
def _router(sizes: Sizes, dtype: torch.dtype) -> Tensors:
    return [(2 * torch.randn(sizes.num_tokens, sizes.num_experts, generator=_generator(4))).to(dtype)]


def _index(sizes: Sizes) -> Tensor:
    scores = torch.rand(sizes.num_tokens, sizes.num_experts, generator=_generator(5))
    return scores.topk(sizes.top_k, 1).indices


def _routed(sizes: Sizes, dtype: torch.dtype) -> Tensors:
    return [*_router(sizes, dtype), _index(sizes)]


def _tokens(sizes: Sizes, dtype: torch.dtype) -> Tensors:
    draw = _generator(6)
    return [torch.randn(sizes.num_tokens, sizes.depth, generator=draw).to(dtype), _index(sizes)]


def _rows(sizes: Sizes, dtype: torch.dtype) -> Tensors:
    draw = _generator(6)
    return [torch.randn(sizes.num_tokens * sizes.top_k, sizes.depth, generator=draw).to(dtype), _index(sizes)]


def _layer(sizes: Sizes, dtype: torch.dtype) -> Tensors:
    """hidden, gate_up_proj, down_proj, top_k_weights (at least fp32), top_k_index."""
    draw = _generator(7)
    hidden = torch.randn(sizes.num_tokens, sizes.depth, generator=draw)
    gate_up = torch.randn(sizes.num_experts, 2 * sizes.ffn, sizes.depth, generator=draw) * sizes.depth**-0.5
    down = torch.randn(sizes.num_experts, sizes.depth, sizes.ffn, generator=draw) * sizes.ffn**-0.5
    weights = torch.rand(sizes.num_tokens, sizes.top_k, generator=draw) + 0.1
    return [hidden.to(dtype), gate_up.to(dtype), down.to(dtype), weights, _index(sizes)]


def _route(backend: str, logits: Tensor) -> Results:
    routing = fusedce.moe_route(logits, 2, scale=1.5, backend=backend)
    return [routing.top_k_weights, routing.top_k_index]


def _plain_route(logits: Tensor) -> Results:
    scores = _wide(logits).softmax(1)
    # the rule of ties, which 16-bit logits have: the lower id first
    index = logits.sort(dim=1, descending=True, stable=True).indices[:, :2]
    weights = scores.gather(1, index)
    return [1.5 * weights / weights.sum(1, keepdim=True), index]


def _replay(backend: str, logits: Tensor, index: Tensor) -> Results:
    return [fusedce.moe_replay(logits, index, score="sigmoid", backend=backend).top_k_weights]


def _plain_replay(logits: Tensor, index: Tensor) -> Results:
    weights = _wide(logits).sigmoid().gather(1, index)
    return [weights / weights.sum(1, keepdim=True)]


def _balance(backend: str, logits: Tensor, index: Tensor) -> Results:
    balance = fusedce.moe_balance(logits, index, backend=backend)
    return [balance.share, balance.square, balance.load.detach()]


def _plain_balance(logits: Tensor, index: Tensor) -> Results:
    wide = _wide(logits)
    load = F.one_hot(index, logits.shape[1]).sum((0, 1)).to(wide)
    return [wide.softmax(1).sum(0, keepdim=True), wide.logsumexp(1).square().sum()[None], load[None]]


def _plan(backend: str, logits: Tensor, index: Tensor) -> Results:
    plan = fusedce.moe_plan(index, logits.shape[1], backend=backend)
    return [plan.offsets, plan.row_slot, plan.slot_row]


def _plain_plan(logits: Tensor, index: Tensor) -> Results:
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=logits.shape[1]).cumsum(0)
    return [F.pad(ends, (1, 0)).int(), order.int(), order.argsort().view_as(index).int()]


def _chunks(backend: str, logits: Tensor, index: Tensor) -> Results:
    plans = fusedce.moe_plan_chunks(index, logits.shape[1], 3, backend=backend)
    return [plans.offsets, plans.row_slot, plans.slot_row]


def _plain_chunks(logits: Tensor, index: Tensor) -> Results:
    found = [_plain_plan(logits, chunk) for chunk in index.split(-(-index.shape[0] // 3))]
    offsets, row_slot, slot_row = zip(*found, strict=True)
    return [torch.stack(offsets), torch.cat(row_slot), torch.cat(slot_row)]


def _experts(backend: str, hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, index: Tensor) -> Results:
    plan = fusedce.moe_plan(index, down.shape[0], backend=backend)
    return [fusedce.moe_experts(hidden, gate_up, down, weights, plan, combine=True, backend=backend)]


def _plain_experts(hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, index: Tensor) -> Results:
    rows = hidden.new_zeros((*index.shape, hidden.shape[1]))
    for expert in range(down.shape[0]):
        token, choice = (index == expert).nonzero(as_tuple=True)
        gate, up = F.linear(hidden[token], gate_up[expert]).chunk(2, 1)
        out = F.linear(F.silu(gate) * up, down[expert])
        rows = rows.index_put((token, choice), out * weights[token, choice].to(out.dtype)[:, None])
    return [rows.sum(1)]


def _dispatch(backend: str, hidden: Tensor, index: Tensor) -> Results:
    plan = fusedce.moe_plan(index, int(index.max()) + 1, backend=backend)
    return [fusedce.moe_dispatch(hidden, plan, backend=backend)]


def _plain_dispatch(hidden: Tensor, index: Tensor) -> Results:
    return [hidden[index.reshape(-1).argsort(stable=True) // index.shape[1]]]


def _combine(backend: str, rows: Tensor, index: Tensor) -> Results:
    plan = fusedce.moe_plan(index, int(index.max()) + 1, backend=backend)
    return [fusedce.moe_combine(rows, plan, backend=backend)]


def _plain_combine(rows: Tensor, index: Tensor) -> Results:
    row_of_slot = index.reshape(-1).argsort(stable=True).argsort().view_as(index)
    return [rows[row_of_slot].sum(1)]


_LOGPROB = ("logprob", "entropy", "lse")
_PLAN = ("offsets", "row_slot", "slot_row")
_HEAD = ("hidden", "weight", "bias", "target")
_OF = ("hidden", "weight", "bias", "ids")
_LAYER = ("hidden", "gate_up_proj", "down_proj", "top_k_weights", "top_k_index")
_ROUTED = ("logits", "top_k_index")
PRIMITIVES = (
    Primitive("linear_logprob", _HEAD, _LOGPROB, _head, _logprob, _plain_logprob),
    Primitive(
        "linear_ce_sum", _HEAD, ("loss",), _head, _loss, lambda *t: [_token_losses(*t).sum()], tokens=_token_losses
    ),
    Primitive("linear_logprob_sparse", _HEAD, _LOGPROB, _head, _sparse, _plain_logprob),
    Primitive("linear_parts", _HEAD, ("parts",), _shard, _parts, _plain_parts),
    Primitive("linear_argmax", _HEAD[:3], ("word",), _planted, _argmax, _plain_argmax),
    Primitive("linear_logprob_of", _OF, ("logprob",), _selected, _logprob_of, _plain_logprob_of),
    Primitive("moe_route", ("logits",), ("top_k_weights", "top_k_index"), _router, _route, _plain_route),
    Primitive("moe_replay", _ROUTED, ("top_k_weights",), _routed, _replay, _plain_replay),
    Primitive("moe_balance", _ROUTED, ("share", "square", "load"), _routed, _balance, _plain_balance),
    Primitive("moe_plan", _ROUTED, _PLAN, _routed, _plan, _plain_plan),
    Primitive("moe_plan_chunks", _ROUTED, _PLAN, _routed, _chunks, _plain_chunks),
    Primitive("moe_experts", _LAYER, ("out",), _layer, _experts, _plain_experts),
    Primitive("moe_dispatch", ("hidden", "top_k_index"), ("rows",), _tokens, _dispatch, _plain_dispatch),
    Primitive("moe_combine", ("rows", "top_k_index"), ("out",), _rows, _combine, _plain_combine),
)
