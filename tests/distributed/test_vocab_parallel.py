"""The vocabulary over 1, 2 and 4 ranks against one rank: values and every gradient."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedce
from fusedce.distributed import VocabShard, vocab_parallel_cross_entropy, vocab_parallel_logprob
from tests.distributed.processes import run
from tests.linear_ce_cases import IGNORE, Case, in_fp64, plain, upstream, with_gradients
from tests.paired import assert_close

NAMES = ("logprob", "entropy", "lse", "d_hidden", "d_weight", "d_bias")
CASES = [
    Case(24, 40, 8),
    Case(24, 40, 8, has_bias=True),
    Case(24, 41, 8, torch.bfloat16, has_bias=True, temperature=0.7),
    Case(20, 33, 5, softcap=3.0),
    Case(0, 9, 4),
]


@dataclass(frozen=True)
class Layout:
    """How V words lie on the ranks: the row where each rank's weight begins, and padding behind the words."""

    starts: tuple[int, ...]
    padding: int

    def part(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a whole (V, …) tensor, padded with NaN, which must never count."""
        rank = dist.get_rank()
        padding = tensor.new_full((self.padding, *tensor.shape[1:]), math.nan)
        whole = torch.cat((tensor, padding))
        end = self.starts[rank + 1] if rank + 1 < len(self.starts) else len(whole)
        return whole[self.starts[rank] : end].clone()


def layouts(vocab: int) -> list[Layout]:
    """Even, uneven, and with a rank that has padding alone."""
    ranks = dist.get_world_size()
    rows = -(-vocab // ranks)
    even = Layout(tuple(rank * rows for rank in range(ranks)), rows * ranks - vocab)
    if ranks == 1:
        return [even, Layout((0,), 5)]
    uneven = Layout((0, *(min(3 + 2 * rank, vocab) for rank in range(ranks - 1))), 3)
    empty = Layout((*(rank * (vocab // (ranks - 1)) for rank in range(ranks - 1)), vocab), 4)
    return [even, uneven, empty]


def check_rank(device: str) -> None:
    """All cases and layouts on this rank, against plain torch in fp64 over the whole vocabulary."""
    for case in CASES:
        for layout in layouts(case.vocab):
            for sequence_parallel in (False, True):
                check(case, layout, sequence_parallel, device)
        check_loss(case, device)


def check(case: Case, layout: Layout, sequence_parallel: bool, device: str) -> None:
    """Log-prob, entropy and lse, each with an upstream gradient of its own."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tensors = case.inputs(device)
    grads = [upstream(case.num_rows, "random", device).roll(at) for at in range(3)]
    shard = VocabShard(layout.starts[rank], case.vocab)
    rows = (
        slice(rank * case.num_rows // ranks, (rank + 1) * case.num_rows // ranks) if sequence_parallel else slice(None)
    )
    target = tensors[2]

    def parallel(hidden: Tensor, weight: Tensor, bias: Tensor | None = None):  # type: ignore[no-untyped-def]
        return vocab_parallel_logprob(
            hidden, weight, target, shard, bias=bias, temperature=case.temperature, softcap=case.softcap,
            sequence_parallel=sequence_parallel,
        )  # fmt: skip

    local = [tensors[0][rows], layout.part(tensors[1])]
    local += [] if tensors[3] is None else [layout.part(tensors[3])]
    out = with_gradients(parallel, local, grads)
    twin = with_gradients(lambda *t: plain(case, *t), tensors, grads)
    gold = with_gradients(lambda *t: plain(case, *t), in_fp64(tensors), [g.cpu().double() for g in grads])
    for results in (twin, gold):
        results[3] = results[3][rows]
        # Padding has no gradient.
        results[4:] = [torch.nan_to_num(layout.part(grad)) for grad in results[4:]]
    for name, o, g, t in zip(NAMES, out, gold, twin, strict=False):
        assert_close(o, g, t, f"{case} {layout} {name}")


def check_loss(case: Case, device: str) -> None:
    """The mean loss and its gradients; all ranks have the same bits."""
    hidden, weight, target, _ = case.inputs(device)
    layout = layouts(case.vocab)[0]
    part = layout.part(weight)
    shard = VocabShard.even(len(part), case.vocab)
    assert shard.start == layout.starts[dist.get_rank()]
    loss = vocab_parallel_cross_entropy(hidden.requires_grad_(), part.requires_grad_(), target, shard)
    loss.backward()
    one = fusedce.linear_cross_entropy(hidden.detach(), weight, target)
    torch.testing.assert_close(loss, one.to(loss.dtype), rtol=1e-5, atol=1e-6)
    everyone = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, loss.detach())
    assert all(torch.equal(loss, other) for other in everyone)


def check_bad_label(device: str) -> None:
    """A label of no word is told on every rank, and the next call works; a word's number may be ignore_index."""
    hidden, weight, target, _ = Case(8, 12, 4, every_ignored=0).inputs(device)
    rank, rows = dist.get_rank(), 12 // dist.get_world_size()
    part, shard = weight[rank * rows : (rank + 1) * rows], VocabShard.even(rows, 11)
    wrong = target.clamp(max=10)
    wrong[5] = 11
    with pytest.raises(ValueError, match=r"the value 11 at row 5; expected \[0, 11\)"):
        vocab_parallel_logprob(hidden, part, wrong, shard)
    for ignored in (4, -1, -2):
        mine = target.clamp(max=10)
        mine[2] = ignored
        out = vocab_parallel_logprob(hidden, part, mine, shard, ignore_index=ignored)
        one = fusedce.linear_logprob(hidden, weight[:11], mine, ignore_index=ignored)
        for o, e in zip(out, one, strict=True):
            torch.testing.assert_close(o, e, rtol=1e-5, atol=1e-6)
        assert out.logprob[2] == 0.0 and IGNORE not in mine


def check_dtensor(device: str) -> None:
    """A weight sharded on its words as a DTensor gets its gradient as one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    hidden, weight, target, _ = Case(9, 12, 4).inputs(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    sharded = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    shard = VocabShard.even(sharded.to_local().shape[0], 12)
    loss = vocab_parallel_cross_entropy(hidden, sharded, target, shard, group=mesh.get_group(), reduction="sum")
    (grad,) = torch.autograd.grad(loss, sharded)
    one = torch.autograd.grad(
        fusedce.linear_cross_entropy(hidden, weight.requires_grad_(), target, reduction="sum"), weight
    )[0]
    torch.testing.assert_close(grad.full_tensor(), one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_agree_with_one(num_ranks: int) -> None:
    run(__name__, "check_rank", num_ranks)


@pytest.mark.multigpu
def test_two_gpus_agree_with_one() -> None:
    for function in ("check_rank", "check_dtensor"):
        run(__name__, function, 2, "cuda")


def test_bad_labels_are_told_on_every_rank() -> None:
    run(__name__, "check_bad_label", 2)


def test_a_sharded_dtensor_is_taken_for_its_part() -> None:
    run(__name__, "check_dtensor", 2)
