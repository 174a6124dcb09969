"""Which words of the vocabulary a rank's weight holds, and what crosses between the ranks: the head's operands as the
functions of `vocab_parallel` take them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fusedce import checks
from fusedce.distributed.collectives import all_gather, reduce_scatter
from fusedce.functional.autocast import autocast
from fusedce.functional.operands import head_weights
from fusedce.ops import registry
from fusedce.ops.outside import report_outside

# In place of a row of the shard's weight; no caller's ignore_index, which may be a word's number, plays a part.
ELSEWHERE, IGNORED = -1, -2


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


@dataclass(frozen=True)
class ShardedHead:
    """The checked operands of a rank's logits, its words alone, and how the ranks share the work.

    hidden: (N, D), or with `sequence` this rank's (N / ranks, D).
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    shard: VocabShard
    group: dist.ProcessGroup | None
    sequence: bool
    backend: str

    @property
    def num_words(self) -> int:
        return self.weight.shape[0]

    def local(self, words: Tensor, ignore_index: int) -> Tensor:
        """Words of the whole vocabulary as rows of this rank's weight, ELSEWHERE or IGNORED."""
        rows = words - self.shard.start
        rows = torch.where((rows >= 0) & (rows < self.num_words), rows, ELSEWHERE)
        return torch.where(words == ignore_index, IGNORED, rows)

    def outside(self, words: Tensor, ignore_index: int) -> Tensor:
        """Which of them are no words of the whole vocabulary, nor ignored."""
        return (words != ignore_index) & ((words < 0) | (words >= self.shard.size))

    def report_outside(self, op: str, argument: str, words: Tensor, ignore_index: int) -> None:
        """Report the first of them (N,), as every op does."""
        choice = registry.choose("linear_parts", self.backend, self.hidden.device, self.hidden.dtype)
        report_outside(choice, argument, words, self.shard.size, ignore_index, op)

    def all_hidden(self, hidden: Tensor) -> Tensor:
        """The hidden states of all tokens; hidden: this rank's, inside an autograd function."""
        return self.gathered(hidden.contiguous()) if self.sequence else hidden

    def gathered(self, part: Tensor) -> Tensor:
        """The ranks' rows, one after the other."""
        whole = part.new_empty((dist.get_world_size(self.group) * part.shape[0], part.shape[1]))
        all_gather(whole, part, group=self.group)
        return whole

    def of_ranks(self, numbers: Tensor) -> Tensor:
        """(ranks, N, …): every rank's numbers of each token."""
        return self.gathered(numbers).view(dist.get_world_size(self.group), *numbers.shape)

    def summed(self, d_hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """The ranks' gradients of the same hidden states, summed: whole, or this rank's part of the tokens."""
        # In fp32: the ranks' parts cancel, and a sum in 16 bits would round what is left.
        total = d_hidden.float() if d_hidden.element_size() == 2 else d_hidden
        if self.sequence:
            part = total.new_empty((total.shape[0] // dist.get_world_size(self.group), total.shape[1]))
            reduce_scatter(part, total, group=self.group)
            total = part
        else:
            dist.all_reduce(total, group=self.group)
        return total.to(dtype)


def sharded_head(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shard: VocabShard | None,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    backend: str,
) -> tuple[ShardedHead, tuple[int, ...]]:
    """The head, and the shape of its tokens: hidden's without D, of all ranks with sequence_parallel.

    A DTensor over a mesh of one dimension is taken for this rank's words, and says which they are where shard and group
    are None: Shard(0), or Replicate, of which each rank takes its even part; its gradient is then whole on every rank.
    """
    checks.tensor(op, "hidden", hidden, checks.FLOATS)
    is_spread = checks.is_distributed(weight)
    if not is_spread:
        checks.tensor(op, "weight", weight, checks.FLOATS)
    if shard is not None and not isinstance(shard, VocabShard):
        raise TypeError(checks.wrong(op, "shard", shard, "a VocabShard"))
    # On every rank, also one without words, which would run nothing and wait for the others.
    registry.choose("linear_parts", backend, hidden.device, hidden.dtype)
    if is_spread:
        weight, bias, shard, group = _of_dtensors(op, weight, bias, shard, group)
    elif shard is None:
        raise ValueError(f"fusedce.{op}: argument 'shard' is None; expected a VocabShard, or a DTensor as 'weight'")
    if bias is not None and checks.is_distributed(bias):
        raise TypeError(f"fusedce.{op}: argument 'bias' is a DTensor, and 'weight' is not; expected both alike")
    if sequence_parallel and hidden.dim() != 2:
        raise ValueError(
            f"fusedce.{op}: argument 'hidden' has shape {tuple(hidden.shape)}; expected (N / ranks, D) with "
            "'sequence_parallel'"
        )
    if weight.dim() == 2 and not weight.shape[0]:
        # A DTensor's rank without rows: one that is no word, so that what is checked has a size.
        weight, bias = F.pad(weight, (0, 0, 0, 1)), None if bias is None else F.pad(bias, (0, 1))
    _, weight, bias = head_weights(op, ("hidden", "weight", "bias"), hidden, weight, bias, None)
    words = shard.words(weight.shape[0])
    flat = autocast(hidden)[0].reshape(-1, hidden.shape[-1])
    cut = weight[:words], None if bias is None else bias[:words]
    shape = tuple(hidden.shape[:-1])
    if sequence_parallel:
        shape = (dist.get_world_size(group) * hidden.shape[0],)
    return ShardedHead(flat, *cut, shard, group, sequence_parallel, backend), shape


def _of_dtensors(
    op: str, weight: Tensor, bias: Tensor | None, shard: VocabShard | None, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor | None, VocabShard, dist.ProcessGroup]:
    mesh, placements = weight.device_mesh, weight.placements  # type: ignore[attr-defined]
    is_cut = len(placements) == 1 and placements[0].is_shard(0)
    if not is_cut and not (len(placements) == 1 and placements[0].is_replicate()):
        raise TypeError(
            f"fusedce.{op}: argument 'weight' is a DTensor with placements {placements}; expected one, Shard(0) or "
            "Replicate()"
        )
    own = mesh.get_group()
    if group is not None and group != own:
        raise ValueError(f"fusedce.{op}: arguments 'group' and 'weight' do not go together: its mesh has another group")
    rows = -(-weight.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * rows, weight.shape[0])
    if shard is not None and is_cut and (shard.start, shard.size <= weight.shape[0]) != (start, True):
        raise ValueError(
            f"fusedce.{op}: arguments 'shard' and 'weight' do not go together: {shard}, and the DTensor's rows "
            f"begin at {start} of {weight.shape[0]}"
        )
    if shard is not None and not is_cut and shard.start:
        raise ValueError(
            f"fusedce.{op}: arguments 'shard' and 'weight' do not go together: {shard}, and the DTensor has every row"
        )
    size = weight.shape[0] if shard is None else shard.size
    if bias is not None and not is_cut and not checks.is_distributed(bias):
        raise TypeError(f"fusedce.{op}: argument 'bias' is no DTensor, and 'weight' is; expected both alike")
    if bias is not None and checks.is_distributed(bias) and bias.placements != placements:  # type: ignore[attr-defined]
        raise TypeError(
            f"fusedce.{op}: argument 'bias' is a DTensor with placements {bias.placements}; "  # type: ignore[attr-defined]
            f"expected weight's, {placements}"
        )

    def part(tensor: Tensor) -> Tensor:
        local = tensor.to_local() if checks.is_distributed(tensor) else tensor  # type: ignore[attr-defined]
        return local if is_cut else _Part.apply(local, start, start + rows, own)

    return part(weight), None if bias is None else part(bias), VocabShard(start, size), own


class _Part(torch.autograd.Function):
    """Rows of a tensor that every rank has whole; the ranks' parts of its gradient are put together again."""

    @staticmethod
    def forward(ctx, whole, start, stop, group):  # type: ignore[no-untyped-def]
        ctx.shape, ctx.rows, ctx.group = whole.shape, slice(start, stop), group
        return whole[start:stop].clone()

    @staticmethod
    def backward(ctx, d_part):  # type: ignore[no-untyped-def]
        whole = d_part.new_zeros(ctx.shape)
        whole[ctx.rows] = d_part
        # The parts do not overlap, so their sum is exact in any dtype.
        dist.all_reduce(whole, group=ctx.group)
        return whole, None, None, None
