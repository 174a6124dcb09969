"""Losses of the sharded head beside plain cross-entropy: several heads over one weight, and the user's own loss of
log-probs."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce import checks, flags
from fusedce.distributed.vocab_parallel import (
    checked_token_weight,
    sharded_losses,
    token_options,
    vocab_parallel_logprob,
)
from fusedce.distributed.vocab_shard import VocabShard, sharded_head
from fusedce.functional.heads import HeadsLoss, checked_head_weight, shifted_heads, stacked_heads
from fusedce.functional.linear_ce import check_loss_options

__all__ = ["vocab_parallel_cross_entropy_heads", "vocab_parallel_policy_loss"]


def vocab_parallel_cross_entropy_heads(
    hidden: Tensor | Sequence[Tensor],
    weight: Tensor,
    target: Tensor,
    shard: VocabShard | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    head_weight: Tensor | Sequence[float] | None = None,
    shift: bool = False,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    sequence_parallel: bool = False,
    check: str = "auto",
    backend: str = "auto",
) -> HeadsLoss:
    """`fusedce.linear_cross_entropy_heads` with the vocabulary sharded over `group`.

    Args:
        hidden: (H, ..., D), or H tensors (..., D), the same on every rank; with sequence_parallel (H, N / ranks, D).
        target: (H, ...) int64 words of the whole vocabulary, of all tokens; with shift (..., S), not together with
            sequence_parallel.
        weight, shard, group, bias, sequence_parallel: as in `vocab_parallel_logprob`; class_weight: as in
            `vocab_parallel_cross_entropy`.
        head_weight, shift, token_weight, reduction, ignore_index, label_smoothing, z_loss, temperature, softcap, check,
            backend: as in `linear_cross_entropy_heads`.

    Returns:
        `HeadsLoss(loss, head_loss)`, () and (H,), the same bits on every rank.

    Raises, memory, determinism: those of `vocab_parallel_cross_entropy` over H·N tokens.
    """
    op = "vocab_parallel_cross_entropy_heads"
    hidden = stacked_heads(op, hidden)
    checks.tensor(op, "target", target, (torch.int64,))
    checks.one_of(op, "reduction", reduction, ("mean", "sum"))
    check_loss_options(op, label_smoothing, z_loss, softcap)
    if shift:
        if sequence_parallel:
            raise ValueError(f"fusedce.{op}: arguments 'shift' and 'sequence_parallel' do not go together")
        checked_token_weight(op, token_weight, target)
        target, token_weight = shifted_heads(op, hidden, target, token_weight, ignore_index)
    num_heads = hidden.shape[0]
    if target.dim() < 1 or target.shape[0] != num_heads:
        raise ValueError(checks.wrong(op, "target", target, f"({num_heads}, ...), hidden's shape without D"))
    # A token's heads side by side: then the ranks' parts of the tokens follow one another.
    tokens = hidden.movedim(0, -2)
    tokens = tokens.reshape(-1, hidden.shape[-1]) if sequence_parallel else tokens
    head, shape = sharded_head(op, tokens, weight, bias, shard, group, sequence_parallel, backend)
    by_token = _by_token(op, target, num_heads, shape)
    if isinstance(temperature, Tensor):
        checks.shape(op, "temperature", temperature, tuple(target.shape), "hidden's shape without D")
        temperature = _by_token(op, temperature, num_heads, shape)
    options = token_options(op, head, by_token, shape, temperature, softcap, ignore_index, check)
    losses = sharded_losses(
        op, head, by_token.reshape(-1), options, num_heads, reduction, label_smoothing, z_loss,
        checked_token_weight(op, token_weight, target), class_weight,
    )  # fmt: skip
    head_loss = losses.reshape(num_heads, -1).sum(1, dtype=torch.float64)
    factors = checked_head_weight(op, head_weight, hidden)
    loss = head_loss if factors is None else head_loss * factors.detach()
    if check == "sync":
        flags.check_flags()
    return HeadsLoss(loss.sum().to(losses.dtype), head_loss.detach().to(losses.dtype))


def _by_token(op: str, of_heads: Tensor, num_heads: int, shape: tuple[int, ...]) -> Tensor:
    """(H, ...) as the tokens of the sharded head lie: each token's heads side by side."""
    if of_heads.numel() != math.prod(shape):
        raise ValueError(checks.wrong(op, "target", of_heads, f"({num_heads}, ...), hidden's shape without D"))
    return of_heads.movedim(0, -1).reshape(shape)


def vocab_parallel_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    loss_fn: Callable[..., Tensor],
    *per_token: Tensor,
    shard: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    with_entropy: bool = False,
    sequence_parallel: bool = False,
    check: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """`fusedce.linear_policy_loss` with the vocabulary sharded over `group`: Σ_i loss_fn(logprob, [entropy,] …)_i.

    Args:
        loss_fn: as in `linear_policy_loss`, but called once, with all tokens; the same function on every rank.
        per_token: tensors of target's shape, of all tokens; they get no gradient.
        with_entropy: whether loss_fn takes the entropy.
        hidden, weight, target, shard, group, bias, temperature, softcap, ignore_index, sequence_parallel, check,
            backend: as in `vocab_parallel_logprob`.

    Returns:
        () fp32, the same bits on every rank. Raises ValueError where loss_fn's result is not (N,).

    Memory, work, determinism: those of `vocab_parallel_logprob`: four GEMMs of the shard, since a token's log-prob is
    known only when all ranks have been heard. With that, loss_fn may look at other tokens, too.
    """
    op = "vocab_parallel_policy_loss"
    for position, tensor in enumerate(per_token):
        if not isinstance(tensor, Tensor) or tensor.shape != target.shape:
            raise ValueError(
                checks.wrong(op, f"per_token[{position}]", tensor, f"target's shape {tuple(target.shape)}")
            )
    out = vocab_parallel_logprob(
        hidden, weight, target, shard, group=group, bias=bias, temperature=temperature, softcap=softcap,
        ignore_index=ignore_index, with_entropy=with_entropy, sequence_parallel=sequence_parallel, check=check,
        backend=backend,
    )  # fmt: skip
    of_rows = [t.reshape(-1) for t in (out.logprob, out.entropy) if t is not None]
    rows = loss_fn(*of_rows, *(t.detach().reshape(-1) for t in per_token))
    if not isinstance(rows, Tensor) or rows.shape != of_rows[0].shape:
        raise ValueError(checks.wrong(op, "loss_fn's result", rows, f"(N,) = ({target.numel()},)"))
    return torch.where(target.reshape(-1) != ignore_index, rows, 0.0).sum()
