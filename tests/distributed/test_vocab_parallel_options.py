"""Every option of the head with its vocabulary over 1, 2 and 4 ranks, against plain torch over the whole vocabulary in
fp64: values and every gradient."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fusedce import distributed as ours
from fusedce.distributed import VocabShard
from tests import test_linear_logprob_of as selected
from tests.distributed.processes import run
from tests.distributed.test_vocab_parallel import Layout, layouts
from tests.distributed.vocab_refusals import check_refusals
from tests.linear_ce_cases import IGNORE, Case, in_fp64, plain, upstream, with_gradients
from tests.paired import assert_close
from tests.test_linear_ce_heads import FACTORS, Heads
from tests.test_linear_ce_loss import Loss, scalar_twin
from tests.test_policy_loss import clipped, numbers, with_bonus

BF16, FP32 = torch.bfloat16, torch.float32
SIZES = {"num_rows": 64, "vocab": 101, "depth": 24}
ALL = {"bias": True, "class_weight": True, "token_weight": True, "row_temperature": True, "z_loss": 0.01}
LOSSES = [
    Loss(**SIZES, dtype=FP32, label_smoothing=0.2),
    Loss(**SIZES, label_smoothing=0.2, class_weight=True, bias=True),
    Loss(**SIZES, z_loss=0.02, bias=True),
    Loss(**SIZES, softcap=3.0, reduction="none"),
    Loss(**SIZES, dtype=FP32, class_weight=True, reduction="sum"),
    Loss(**SIZES, dtype=FP32, shift=True, token_weight=True),
    Loss(**SIZES, **ALL, label_smoothing=0.3, reduction="none"),
    Loss(**SIZES, **ALL, dtype=FP32, label_smoothing=0.3, shift=True),
    Loss(**SIZES, **ALL, dtype=FP32, softcap=3.0),
]
HEADS = [
    Heads(FP32),
    Heads(BF16, shift=True, bias=True, token_weight=True),
    Heads(FP32, "sum", class_weight=True, row_temperature=True, label_smoothing=0.2, z_loss=0.01, token_weight=True),
]
WORDS = [Case(24, 40, 8), Case(24, 41, 8, BF16, has_bias=True, temperature=0.7), Case(24, 33, 5, softcap=3.0)]
NAMES = "{} d_hidden d_weight{}"
Run = Callable[..., list[Tensor]]


def compare(
    names: str, layout: Layout, sharded: Run, whole: Run, leaves: list[Tensor], grads: list[Tensor],
    tokens: tuple[slice, ...] = (), gold_of: Run | None = None, twin: Callable[[Tensor], Tensor] | None = None,
) -> None:  # fmt: skip
    """This rank's results and gradients against plain torch's over all words.

    leaves: hidden, weight and perhaps bias, whole. tokens: where this rank's hidden states lie; () for all of them.
    gold_of: `whole` with constants in fp64. twin: of a scalar result, from gold's.
    """
    local = [leaves[0][tokens].contiguous(), *(layout.part(t) for t in leaves[1:])]
    out = with_gradients(sharded, local, grads)
    bar = with_gradients(whole, leaves, grads)
    gold = with_gradients(gold_of or whole, in_fp64(leaves), [g.cpu().double() for g in grads])
    if twin is not None:
        bar[0] = twin(gold[0])
    first = len(out) - len(leaves)
    for results in (bar, gold):
        results[first] = results[first][tokens] if tokens else results[first]
    # All words of a gradient together: of three of them alone, the twin may be right by luck.
    out[first + 1 :] = [together(grad, layout, len(leaves[1])) for grad in out[first + 1 :]]
    for name, o, g, t in zip(names.split(), out, gold, bar, strict=True):
        assert_close(o, g, t, f"{layout} {tokens} {name}")
    everyone = [torch.empty_like(out[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, out[0].contiguous())
    assert all(torch.equal(out[0], other) for other in everyone), "every rank has the same bits"


def d_bias(leaves: list[Tensor]) -> str:
    return " d_bias" * (len(leaves) - 2)


def together(part: Tensor, layout: Layout, vocab: int) -> Tensor:
    """The ranks' parts of a gradient, one after the other, without padding, which must have none."""
    parts: list[Tensor] = [part] * dist.get_world_size()
    dist.all_gather_object(parts, part.cpu())
    whole = torch.cat(parts)
    assert len(whole) == vocab + layout.padding and not whole[vocab:].any()
    return whole[:vocab].to(part.device)


def shard_of(layout: Layout, vocab: int) -> VocabShard:
    return VocabShard(layout.starts[dist.get_rank()], vocab)


def own_tokens(count: int) -> slice:
    """This rank's part with sequence_parallel."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return slice(rank * count // ranks, (rank + 1) * count // ranks)


def turns(vocab: int) -> itertools.cycle:
    """Layouts and whether the sequence is parallel, one after the other, so that every few cases meet all of them."""
    return itertools.cycle(itertools.product(layouts(vocab), (True, False)))


def check_losses(device: str) -> None:
    """vocab_parallel_cross_entropy, each option alone and all together."""
    for case, (layout, sequence) in zip(LOSSES, turns(SIZES["vocab"]), strict=False):
        check_loss(case, layout, sequence and not case.shift, device)


def check_loss(case: Loss, layout: Layout, sequence: bool, device: str) -> None:
    """LC-A08: the first half of the tokens is ignored now and then; with sequence_parallel some ranks have none that
    counts."""
    *given, target, class_weight, token_weight, temperature = case.tensors(device)
    if case.z_loss:
        target[: case.num_rows // 2] = IGNORE
    leaves = [t for t in given if t is not None]
    constants, shape = (target, class_weight, token_weight, temperature), (2, -1) if case.shift else (-1,)

    def sharded(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        loss = ours.vocab_parallel_cross_entropy(
            hidden.reshape(*shape, case.depth), weight, target.reshape(shape), shard_of(layout, case.vocab),
            bias=bias, class_weight=class_weight if case.class_weight else None, reduction=case.reduction,
            label_smoothing=case.label_smoothing, z_loss=case.z_loss, softcap=case.softcap, shift=case.shift,
            token_weight=token_weight.reshape(shape) if case.token_weight else None,
            temperature=temperature.reshape(shape) if case.row_temperature else 1.3, sequence_parallel=sequence,
        )  # fmt: skip
        return [loss.reshape(-1) if case.reduction == "none" else loss]

    is_rows = case.reduction == "none"
    grad = upstream(case.num_rows, "random", device) if is_rows else torch.tensor(1.7, device=device)
    compare(
        NAMES.format("loss", d_bias(leaves)), layout, sharded, case.plain(constants), leaves, [grad],
        (own_tokens(case.num_rows),) if sequence else (), case.plain(tuple(in_fp64(constants))),
        None if is_rows else lambda gold: scalar_twin(case, leaves, constants, gold),
    )  # fmt: skip


def check_nothing_counts(device: str) -> None:
    """No token takes part: the loss is 0 and every gradient exactly 0, with hidden states of NaN."""
    layout, (hidden, weight, *_) = layouts(40)[0], Case(8, 40, 6).inputs(device)
    leaves = [torch.full_like(hidden, math.nan), layout.part(weight)]
    leaves = [t.requires_grad_() for t in leaves]
    target = torch.full((8,), IGNORE, device=device)
    loss = ours.vocab_parallel_cross_entropy(*leaves, target, shard_of(layout, 40), label_smoothing=0.1, z_loss=0.1)
    grads = torch.autograd.grad(loss, leaves)
    assert loss == 0.0 and not any(grad.any() for grad in grads)


def check_heads(device: str) -> None:
    """Several heads, by sequence and with the tokens over the ranks."""
    for case, (layout, _) in zip(HEADS, turns(90), strict=False):
        check_some_heads(case, layout, not case.shift, device)


def check_some_heads(case: Heads, layout: Layout, sequence: bool, device: str) -> None:
    """The loss of all heads together with its gradients, and each head's own."""
    leaves, constants = case.tensors(device)
    if sequence:  # one of 20 tokens, which 4 ranks divide
        leaves[0] = leaves[0].flatten(1, 2)[:, None, :20]
        target, class_weight, *others = constants
        constants = (target.flatten(1)[:, None, :20], class_weight, *(t.flatten(1)[:, None, :20] for t in others))
    target, class_weight, token_weight, temperature = constants

    def sharded(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        return list(
            ours.vocab_parallel_cross_entropy_heads(
                flat(hidden), weight, flat(target), shard_of(layout, 90), head_weight=FACTORS, shift=case.shift,
                class_weight=class_weight if case.class_weight else None, reduction=case.reduction, bias=bias,
                token_weight=flat(token_weight) if case.token_weight else None,
                temperature=flat(temperature) if case.row_temperature else 1.0, z_loss=case.z_loss,
                label_smoothing=case.label_smoothing, sequence_parallel=sequence,
            )
        )  # fmt: skip

    def flat(numbers: Tensor) -> Tensor:
        return numbers[:, 0] if sequence else numbers

    loss = torch.tensor(1.3, device=device)

    def differentiable(run: Run) -> Run:
        return lambda *t: [run(*t)[0]]

    tokens = (slice(None), slice(None), own_tokens(20)) if sequence else ()
    fp64 = case.plain(tuple(in_fp64(constants)))
    compare(
        NAMES.format("loss", d_bias(leaves)), layout, differentiable(sharded), differentiable(case.plain(constants)),
        leaves, [loss], tokens, differentiable(fp64),
    )  # fmt: skip
    found = sharded(leaves[0][tokens], *(layout.part(t) for t in leaves[1:]))[1]
    torch.testing.assert_close(found.double(), fp64(*in_fp64(leaves))[1], rtol=1e-2, atol=1e-3)


def check_policy(device: str) -> None:
    """The user's own loss, with and without the entropy."""
    for loss_fn, (layout, sequence) in zip((clipped, with_bonus, clipped, clipped), turns(40), strict=False):
        check_policy_loss(loss_fn, layout, sequence, device)


def check_policy_loss(loss_fn: Callable[..., Tensor], layout: Layout, sequence: bool, device: str) -> None:
    """Value and gradients."""
    case = Case(24, 40, 8)
    hidden, weight, target, _ = case.inputs(device)
    per_token, has_entropy = numbers(case, device), loss_fn is with_bonus

    def sharded(hidden: Tensor, weight: Tensor) -> list[Tensor]:
        return [
            ours.vocab_parallel_policy_loss(
                hidden, weight, target, loss_fn, *per_token, shard=shard_of(layout, 40), with_entropy=has_entropy,
                sequence_parallel=sequence,
            )
        ]  # fmt: skip

    def whole(hidden: Tensor, weight: Tensor) -> list[Tensor]:
        logprob, entropy, _ = plain(case, hidden, weight, target, None)
        rows = loss_fn(logprob, *((entropy,) if has_entropy else ()), *(t.to(logprob.dtype) for t in per_token))
        return [torch.where(target != IGNORE, rows, 0.0).sum()]

    tokens = (own_tokens(24),) if sequence else ()
    one = torch.ones((), device=device)
    compare("loss d_hidden d_weight", layout, sharded, whole, [hidden, weight], [one], tokens)


def check_several_words(device: str) -> None:
    """Log-probs of K words: of one rank, of several, some twice, some ignored, some rows wholly."""
    for case, slots in zip(WORDS, (5, 1, 3), strict=True):
        for layout, sequence in itertools.product(layouts(case.vocab), (False, True)):
            check_words(case, slots, layout, sequence, device)


def check_words(case: Case, slots: int, layout: Layout, sequence: bool, device: str) -> None:
    """Values and gradients."""
    hidden, weight, ids, bias = selected.draw(case, slots, device)
    leaves = [t for t in (hidden, weight, bias) if t is not None]
    grad = torch.randn(24, slots, generator=torch.Generator().manual_seed(9)).to(device)

    def sharded(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        return [
            ours.vocab_parallel_logprob_of(
                hidden, weight, ids, shard_of(layout, case.vocab), bias=bias, temperature=case.temperature,
                softcap=case.softcap, sequence_parallel=sequence,
            )
        ]  # fmt: skip

    def whole(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        return selected.plain(case, hidden, weight, ids, bias)

    tokens = (own_tokens(24),) if sequence else ()
    compare(NAMES.format("logprob", d_bias(leaves)), layout, sharded, whole, leaves, [grad], tokens)


def check_certain_words(device: str) -> None:
    """log p = −log(1 + rest) over the ranks: 10⁻⁹ is told by the rank that holds the certain word, and so is 1 − p."""
    gaps = torch.tensor([1.0, 5.0, 12.0, 20.0], device=device)
    layout, weight = layouts(8)[0], torch.tensor([[0.0]] * 7 + [[1.0]], device=device)
    hidden = gaps[:, None].clone().requires_grad_()
    ids = torch.tensor([[0, 7]], device=device).expand(4, 2)
    values = ours.vocab_parallel_logprob_of(hidden, layout.part(weight), ids, shard_of(layout, 8))
    rest = 7 * torch.exp(-gaps.double())
    torch.testing.assert_close(values[:, 1].double(), -rest.log1p(), rtol=1e-5, atol=0.0)
    (grad,) = torch.autograd.grad(values[:, 1].sum(), hidden)
    torch.testing.assert_close(grad[:, 0].double(), rest / (1 + rest), rtol=1e-5, atol=0.0)


def check_argmax(device: str) -> None:
    """The lowest of equal words over the ranks; NaN, infinities and ignored tokens as on one rank."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randint(-2, 3, (24, 4), generator=generator).float().to(device)
    weight = torch.randint(-2, 3, (50, 4), generator=generator).float().to(device)
    bias = torch.randint(-1, 2, (50,), generator=generator).float().to(device)
    target = torch.zeros(24, dtype=torch.int64, device=device)
    target[::5] = IGNORE
    for layout, sequence in itertools.product(layouts(50), (False, True)):
        logits = F.linear(hidden, weight, bias)
        expected = (logits == logits.amax(1, keepdim=True)).int().argmax(1)
        tokens, own, shard = own_tokens(24) if sequence else slice(None), layout.part(weight), shard_of(layout, 50)
        options = {"sequence_parallel": sequence}
        words = ours.vocab_parallel_argmax(hidden[tokens], own, shard, bias=layout.part(bias), **options)
        assert torch.equal(words, expected)
        kept = ours.vocab_parallel_argmax(hidden[tokens], own, shard, target=target, **options)
        alone = (hidden @ weight.t()).argmax(1)
        assert torch.equal(kept == -1, target == IGNORE) and (logits.shape[1] > kept).all()
        assert torch.equal((hidden @ weight.t()).gather(1, kept.clamp(min=0)[:, None])[kept >= 0, 0],
                           (hidden @ weight.t()).gather(1, alone[:, None])[kept >= 0, 0])  # fmt: skip
        spoiled, low = hidden.clone(), torch.full_like(bias, -math.inf)
        spoiled[3, 1] = math.nan
        words = ours.vocab_parallel_argmax(spoiled[tokens], own, shard, bias=layout.part(bias), **options)
        assert (words == torch.where(torch.arange(24, device=device) == 3, -1, expected)).all()
        assert not ours.vocab_parallel_argmax(hidden[tokens], own, shard, bias=layout.part(low), **options).any()
        low[7] = math.inf
        assert (ours.vocab_parallel_argmax(hidden[tokens], own, shard, bias=layout.part(low), **options) == -1).all()


def check_dtensors(device: str) -> None:
    """LC-A10, LC-A11: Shard(0), with a rank that has no row, and Replicate: each knows its words, and gets its gradient
    as it is. Other placements are refused (vocab_refusals)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    ranks = dist.get_world_size()
    mesh = init_device_mesh(device, (ranks,))
    hidden, weight, target, bias = Case(9, 3 if ranks == 4 else 13, 4, has_bias=True).inputs(device)
    ids = torch.stack((target, target.flip(0)), 1)
    for placement in (Shard(0), Replicate()):
        leaves = [distribute_tensor(t, mesh, [placement]).requires_grad_() for t in (weight, bias)]
        whole = [t.clone().requires_grad_() for t in (weight, bias)]
        losses = (
            lambda w, b: ours.vocab_parallel_cross_entropy(hidden, w, target, bias=b, label_smoothing=0.1),
            lambda w, b: ours.vocab_parallel_logprob(hidden, w, target, bias=b).entropy.square().sum(),
            lambda w, b: ours.vocab_parallel_logprob_of(hidden, w, ids, bias=b).sum(),
        )

        def plain_losses(w: Tensor, b: Tensor) -> list[Tensor]:
            log_p = F.linear(hidden, w, b).log_softmax(1)
            entropy = torch.where(target == IGNORE, 0.0, -(log_p.exp() * log_p).sum(1))
            values = torch.where(ids == IGNORE, 0.0, log_p.gather(1, ids.clamp(min=0)))
            smoothed = F.cross_entropy(F.linear(hidden, w, b), target, label_smoothing=0.1)
            return [smoothed, entropy.square().sum(), values.sum()]

        for at, run_sharded in enumerate(losses):
            loss, one = run_sharded(*leaves), plain_losses(*whole)[at]
            torch.testing.assert_close(loss, one, rtol=1e-5, atol=1e-5)
            grads = torch.autograd.grad(loss, leaves)
            for grad, expected in zip(grads, torch.autograd.grad(one, whole), strict=True):
                assert grad.placements == (placement,)
                torch.testing.assert_close(grad.full_tensor(), expected, rtol=1e-4, atol=1e-5)
        words = ours.vocab_parallel_argmax(hidden, leaves[0], bias=leaves[1])
        assert torch.equal(words, F.linear(hidden, weight, bias).argmax(1))


CHECKS = (check_losses, check_nothing_counts, check_heads, check_policy, check_several_words, check_certain_words,
          check_argmax, check_dtensors)  # fmt: skip


def check_all(device: str) -> None:
    for check in CHECKS:
        check(device)
    if dist.get_world_size() == 2 and device == "cpu":
        check_refusals(device)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_agree_with_one(num_ranks: int) -> None:
    run(__name__, "check_all", num_ranks)


@pytest.mark.multigpu
def test_two_gpus_agree_with_one() -> None:
    run(__name__, "check_all", 2, "cuda")
