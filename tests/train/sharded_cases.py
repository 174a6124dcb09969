"""What each rank checks of checkpoints by several processes."""

import errno
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fusedce.distributed import clip_grad_norm_
from fusedce.train import checkpoint, lock, ranks
from fusedce.train.config import ConfigError
from tests.train import forks, toy


def exact(run: str, num_expert_ranks: int) -> None:
    """Every part comes back bit by bit, and the whole of it; the norm of gradients on mixed meshes is the whole's."""
    forks.join()
    model, optimizer = toy.build(num_expert_ranks)
    for step in range(2):
        toy.one_step(model, optimizer, step, "")
    state = toy.state(model, optimizer)
    folder = checkpoint.save(Path(run), 2, {}, state, keep=1)

    def place(kind: str, name: str) -> Tensor:
        return state[kind][name]

    _, parts = checkpoint.load(folder, place)
    manifest, wholes = checkpoint.load(folder)
    if ranks.rank() == 1:  # and no other
        assert all(
            torch.equal(t, wholes["model"][name]) for name, t in checkpoint.load_alone(folder)[1]["model"].items()
        )
    assert manifest.world == ranks.size() == len([f for f in manifest.files if f.startswith("model")])
    for kind, tensors in state.items():
        assert parts[kind].keys() == wholes[kind].keys() == tensors.keys()
        for name, tensor in tensors.items():
            part, whole = parts[kind][name], wholes[kind][name]
            if isinstance(tensor, DTensor):
                assert isinstance(part, DTensor) and part.placements == tensor.placements
                assert torch.equal(part.to_local(), tensor.to_local())
                assert torch.equal(whole, tensor.full_tensor())
            else:
                assert torch.equal(part, tensor) and torch.equal(whole, tensor)
    model(toy.samples(0)).square().sum().backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
    norm = clip_grad_norm_(list(model.parameters()), 1e9)
    assert float(norm) == pytest.approx(float(torch.cat([g.flatten() for g in grads]).norm()), rel=1e-6)


def plain_parts_are_refused(run: str) -> None:
    """Experts that differ from rank to rank and are no DTensors: torch's own checkpoints lose all but one rank's."""
    forks.join()
    good = {"model": {"w": torch.ones(3)}}
    checkpoint.save(Path(run), 1, {}, good, keep=3)
    experts = nn.Parameter(torch.full((2, 3), float(ranks.rank())))
    with pytest.raises(ValueError, match="model: experts differs on rank 1; .* has to be a DTensor"):
        checkpoint.save(Path(run), 2, {}, {"model": {"w": torch.ones(3), "experts": experts}}, keep=3)
    ranks.gather(None)  # rank 0 clears up
    assert [p.name for p in checkpoint.published(Path(run))] == ["step-000001"]
    assert not list(Path(run).glob("*.tmp"))


def errors_cross(run: str) -> None:
    """One rank fails: all raise the same kind, and the next call works."""
    forks.join()
    me = ranks.rank()

    def fail(error: Exception) -> None:
        if me == 1:
            raise error

    for error in (ConfigError("lr is -1"), checkpoint.CheckpointError("bad"), ValueError("v"), RuntimeError("r")):
        with pytest.raises(type(error), match=str(error)):
            ranks.together(lambda error=error: fail(error))
    with pytest.raises(OSError) as caught:
        ranks.together(lambda: fail(OSError(errno.ENOSPC, "full", "file")))
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == "file"
    with pytest.raises(KeyError if me == 1 else RuntimeError, match="surprise"):
        ranks.together(lambda: fail(KeyError("surprise")))
    assert ranks.together(lambda: me) == [0, 1] and ranks.together(lambda: me, only=1) == [None, 1]
    assert ranks.gather({"é": "x" * me}) == [{"é": ""}, {"é": "x"}]
    assert ranks.highest(15 * me) == 15
    with lock.held(Path(run)):
        assert (Path(run) / lock.NAME).exists()


def folders_that_are_not_shared(run: str) -> None:
    """Each rank on a disk of its own: refused, and nothing is called damaged."""
    forks.join()
    mesh = init_device_mesh("cpu", (2,))
    state = {"model": {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}}
    with pytest.raises(OSError, match="No such file or directory"):  # rank 0 makes the folder, on its own disk
        checkpoint.save(Path(run) / str(ranks.rank()), 1, {}, state, keep=3)
    checkpoint.save(Path(run) / "0", 1, {}, state, keep=3)
    for look in (
        lambda folder: checkpoint.load_newest(folder, print),
        lambda folder: checkpoint.load(folder / "latest"),
    ):
        with pytest.raises(checkpoint.CheckpointError) as caught:
            look(Path(run) / str(ranks.rank()))
        assert "they need one folder for all" in str(caught.value) or "No such file" in str(caught.value)
    assert checkpoint.load_newest(Path(run) / "0", print)[0].step == 1
