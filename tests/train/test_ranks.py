"""The trainer on 2 and 4 ranks against one: the same loss, norm, gradients and weights, whatever lies where."""

import itertools
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fusedce.train import checkpoint
from fusedce.train.config import TrainConfig
from fusedce.train.mesh import World
from fusedce.train.ranks import gather
from fusedce.train.sft import SftTrainer
from fusedce.train.sharding import build
from fusedce.train.weights import whole
from tests.distributed.processes import run
from tests.train.rank_cases import MODEL, assert_same, grpo, one, patch_answers, sft, step, trainer, world


@contextmanager
def text() -> Iterator[str]:
    """Files of a few tokens, so that a row holds several; the same ones on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(400):
            (Path(folder) / f"{number}.txt").write_text("abcdefghij klmnop"[: 3 + number % 13] * (1 + number % 2))
        yield folder


def how(config: TrainConfig, **changes: object) -> TrainConfig:
    return replace(config, model=replace(config.model, **changes))


# ── run on every rank ───────────────────────────────────────────────────────────────────────────────────────────────


class Reduces(TorchDispatchMode):
    """How many reduce-scatters are issued inside."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def check_steps(device: str) -> None:
    """SFT of packed rows and GRPO, by every EP, recompute and chunks; five sequences or three groups over the ranks."""
    two = dist.get_world_size() == 2
    with text() as folder:
        every = cases(folder)
        # Each way of computing, and the cases that it is held to; four ranks take their time on two cores.
        ways = {
            (0.0, 1): list(every) if two else ["few"],
            (1.0, 4): list(every) if two else ["grpo, one prompt an update"],
            (0.0, 4): ["packed"],
            (1.0, 1): ["packed"],
        }
        expected = {kind: step(config, one()) for kind, config in every.items()}
        ranks = [world(ep) for ep in (1, 2, 4) if dist.get_world_size() % ep == 0]
        for each, (recompute, chunks) in itertools.product(ranks, ways):
            for kind in ways[recompute, chunks]:
                config = how(every[kind], recompute=recompute, moe_chunks=chunks)
                what = f"{kind}, EP {each.layout.ep}, recompute {recompute}, chunks {chunks}"
                assert_same(step(config, each), expected[kind], what)
        if two:
            check_paths(folder, ranks)
        check_other_mesh(check_nonfinite(folder, ranks[1]), ranks[0])
        check_two_forwards(ranks[1])


def cases(folder: str) -> dict[str, TrainConfig]:
    """Ranks differ in how many sequences they have; with `few` some have none, with micro-batches some lack one."""
    many = dict(num_updates=3, kl_coef=0.1, normalize="sequence", std_advantage=True, micro_batch=2)
    return {
        "packed": sft(folder),
        "packed, micro-batches": sft(folder, micro_batch=1),
        "few": sft(folder, batch_size=1, model=replace(sft(folder).model, tied=True)),
        "grpo": grpo(micro_batch=6),
        "grpo, one prompt an update": grpo(**many),
    }


def check_paths(folder: str, ranks: list[World]) -> None:
    """FS-A14, FS-A09: the norm is the same by every path, and a micro-batch costs as many
    reduces as a batch."""
    norms = []
    for each, recompute, micro in itertools.product(ranks, (0.0, 0.5), (0, 1)):
        config = how(sft(folder, batch_size=4 * dist.get_world_size(), micro_batch=micro), recompute=recompute)
        made = trainer(config, each)
        with Reduces() as counted:
            norms.append(made.train_step()["grad_norm"])
        # the embedding, the head, the rest of the root, two blocks, and their experts if others hold them too
        assert counted.count == (4 if micro else 1) * (7 if each.layout.efsdp > 1 else 5)
    norms.append(trainer(sft(folder, batch_size=4 * dist.get_world_size()), one()).train_step()["grad_norm"])
    assert max(norms) - min(norms) <= 1e-6 * min(norms), norms


def check_nonfinite(folder: str, ranks: World) -> SftTrainer:
    """FS-A01, FS-A02: an infinite gradient on one rank; all skip, no bit of weights or optimizer changes, all go on."""
    made = SftTrainer(sft(folder), Path(gather(str(folder))[0]) / "run", ranks)
    before = {name: whole(p).clone() for name, p in made.weights.items()}
    losses = list(made.losses(*made.training.batch(0)))
    last = dist.get_rank() == dist.get_world_size() - 1
    _, norm, skipped = made.backward_and_step(iter([loss * (math.inf if last else 1) for loss in losses]))
    assert skipped == 1.0 and not math.isfinite(norm)
    assert not made.optimizer.state and all(torch.equal(whole(p), before[n]) for n, p in made.weights.items())
    good = made.train_step()
    norms = [torch.zeros((), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, torch.tensor(good["grad_norm"], dtype=torch.float64))
    assert isinstance(good["grad_norm"], float) and len({norm.item() for norm in norms}) == 1
    assert good["skipped"] == 0 and not torch.equal(whole(made.weights["norm.weight"]), before["norm.weight"])
    return made


def check_other_mesh(saved: SftTrainer, ranks: World) -> None:
    """FS-A03, FS-A04: weights and AdamW's state keep their bits on another mesh; 261 words divide over no ranks."""
    saved.step = 1
    manifest, state = checkpoint.load(saved.save())
    other = SftTrainer(saved.config, saved.run_folder, ranks)
    other.restore(manifest, state)
    assert other.step == 1
    for name, weight in other.weights.items():
        before = saved.weights[name]
        assert torch.equal(whole(weight), whole(before)), name
        moments, expected = other.optimizer.state[weight], saved.optimizer.state[before]
        assert moments.keys() == expected.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(whole(moments[key]), whole(value)) for key, value in expected.items()), name
    again = [t.train_step()["loss"] for t in (saved, other)]
    assert abs(again[0] / again[1] - 1) <= 1e-5


def check_two_forwards(ranks: World) -> None:
    """FS-A07, FS-A08: recomputed blocks twice in one graph, a tied head and one of its own."""
    ids = torch.arange(12).view(2, 6)
    for tied in (True, False):
        config = replace(MODEL, vocab_size=13, tied=tied)
        grads = []
        for where in (one(), ranks):
            model = build(config, where, 3)
            product = model.head(model(ids), ids).logprob * model.head(model(ids + 1), ids).logprob
            product.sum().backward()
            grads.append({name: whole(p.grad) for name, p in model.named_parameters()})  # type: ignore[arg-type]
        assert ("head.weight" in grads[0]) != tied
        for name, grad in grads[0].items():
            torch.testing.assert_close(grads[1][name], dist.get_world_size() * grad, rtol=1e-4, atol=1e-5)


# ── the tests ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_fs_a01_a02_a03_a04_a07_a08_a09_a14_two_ranks_as_one() -> None:
    run(__name__, "check_all", 2)


def test_fs_a01_a02_a03_a04_a07_a08_four_ranks_as_one() -> None:
    run(__name__, "check_all", 4)


def check_all(device: str) -> None:
    patch = patch_answers(4)
    check_steps(device)
    patch.undo()
