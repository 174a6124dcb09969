"""The processes of a run: which mesh follows from their number and the model, and the few things they tell each other.

One process has no process group and no mesh, and everything here is then trivial.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fusedce import env
from fusedce.distributed import new_expert_group
from fusedce.train.config import ConfigError, TrainConfig

MIN_LOCAL_EXPERTS = 2  # with one expert a rank the busiest expert is the busiest rank; as `fusedce plan` has it


@dataclass(frozen=True)
class Layout:
    """Ranks as a table efsdp × ep: a row shares out the experts, a column shards the same ones; all others shard over
    the whole table. reason: why, for people.
    """

    ep: int
    efsdp: int
    reason: str

    @property
    def world(self) -> int:
        return self.ep * self.efsdp


def choose_layout(world: int, per_node: int, num_experts: int, ep: int = 0) -> Layout:
    """The mesh of `world` ranks, `per_node` of them in a node, for `num_experts` experts.

    EP is `ep`, or for 0 the most ranks that divide the world and the experts, stay in a node, and have at least
    MIN_LOCAL_EXPERTS each. ConfigError for an `ep` that divides not both.
    """
    fitting = [n for n in range(1, world + 1) if world % n == 0 and num_experts % n == 0]
    if ep:
        if ep not in fitting:
            wanted = ", ".join(map(str, fitting))
            raise ConfigError(
                f"ep is {ep}; expected 0 or a divisor of the {world} ranks and of the {num_experts} experts: {wanted}"
            )
        chosen, why = ep, "as asked for"
    else:
        # A group of [0, EP), [EP, 2·EP), … stays in its node where EP divides the node's ranks too.
        most = max(num_experts // MIN_LOCAL_EXPERTS, 1)
        chosen = max(n for n in fitting if n <= most and per_node % n == 0)
        why = (
            f"the most of {world} ranks that divide {num_experts} experts, keep {MIN_LOCAL_EXPERTS} or more each and "
            f"stay in a node of {per_node}"
        )
    efsdp = world // chosen
    where = f"experts over EP {chosen} × FSDP {efsdp}, all else over FSDP {world}"
    return Layout(chosen, efsdp, f"{where}; EP {chosen}: {why}")


class World:
    """This process among those of the run.

    mesh: efsdp × ep, `everyone` the same ranks in one dimension, `experts` the group of a row with a stream of its own;
    None where nothing is sharded.
    """

    def __init__(self, device: torch.device, layout: Layout, sharded: bool) -> None:
        self.device, self.layout = device, layout
        self.rank = dist.get_rank() if sharded else 0
        self.size = layout.world
        self.mesh: DeviceMesh | None = None
        self.everyone: DeviceMesh | None = None
        self.experts: dist.ProcessGroup | None = None
        if sharded:
            kind = device.type
            self.mesh = init_device_mesh(kind, (layout.efsdp, layout.ep), mesh_dim_names=("efsdp", "ep"))
            self.everyone = init_device_mesh(kind, (layout.world,), mesh_dim_names=("fsdp",))
            self.experts = new_expert_group(layout.ep) if layout.ep > 1 else None

    @property
    def sharded(self) -> bool:
        return self.mesh is not None

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which shows, writes and draws."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This rank's part of `count` things; parts differ by at most one."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def largest_share(self, count: int) -> int:
        """How many the fullest rank has."""
        return -(-count // self.size)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each. A collective call."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def largest(self, value: float) -> float:
        """The largest of the ranks' numbers. A collective call."""
        if self.size == 1:
            return value
        values = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.item()


def alone(device: torch.device) -> World:
    """One process without a process group."""
    return World(device, Layout(1, 1, "one process"), sharded=False)


@contextmanager
def joined(config: TrainConfig) -> Iterator[World]:
    """The world that torchrun, or anything that sets its variables, started this process in. A collective call.

    A process group that is there is used, and left. ConfigError for a device that is not there, or an `ep` that does
    not divide.
    """
    rank, size, local_rank, per_node = env.launched()
    device = pick_device(config.device, local_rank)
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    layout = choose_layout(size, min(per_node, size), config.model.num_experts, config.ep)
    sharded = size > 1 or config.shard == "always"
    made = sharded and not dist.is_initialized()
    if made:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        # One process without a launcher needs no address to meet at.
        store = dist.HashStore() if size == 1 else None  # type: ignore[attr-defined]
        try:
            dist.init_process_group(backend, rank=rank, world_size=size, store=store)
        except ValueError as error:  # RANK and WORLD_SIZE were set by something that is no launcher
            raise ConfigError(f"cannot join the {size} processes: {error}") from error
    try:
        yield World(device, layout, sharded)
    finally:
        if made:
            dist.destroy_process_group()


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of a process: for "auto" the GPU of its number where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', and torch sees no GPU here; expected cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(f"process {local_rank} of this node has no GPU, there are {torch.cuda.device_count()}")
    return torch.device("cuda", local_rank)
