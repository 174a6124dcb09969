"""The head with its vocabulary sharded over a tensor-parallel group: each rank makes the logits of its own words only.

A rank reduces its words to four numbers a token (`fusedce.rows.merge_parts`), the ranks gather them, 16 bytes a token
and rank, and each has every token's log-prob. The backward runs on the shard with the whole vocabulary's normalizer;
d_hidden is summed over the ranks.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce import checks
from fusedce.distributed.collectives import all_gather, local_part, reduce_scatter
from fusedce.functional import LogProb
from fusedce.functional.autocast import autocast
from fusedce.functional.operands import check_options, check_weight, head_operands, kept_temperature, row_temperature
from fusedce.ops import registry
from fusedce.ops.outside import report_outside
from fusedce.options import LogitOptions
from fusedce.rows import merge_parts

# In place of a row of the shard's weight; no caller's ignore_index, which may be a word's number, plays a part.
ELSEWHERE, IGNORED = -1, -2

__all__ = ["VocabShard", "vocab_parallel_cross_entropy", "vocab_parallel_logprob"]


@dataclass(frozen=True)
class VocabShard:
    """Which words of the vocabulary a rank's weight holds: its row i is word start + i.

    size: words in the whole vocabulary. Rows whose word would be size or more are padding, which no token can be.
    """

    start: int
    size: int

    @classmethod
    def even(cls, rows: int, size: int, group: dist.ProcessGroup | None = None) -> "VocabShard":
        """For ranks that all hold `rows` rows, the last ones padded, in rank order: Megatron's and vLLM's layout."""
        return cls(dist.get_rank(group) * rows, size)

    def words(self, rows: int) -> int:
        """How many of a weight's rows are words."""
        return max(min(self.size - self.start, rows), 0)


def vocab_parallel_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    shard: VocabShard,
    *,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    with_entropy: bool = True,
    sequence_parallel: bool = False,
    backend: str = "auto",
) -> LogProb:
    """`fusedce.linear_logprob` with the vocabulary sharded over `group`.

    Args:
        hidden: (..., D), the same on every rank of the group; with sequence_parallel (N / ranks, D), rank r's tokens
            being the r-th part.
        weight: (V_r, D) this rank's words; V_r may differ from rank to rank, and may hold padding. A DTensor sharded on
            dim 0 over the group is taken for its local part.
        target: (...) int64 words of the whole vocabulary, the same on every rank, of all tokens.
        shard: which words `weight` holds.
        group: the tensor-parallel group; None for all ranks.
        bias: (V_r,) or None.
        sequence_parallel: whether each rank brings only its part of the tokens. They are gathered, and d_hidden is
            reduced and scattered.
        temperature, softcap, ignore_index, with_entropy, backend: as in `linear_logprob`.

    Returns:
        `LogProb`, of target's shape, the same bits on every rank. Each rank is to differentiate the same loss of them;
        hidden's gradient is then the whole one (with sequence_parallel its part), weight's and bias's are the shard's.

    Raises: as `linear_logprob`; a target outside [0, shard.size) is reported on every rank.

    Memory: as `linear_logprob` of the shard, 16·N bytes a rank, and with sequence_parallel all hidden states. One
    all-gather in the forward, one all-reduce (or reduce-scatter) of d_hidden in the backward. Deterministic as far as
    the collectives are.
    """
    op = "vocab_parallel_logprob"
    weight = local_part(weight)
    bias = None if bias is None else local_part(bias)
    ranks = dist.get_world_size(group) if sequence_parallel else 1
    # The shapes are checked as if all tokens were here.
    like_whole = hidden.expand(ranks, *hidden.shape).reshape(-1, hidden.shape[-1]) if ranks > 1 else hidden
    _, weight, bias = head_operands(op, ("hidden", "weight", "bias"), like_whole, weight, target, bias, None)
    check_options(op, softcap, ignore_index, "auto")
    scalar, rows = row_temperature(op, temperature, target)
    rows = kept_temperature(rows, target, ignore_index)
    choice = registry.choose("linear_parts", backend, hidden.device, hidden.dtype)
    report_outside(choice, "target", target.reshape(-1), shard.size, ignore_index, op)
    words = shard.words(weight.shape[0])
    results = _Logprob.apply(
        autocast(hidden)[0].reshape(-1, hidden.shape[-1]), weight[:words], target.reshape(-1),
        None if bias is None else bias[:words], LogitOptions(ignore_index, scalar, float(softcap or 0.0), rows),
        _Parallel(shard, group, sequence_parallel, backend), with_entropy,
    )  # fmt: skip
    logprob, entropy, lse = results
    shape = target.shape
    return LogProb(logprob.reshape(shape), entropy.reshape(shape) if with_entropy else None, lse.reshape(shape))


def vocab_parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    shard: VocabShard,
    *,
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    token_weight: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    sequence_parallel: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Cross-entropy with the vocabulary sharded over `group`; arguments as in `vocab_parallel_logprob`.

    Args:
        reduction: "none", "mean" (over the tokens that count, by their weights) or "sum".
        token_weight: target's shape, a factor for each token's loss, or None; no gradient flows into it.

    Returns:
        The loss in fp32, target's shape for "none", else (); the same bits on every rank. No token that counts: 0, with
        zero gradients.

    Raises, memory, determinism: see `vocab_parallel_logprob`.
    """
    op = "vocab_parallel_cross_entropy"
    checks.one_of(op, "reduction", reduction, ("none", "mean", "sum"))
    logprob = vocab_parallel_logprob(
        hidden, weight, target, shard, group=group, bias=bias, temperature=temperature, softcap=softcap,
        ignore_index=ignore_index, with_entropy=False, sequence_parallel=sequence_parallel, backend=backend,
    ).logprob  # fmt: skip
    counts = (target != ignore_index).to(logprob.dtype)
    if token_weight is not None:
        check_weight(op, "token_weight", token_weight, target.shape, "target's shape", target.device)
        counts = torch.where(target != ignore_index, token_weight.detach().to(logprob.dtype), 0.0)
    loss = -counts * logprob
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    total = counts.sum()
    return loss.sum() / torch.where(total == 0, 1.0, total)


class _Logprob(torch.autograd.Function):
    """The shard's parts, gathered and merged; backward on the shard, d_hidden summed over the group."""

    @staticmethod
    def forward(ctx, hidden, weight, target, bias, options, parallel, with_entropy):  # type: ignore[no-untyped-def]
        group = parallel.group
        if parallel.sequence:
            hidden = _gathered(hidden.contiguous(), group)
        local = parallel.local_target(target, weight.shape[0], options.ignore_index)
        parts = _parts(hidden, weight, local, bias, options, with_entropy, parallel.backend)
        gathered = _gathered(parts, group).view(dist.get_world_size(group), *parts.shape)
        logprob, entropy, lse, normalizer = merge_parts(gathered, target, options, with_entropy)
        outside = (target != options.ignore_index) & ((target < 0) | (target >= parallel.shard.size))
        logprob, lse = (torch.where(outside, torch.nan, result) for result in (logprob, lse))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, local, bias, options.row_temperature, logprob, entropy, normalizer)
        ctx.options, ctx.parallel, ctx.with_entropy = options, parallel, with_entropy
        return logprob, entropy, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_logprob, d_entropy, d_lse):  # type: ignore[no-untyped-def]
        hidden, weight, local, bias, rows, *saved = ctx.saved_tensors
        options, parallel = ctx.options, ctx.parallel
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[3]]
        d_hidden, d_weight, d_bias = torch.zeros_like(hidden), torch.zeros_like(weight), weight.new_zeros(0)
        if weight.shape[0]:
            d_hidden, d_weight, d_bias = torch.ops.fusedce.linear_logprob_backward(
                d_logprob, d_entropy if ctx.with_entropy else None, d_lse, hidden, weight, local, bias, rows, *saved,
                IGNORED, options.temperature, options.softcap, mask, parallel.backend,
            )  # fmt: skip
        if mask[0]:
            d_hidden = parallel.summed(d_hidden)
        grads = [g if wanted else None for g, wanted in zip((d_hidden, d_weight, d_bias), mask, strict=True)]
        return grads[0], grads[1], None, grads[2], None, None, None


@dataclass(frozen=True)
class _Parallel:
    """How the ranks share the work. sequence: each brings its part of the tokens."""

    shard: VocabShard
    group: dist.ProcessGroup | None
    sequence: bool
    backend: str

    def local_target(self, target: Tensor, words: int, ignore_index: int) -> Tensor:
        """Each token's target as a row of this rank's weight, ELSEWHERE or IGNORED."""
        local = target - self.shard.start
        local = torch.where((local >= 0) & (local < words), local, ELSEWHERE)
        return torch.where(target == ignore_index, IGNORED, local)

    def summed(self, d_hidden: Tensor) -> Tensor:
        """The ranks' gradients of the same hidden states, summed: whole, or this rank's part of the tokens."""
        # In fp32: the ranks' parts cancel, and a sum in 16 bits would round what is left.
        total = d_hidden.float() if d_hidden.element_size() == 2 else d_hidden
        if self.sequence:
            part = total.new_empty((total.shape[0] // dist.get_world_size(self.group), total.shape[1]))
            reduce_scatter(part, total, group=self.group)
            total = part
        else:
            dist.all_reduce(total, group=self.group)
        return total.to(d_hidden.dtype)


def _gathered(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The ranks' rows, one after the other."""
    whole = part.new_empty((dist.get_world_size(group) * part.shape[0], part.shape[1]))
    all_gather(whole, part, group=group)
    return whole


def _parts(
    hidden: Tensor,
    weight: Tensor,
    local: Tensor,
    bias: Tensor | None,
    options: LogitOptions,
    with_entropy: bool,
    backend: str,
) -> Tensor:
    """(N,4) of the shard; of no words where it is padding alone."""
    if weight.shape[0] == 0:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        return torch.tensor([-torch.inf, 0.0, 0.0, -torch.inf], dtype=dtype, device=hidden.device).repeat(len(local), 1)
    return torch.ops.fusedce.linear_parts(
        hidden, weight, local, bias, options.row_temperature, ignore_index=IGNORED, temperature=options.temperature,
        softcap=options.softcap, with_entropy=with_entropy, backend=backend,
    )  # fmt: skip
