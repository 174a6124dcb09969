"""The head with its vocabulary sharded over a tensor-parallel group: each rank makes the logits of its own words only.

A rank reduces its words to four numbers a token (`fusedce.rows.merge_parts`), the ranks gather them, 16 bytes a token
and rank, and each has every token's log-prob. The backward runs on the shard with the whole vocabulary's normalizer;
d_hidden is summed over the ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce import checks, flags
from fusedce.chunked import kept_rows
from fusedce.distributed.vocab_shard import IGNORED, ShardedHead, VocabShard, sharded_head
from fusedce.functional import LogProb
from fusedce.functional.linear_ce import check_loss_options, shifted
from fusedce.functional.operands import check_options, check_weight, kept_temperature, row_temperature
from fusedce.ops.linear_logprob import result_dtype
from fusedce.ops.row_weights import row_weights
from fusedce.options import LogitOptions
from fusedce.rows import merge_parts

__all__ = ["vocab_parallel_cross_entropy", "vocab_parallel_logprob"]


def vocab_parallel_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    shard: VocabShard | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    with_entropy: bool = True,
    sequence_parallel: bool = False,
    check: str = "auto",
    backend: str = "auto",
) -> LogProb:
    """`fusedce.linear_logprob` with the vocabulary sharded over `group`.

    Args:
        hidden: (..., D), the same on every rank of the group; with sequence_parallel (N / ranks, D), rank r's tokens
            being the r-th part.
        weight: (V_r, D) this rank's words; V_r may differ from rank to rank, and may hold padding. Or a DTensor over
            the group's mesh: Shard(0), taken for its local part, or Replicate, of which a rank takes its even part, and
            gets the whole gradient (an all-reduce of weight's size).
        target: (...) int64 words of the whole vocabulary, the same on every rank, of all tokens.
        shard: which words `weight` holds; None with a DTensor, which knows it.
        group: the tensor-parallel group; None for all ranks, or a DTensor's.
        bias: (V_r,) or None; with a weight that is Replicate a DTensor as well.
        sequence_parallel: whether each rank brings only its part of the tokens. They are gathered, and d_hidden is
            reduced and scattered. target, temperature and results are of all tokens, (N,).
        temperature, softcap, ignore_index, with_entropy, check, backend: as in `linear_logprob`; but on GPUs "auto" is
            told by `fusedce.check_flags()` alone, to be called on all ranks: no call here raises for an earlier one's.

    Returns:
        `LogProb`, of target's shape, the same bits on every rank. Each rank is to differentiate the same loss of them;
        hidden's gradient is then the whole one (with sequence_parallel its part), weight's and bias's are the shard's.

    Raises: as `linear_logprob`; a target outside [0, shard.size) is reported on every rank.

    Memory: as `linear_logprob` of the shard, 16·N bytes a rank, and with sequence_parallel all hidden states. One
    all-gather in the forward, one all-reduce (or reduce-scatter) of d_hidden in the backward. Deterministic as far as
    the collectives are.
    """
    op = "vocab_parallel_logprob"
    head, shape = sharded_head(op, hidden, weight, bias, shard, group, sequence_parallel, backend)
    options = token_options(op, head, target, shape, temperature, softcap, ignore_index, check)
    rows = sharded_rows(head, target.reshape(-1), options, with_entropy)
    if check == "sync":
        flags.check_flags()
    logprob, entropy, lse = (None if result is None else result.reshape(target.shape) for result in rows[:3])
    assert logprob is not None and lse is not None
    return LogProb(logprob, entropy, lse)


def vocab_parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    shard: VocabShard | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    token_weight: Tensor | None = None,
    z_loss: float = 0.0,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    shift: bool = False,
    sequence_parallel: bool = False,
    check: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """Cross-entropy with the vocabulary sharded over `group`: `fusedce.linear_cross_entropy`'s options, with
    the operands of `vocab_parallel_logprob`.

    Args:
        class_weight: (shard.size,) a factor for each word of the whole vocabulary, the same on every rank, any float
            dtype, or None; no gradient flows into it. It is `weight` of `linear_cross_entropy`.
        reduction: "none", "mean" (over the tokens that count, by their class and token weights) or "sum".
        token_weight: target's shape, a factor for each token's loss, or None; no gradient flows into it.
        shift: hidden (B, S, D) and target (B, S) are of the same positions; not together with sequence_parallel, whose
            parts know of no sequences.
        ignore_index, label_smoothing, z_loss: as in `linear_cross_entropy`.
        hidden, weight, target, shard, group, bias, temperature, softcap, sequence_parallel, check, backend: as in
            `vocab_parallel_logprob`.

    Returns:
        The loss in fp32, target's shape for "none", else (); the same bits on every rank. No token that counts: 0, with
        zero gradients. Ranks without such a token take part in every collective.

    Raises, determinism: see `vocab_parallel_logprob`. Memory: as there; label_smoothing adds 4·N bytes a rank to what
    is gathered, 4·N·D for its gradient, and with class weights 4·V_r·D.
    """
    op = "vocab_parallel_cross_entropy"
    checks.one_of(op, "reduction", reduction, ("none", "mean", "sum"))
    check_loss_options(op, label_smoothing, z_loss, softcap)
    if shift and sequence_parallel:
        raise ValueError(f"fusedce.{op}: arguments 'shift' and 'sequence_parallel' do not go together")
    head, shape = sharded_head(op, hidden, weight, bias, shard, group, sequence_parallel, backend)
    if shift:
        checks.tensor(op, "target", target, (torch.int64,))
        target, token_weight = shifted(op, target, token_weight, ignore_index)
    options = token_options(op, head, target, shape, temperature, softcap, ignore_index, check)
    loss = sharded_losses(
        op, head, target.reshape(-1), options, 1, reduction, label_smoothing, z_loss,
        checked_token_weight(op, token_weight, target), class_weight,
    )  # fmt: skip
    if check == "sync":
        flags.check_flags()
    return loss.reshape(target.shape) if reduction == "none" else loss.sum(dtype=torch.float64).to(loss.dtype)


def token_options(
    op: str,
    head: ShardedHead,
    target: Tensor,
    shape: tuple[int, ...],
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int,
    check: str,
) -> LogitOptions:
    """The options of the logits, after a look at them and at target, whose labels out of range are reported. shape: of
    the tokens."""
    checks.tensor(op, "target", target, (torch.int64,))
    checks.shape(op, "target", target, shape, "hidden's shape without D, of all tokens")
    checks.same_device(op, hidden=head.hidden, target=target)
    check_options(op, softcap, ignore_index, check)
    scalar, rows = row_temperature(op, temperature, target)
    rows = kept_temperature(rows, target, ignore_index)
    head.report_outside(op, "target", target.reshape(-1), ignore_index)
    return LogitOptions(ignore_index, scalar, float(softcap or 0.0), rows)


def checked_token_weight(op: str, token_weight: Tensor | None, target: Tensor) -> Tensor | None:
    """(N,), or None."""
    if token_weight is None:
        return None
    check_weight(op, "token_weight", token_weight, target.shape, "target's shape", target.device)
    return token_weight.reshape(-1)


def sharded_losses(
    op: str,
    head: ShardedHead,
    target: Tensor,
    options: LogitOptions,
    num_heads: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    token_weight: Tensor | None,
    class_weight: Tensor | None,
) -> Tensor:
    """(H·N,): the loss of each row, with reduction "mean" over its head's sum of weights; num_heads heads one after the
    other, as token_weight is. target, and the options' temperatures: a token's heads side by side, as the head's rows
    are.
    """

    def by_head(rows: Tensor) -> Tensor:
        return rows.reshape(-1, num_heads).t().reshape(-1)

    vocab, dtype = head.shard.size, result_dtype(head.hidden)
    if class_weight is not None:
        check_weight(op, "class_weight", class_weight, (vocab,), "(shard.size,)", head.hidden.device)
        class_weight = class_weight.detach().to(dtype)
    words = by_head(target)
    kept = words != options.ignore_index
    weights = row_weights(
        head.hidden, words, kept, vocab, num_heads, reduction, label_smoothing, z_loss, token_weight, class_weight
    )
    own = None if class_weight is None else class_weight[head.shard.start :][: head.num_words]
    logprob, _, lse, total = sharded_rows(head, target, options, False, weights.uniform is not None, own)
    loss = weights.rows(by_head(logprob), by_head(lse))
    if weights.uniform is not None and total is not None:
        temperature = options.temperature if options.row_temperature is None else options.row_temperature
        loss = loss - weights.uniform * by_head(total / vocab / temperature)
    return loss


def sharded_rows(
    head: ShardedHead,
    target: Tensor,
    options: LogitOptions,
    with_entropy: bool,
    with_total: bool = False,
    class_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """logprob, entropy, lse and total (N,), differentiable; entropy and total are None where they are not wanted.

    total: Σ_j of the plain logits over the whole vocabulary, each times its class weight; class_weight: of this rank's
    words.
    """
    logprob, entropy, lse, total = _Rows.apply(
        head.hidden, head.weight, head.bias, target, class_weight, options, head, with_entropy, with_total
    )
    return logprob, entropy if with_entropy else None, lse, total if with_total else None


class _Rows(torch.autograd.Function):
    """The shard's parts, gathered and merged; backward on the shard, d_hidden summed over the group."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, classes, options, head, with_entropy, with_total):  # type: ignore[no-untyped-def]
        hidden = head.all_hidden(hidden)
        local = head.local(target, options.ignore_index)
        numbers = _parts(head, hidden, weight, bias, local, options, with_entropy)
        if with_total:
            word, offset = _summed_word(weight, bias, classes, numbers.dtype)
            rows = kept_rows(hidden, local, IGNORED)
            numbers = torch.cat((numbers, ((rows * word).sum(1, dtype=numbers.dtype) + offset)[:, None]), 1)
        gathered = head.of_ranks(numbers)
        logprob, entropy, lse, normalizer = merge_parts(gathered[..., :4], target, options, with_entropy)
        outside = head.outside(target, options.ignore_index)
        logprob, lse = (torch.where(outside, torch.nan, result) for result in (logprob, lse))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            hidden, weight, local, bias, options.row_temperature, logprob, entropy, normalizer, classes
        )
        ctx.options, ctx.head, ctx.with_entropy = options, head, with_entropy
        return logprob, entropy, lse, gathered[..., 4].sum(0) if with_total else logprob[:0].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_logprob, d_entropy, d_lse, d_total):  # type: ignore[no-untyped-def]
        hidden, weight, local, bias, rows, *saved, classes = ctx.saved_tensors
        options, head = ctx.options, ctx.head
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2]]
        grads = [torch.zeros_like(hidden), torch.zeros_like(weight), torch.zeros_like(weight[:, 0])]
        if weight.shape[0] and not (d_logprob is None and d_entropy is None and d_lse is None):
            grads = torch.ops.fusedce.linear_logprob_backward(
                d_logprob, d_entropy if ctx.with_entropy else None, d_lse, hidden, weight, local, bias, rows, *saved,
                IGNORED, options.temperature, options.softcap, mask, head.backend,
            )  # fmt: skip
        d_hidden, d_weight, d_bias = grads
        if d_total is not None and d_total.numel():
            # The gradient of each word's sum of logits, which knows no temperature.
            d_word = d_total @ kept_rows(hidden, local, IGNORED).to(d_total.dtype)
            d_total_sum = d_total.sum()
            if mask[0]:
                word, _ = _summed_word(weight, None, classes, d_total.dtype)
                d_hidden = d_hidden.to(d_total.dtype) + d_total[:, None] * word
            if mask[1]:
                d_weight = d_weight.add_(d_word if classes is None else classes[:, None] * d_word)
            if mask[2]:
                d_bias = d_bias.add_(d_total_sum if classes is None else classes * d_total_sum)
        if mask[0]:
            d_hidden = head.summed(d_hidden, hidden.dtype)
        given = (g if wanted else None for g, wanted in zip((d_hidden, d_weight, d_bias), mask, strict=True))
        return *given, None, None, None, None, None, None


def _summed_word(
    weight: Tensor, bias: Tensor | None, class_weight: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | float]:
    """Σ_j of weight's rows (D,) and of the bias, each times its class weight."""
    if class_weight is None:
        return weight.sum(0, dtype=dtype), 0.0 if bias is None else bias.sum(dtype=dtype)
    word = (class_weight[:, None] * weight).sum(0, dtype=dtype)
    return word, 0.0 if bias is None else (class_weight * bias).sum(dtype=dtype)


def _parts(
    head: ShardedHead,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    local: Tensor,
    options: LogitOptions,
    with_entropy: bool,
) -> Tensor:
    """(N,4) of the shard; of no words where it is padding alone."""
    if weight.shape[0] == 0:
        nothing = torch.zeros(len(local), 4, dtype=result_dtype(hidden), device=hidden.device)
        nothing[:, ::3] = -torch.inf
        return nothing
    return torch.ops.fusedce.linear_parts(
        hidden, weight, local, bias, options.row_temperature, ignore_index=IGNORED, temperature=options.temperature,
        softcap=options.softcap, with_entropy=with_entropy, backend=head.backend,
    )  # fmt: skip
