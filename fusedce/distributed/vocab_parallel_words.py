"""Single words of the sharded head: each token's greedy one, and log-probs of several."""

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce import checks, flags
from fusedce.chunked import row_chunks
from fusedce.distributed.vocab_shard import ELSEWHERE, IGNORED, ShardedHead, VocabShard, sharded_head
from fusedce.functional.operands import check_options, row_temperature
from fusedce.ops.linear_logprob import result_dtype
from fusedce.options import LogitOptions
from fusedce.rows import Selection

__all__ = ["vocab_parallel_argmax", "vocab_parallel_logprob_of"]


def vocab_parallel_argmax(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabShard | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    target: Tensor | None = None,
    ignore_index: int = -100,
    sequence_parallel: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`fusedce.linear_argmax` with the vocabulary sharded over `group`.

    Args:
        hidden, weight, shard, group, bias, sequence_parallel: as in `vocab_parallel_logprob`.
        target, ignore_index, backend: as in `linear_argmax`; target of all tokens.

    Returns:
        int64 words of the whole vocabulary, of hidden's shape without D, with sequence_parallel (N,) of all tokens; the
        same on every rank. −1 for a token with NaN or +inf among its logits. Of equal logits, the lowest word.

    Raises: as `linear_argmax`.

    Memory: as `linear_argmax` of the shard, 16·N bytes a rank, and a chunk of the greedy words' rows of weight in fp32,
    within FUSEDCE_WORKSPACE_MB. One all-gather of 16 bytes a token. Deterministic. Ranks compare their words by a dot
    product in fp32: of two logits within its rounding either may be taken.
    """
    op = "vocab_parallel_argmax"
    head, shape = sharded_head(op, hidden, weight, bias, shard, group, sequence_parallel, backend)
    check_options(op, None, ignore_index, "auto")
    if target is not None:
        checks.tensor(op, "target", target, (torch.int64,))
        checks.shape(op, "target", target, shape, "hidden's shape without D, of all tokens")
        checks.same_device(op, hidden=hidden, target=target)
    with torch.no_grad():
        own = _greedy(head, head.all_hidden(head.hidden))
        logits, words = head.of_ranks(own).unbind(-1)
    most = logits.amax(0)
    first = torch.where(logits == most, words, float(head.shard.size)).amin(0).long()
    words = torch.where(most == torch.inf, -1, first).reshape(shape)
    return words if target is None else torch.where(target == ignore_index, -1, words)


def _greedy(head: ShardedHead, hidden: Tensor) -> Tensor:
    """(N,2) fp64, which holds words and fp32 logits exactly: this rank's greedy words and their logits, +inf for a row
    with NaN or +inf."""
    own = hidden.new_empty((hidden.shape[0], 2), dtype=torch.float64)
    own[:, 0], own[:, 1] = -torch.inf, float(head.shard.size)
    if not head.num_words:
        return own
    words = torch.ops.fusedce.linear_argmax(hidden, head.weight, head.bias, backend=head.backend)
    dtype, some = result_dtype(hidden), words.clamp(min=0)
    for start, stop in row_chunks(hidden.shape[0], 3 * dtype.itemsize * hidden.shape[1]):
        rows = head.weight[some[start:stop]].to(dtype)
        logits = (hidden[start:stop].to(dtype) * rows).sum(1)
        own[start:stop, 0] = logits if head.bias is None else logits + head.bias[some[start:stop]].to(dtype)
    own[:, 0] = torch.where(words < 0, torch.inf, own[:, 0])
    own[:, 1] = words + head.shard.start
    return own


def vocab_parallel_logprob_of(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    shard: VocabShard | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    sequence_parallel: bool = False,
    check: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """`fusedce.linear_logprob_of` with the vocabulary sharded over `group`.

    Args:
        hidden, weight, shard, group, bias, sequence_parallel: as in `vocab_parallel_logprob`.
        ids: (..., K) int64 words of the whole vocabulary or `ignore_index`, the same on every rank, of all tokens.
        temperature: a number, or a tensor of ids' shape without K.
        softcap, ignore_index, check, backend: as in `linear_logprob_of`.

    Returns:
        (..., K) fp32 (fp64 for fp64), the same bits on every rank; its gradients: as in `vocab_parallel_logprob`.

    Raises: as `linear_logprob_of`; an id outside [0, shard.size) is reported on every rank.

    Memory: as `linear_logprob_of` of the shard, and (8 + 4·K)·N bytes a rank. One all-gather of these in the forward,
    one all-reduce (or reduce-scatter) of d_hidden in the backward. Deterministic as far as the collectives are.
    """
    op = "vocab_parallel_logprob_of"
    head, shape = sharded_head(op, hidden, weight, bias, shard, group, sequence_parallel, backend)
    checks.tensor(op, "ids", ids, (torch.int64,))
    checks.shape(op, "ids", ids, (*shape, None), "hidden's shape with K for D, of all tokens")
    checks.positive(op, K=ids.shape[-1])
    checks.same_device(op, hidden=hidden, ids=ids)
    check_options(op, softcap, ignore_index, check)
    scalar, rows = row_temperature(op, temperature, ids[..., 0], "hidden's shape without D")
    flat = ids.reshape(-1, ids.shape[-1])
    if rows is not None:
        # Of a token that takes no part, any temperature will do.
        rows = torch.where((flat != ignore_index).any(1), rows, 1.0)
    head.report_outside(op, "ids", flat.reshape(-1), ignore_index)
    options = LogitOptions(ignore_index, scalar, float(softcap or 0.0), rows)
    logprob = _LogprobOf.apply(head.hidden, head.weight, head.bias, flat, options, head)
    if check == "sync":
        flags.check_flags()
    return logprob.reshape(ids.shape)


class _LogprobOf(torch.autograd.Function):
    """The shard's own log-probs and normalizers, gathered; a word's is its rank's, less what the others weigh."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, ids, options, head):  # type: ignore[no-untyped-def]
        hidden = head.all_hidden(hidden)
        ignored = ids == options.ignore_index
        local = head.local(ids, options.ignore_index)
        inside = local >= 0
        # Words of other ranks take no part, but where all are such, the row's normalizer is asked for all the same.
        slots = torch.where(inside, local, IGNORED)
        slots[:, 0] = torch.where(~inside.any(1) & ~ignored.all(1), 0, slots[:, 0])
        own, target, normalizer = _own(head, hidden, weight, bias, slots, options)
        gathered = head.of_ranks(torch.cat((normalizer, torch.where(inside, own, torch.inf)), 1))
        slope = Selection(ids, options, head.shard.size).slopes(own)[:, 0]
        merged, offsets = _merged(gathered[..., 0], gathered[..., 1], slope)
        # No log-prob is +inf: there the rank has no such word.
        values = torch.where(gathered[..., 2:] == torch.inf, torch.inf, gathered[..., 2:] + offsets[..., None]).amin(0)
        values = torch.where(head.outside(ids, options.ignore_index), torch.nan, values)
        values = torch.where(ignored, 0.0, values)
        # As every backend has it of a row that takes no part: shifted by +inf, its probabilities are 0.
        kept = ~ignored.all(1)
        normalizer = torch.stack((torch.where(kept, merged[:, 0], torch.inf), torch.where(kept, merged[:, 1], 0.0)), 1)
        own = torch.where(slots == IGNORED, 0.0, own + offsets[dist.get_rank(head.group)][:, None])
        ctx.save_for_backward(
            hidden, weight, slots, bias, options.row_temperature, own, target, normalizer, ids, inside
        )
        ctx.options, ctx.head = options, head
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_values):  # type: ignore[no-untyped-def]
        *saved, ids, inside = ctx.saved_tensors
        hidden, weight, _, bias, *_ = saved
        options, head = ctx.options, ctx.head
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2]]
        d_values = torch.where(ids == options.ignore_index, 0.0, d_values)
        d_values = torch.where(head.outside(ids, options.ignore_index), torch.nan, d_values)
        d_lse = -torch.where(inside, 0.0, d_values).sum(1)
        grads = (torch.zeros_like(hidden), torch.zeros_like(weight), torch.zeros_like(weight[:, 0]))
        if weight.shape[0]:
            grads = torch.ops.fusedce.linear_logprob_of_backward(
                torch.where(inside, d_values, 0.0), d_lse, *saved, IGNORED, options.temperature, options.softcap, mask,
                head.backend,
            )  # fmt: skip
        d_hidden, d_weight, d_bias = grads
        if mask[0]:
            d_hidden = head.summed(d_hidden, hidden.dtype)
        given = (g if wanted else None for g, wanted in zip((d_hidden, d_weight, d_bias), mask, strict=True))
        return *given, None, None, None


def _own(
    head: ShardedHead, hidden: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, options: LogitOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of every slot among this rank's words, target and normalizer; of no words where it is padding alone."""
    if weight.shape[0]:
        return torch.ops.fusedce.linear_logprob_of(
            hidden, weight, slots, bias, options.row_temperature, ignore_index=IGNORED,
            temperature=options.temperature, softcap=options.softcap, backend=head.backend,
        )  # fmt: skip
    nothing = torch.zeros(slots.shape[0], 2, dtype=result_dtype(hidden), device=hidden.device)
    nothing[:, 0] = -torch.inf
    return nothing[:, :1].expand(slots.shape), torch.full_like(slots[:, 0], ELSEWHERE), nothing


def _merged(maxima: Tensor, log_sums: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """The normalizer (N,2) of the whole vocabulary from the ranks' (P,N) each; and (P,N), the log of the probability
    that each rank's words have together. A certain word is its rank's maximum, so `most` is small there, and both keep
    their digits."""
    largest = maxima.amax(0)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    shares = torch.where(maxima == -torch.inf, -torch.inf, (maxima - largest) * slope + log_sums)
    most, rank = shares.max(0)
    is_most = torch.arange(len(shares), device=shares.device)[:, None] == rank
    others = torch.where(is_most, 0.0, (shares - most).exp()).sum(0)
    log_sum = most + others.log1p()
    return torch.stack((largest, log_sum), 1), shares - log_sum
