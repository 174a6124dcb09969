"""A trainer of a hundred lines for tests of checkpoints and faults: FSDP2 over experts that are DTensors.

Its table of words does not divide by the ranks. Whatever their number, a step sees the same eight samples.
"""

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fusedce.distributed import clip_grad_norm_
from fusedce.train import checkpoint, lock, ranks
from fusedce.train.loop import Stop
from tests.train import faults, forks

WORDS, DEPTH, EXPERTS, SAMPLES, SAVE_EVERY = 37, 6, 4, 8, 3
# Where a fault comes: {"step": N, "rank": R or None for all, "kind": "kill" | "term" | "nan" | "hang"}, or what
# faults.arm takes, for the checkpoint of step N.
Fault = dict[str, Any]


class Experts(nn.Module):
    """E matrices over the experts' ranks, gathered for use: slow, and plainly right."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, DEPTH, DEPTH) / DEPTH)
        if mesh is not None:
            self.weight = nn.Parameter(distribute_tensor(self.weight.data, mesh, [Shard(0)]))

    def forward(self, hidden: Tensor, expert: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if isinstance(weight, DTensor):
            weight = weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return hidden + torch.einsum("sd,sdf->sf", hidden, weight[expert])


class Model(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.embed, self.experts, self.norm = nn.Embedding(WORDS, DEPTH), Experts(mesh), nn.LayerNorm(DEPTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.experts(self.embed(ids), ids % EXPERTS)) @ self.embed.weight.T


def build(num_expert_ranks: int) -> tuple[Model, torch.optim.Optimizer]:
    """The sharded model, or a plain one for one rank without a group."""
    torch.manual_seed(0)
    if not dist.is_initialized():
        model = Model(None)
    else:
        shape = (ranks.size() // num_expert_ranks, num_expert_ranks)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "experts"))
        model = Model(mesh["experts"])
        fully_shard(model.experts, mesh=mesh["fsdp"])
        fully_shard(model, mesh=mesh["fsdp", "experts"]._flatten("everyone"))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    return model, torch.optim.AdamW(model.parameters(), lr=0.03, foreach=False)


def state(model: Model, optimizer: torch.optim.Optimizer) -> checkpoint.State:
    """As the trainer's own: parameters, and moments by their parameter's name."""
    names = [name for name, _ in model.named_parameters()]
    moments = {
        f"{names[index]}/{key}": value
        for index, values in optimizer.state_dict()["state"].items()
        for key, value in values.items()
    }
    return {"model": dict(model.named_parameters()), "optimizer": moments}


def resume(model: Model, optimizer: torch.optim.Optimizer, run: Path, said: list[str]) -> int:
    """Take up the newest good checkpoint, each rank its part; its step."""
    parameters = dict(model.named_parameters())

    def place(kind: str, name: str) -> Tensor | None:
        parameter, _, key = name.partition("/")
        return None if key == "step" else parameters[parameter]

    manifest, loaded = checkpoint.load_newest(run, said.append, place)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(loaded["model"][name])
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in loaded["optimizer"].items():
        parameter_name, _, key = name.partition("/")
        moments.setdefault(list(parameters).index(parameter_name), {})[key] = value
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    return manifest.step


def samples(step: int) -> Tensor:
    """The step's words (SAMPLES,), a function of the step alone."""
    return torch.randint(WORDS, (SAMPLES,), generator=torch.Generator().manual_seed(step))


def train(run: str, steps: int, num_expert_ranks: int = 1, fault: Fault | None = None) -> dict[str, Any]:
    """Train to `steps`, from the newest checkpoint if there is one. first: the step begun with; said: by load_newest;
    stopped: the signal."""
    folder, said = Path(run), []
    model, optimizer = build(num_expert_ranks)
    with lock.held(folder), Stop() as stop, open(folder / f"log-{ranks.rank()}.jsonl", "a") as log:
        first = step = resume(model, optimizer, folder, said) if checkpoint.published(folder) else 0
        stopped = 0
        while step < steps and not stopped:
            due = fault is not None and fault["step"] == step + 1 and fault.get("rank") in (None, ranks.rank())
            row = one_step(model, optimizer, step, fault["kind"] if fault and due else "")
            step += 1
            log.write(json.dumps({"step": step, **row}) + "\n")
            log.flush()
            stopped = ranks.highest(stop.signal)
            if step % SAVE_EVERY == 0 or step == steps or stopped:
                if fault and due and "operations" in fault:
                    faults.arm(**{key: fault[key] for key in ("operations", "num_bytes", "action")})
                checkpoint.save(folder, step, {"steps": steps}, state(model, optimizer), keep=2)
    return {"first": first, "said": said, "stopped": stopped}


def one_step(model: Model, optimizer: torch.optim.Optimizer, step: int, kind: str) -> dict[str, Any]:
    """The loss's exact digits, the samples of all ranks in order, and whether the step was left out."""
    share = SAMPLES // ranks.size()
    mine = samples(step)[ranks.rank() * share : (ranks.rank() + 1) * share]
    logits = model(mine)
    loss = nn.functional.cross_entropy(logits, (mine * 7 + 1) % WORDS, reduction="sum") / SAMPLES
    if kind == "nan":
        loss = loss * torch.nan
    if kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if kind == "hang":
        time.sleep(3600)
    loss.backward()
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    common = [p for name, p in model.named_parameters() if not name.startswith("experts")]
    norm = float(clip_grad_norm_([*common, *model.experts.parameters()], 1.0))
    skipped = not torch.isfinite(torch.tensor(norm)).item()
    if not skipped:
        optimizer.step()
    optimizer.zero_grad()
    losses, seen = zip(*ranks.gather([loss.item(), mine.tolist()]), strict=True)
    return {"loss": sum(losses).hex(), "samples": [word for part in seen for word in part], "skipped": skipped}


def rank(run: str, steps: int, num_expert_ranks: int = 1, fault: Fault | None = None, timeout: float = 30.0) -> Any:
    """`train` as one of a group's ranks, or alone."""
    forks.join(timeout)
    return train(run, steps, num_expert_ranks, fault)


def digests(run: str, num_expert_ranks: int) -> dict[str, str]:
    """The SHA-256 of each whole tensor after a resume, put together by torch: not by what made the parts."""
    forks.join()
    model, optimizer = build(num_expert_ranks)
    resume(model, optimizer, Path(run), [])
    wholes = {}
    for kind, tensors in state(model, optimizer).items():
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            wholes[f"{kind}/{name}"] = hashlib.sha256(whole.detach().contiguous().numpy().tobytes()).hexdigest()
    return wholes


def history(run: Path) -> dict[int, dict[str, Any]]:
    """What rank 0 has logged of each step. A step that was done again must have been the same to the last digit."""
    rows: dict[int, dict[str, Any]] = {}
    for line in (run / "log-0.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert rows.setdefault(row["step"], row) == row
    return rows
