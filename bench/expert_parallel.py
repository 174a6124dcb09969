"""One expert-parallel layer on several GPUs: dispatchers × chunks, exposed communication, and the pipeline's model.

torchrun --nproc-per-node R -m bench.expert_parallel [--cases A_16384,A_65536,smoke_64] [--providers naive_1,…] [--help]

A case is a shape of `bench.moe` and the tokens of each rank; a provider a dispatcher and its number of chunks. Rank 0
prints and writes. Beside the time of the layer, forward and backward: the same without communication ("compute": the
rows are what the buffers hold) and the collectives alone ("communication"), all from the same rounds; and made of them
    exposed = layer − compute
    model   = max(compute + communication / C, communication + compute / C), C chunks: max(T_comm, T_gemm), ramp, drain
With one chunk the model is the sum, the serial layer. The serial baseline is naive_1. On a CPU the script is a smoke
run: gloo overlaps nothing that a CPU's time would show.
"""

import contextlib
import statistics
import unittest.mock
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness import arguments, chosen, elapsed_ms, environment, rows_of, write
from bench.moe import SHAPES, inputs
from fusedce.distributed import (
    ExpertPlan,
    expert_parallel_moe,
    expert_pipeline,
    expert_plan,
    new_expert_group,
    slot_route,
)
from fusedce.distributed.collectives import Transfer, start_all_to_all
from fusedce.distributed.dispatchers import DISPATCHERS

CHUNKS = (1, 2, 4, 8, 16)
OP = "expert_parallel"


class Arrived(dist.Work):
    """Of a transfer that does not take place."""

    def wait(self, timeout: object = None) -> bool:
        return True


@contextlib.contextmanager
def without_communication() -> Iterator[None]:
    """Inside, rows count as arrived at once, whatever their buffers hold."""

    def start(out: Tensor, *_: object) -> Transfer:
        return Transfer(out, Arrived())

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (expert_pipeline, "start_all_to_all"),
            (expert_pipeline, "start_all_gather"),
            (slot_route, "start_all_to_all"),
        ):
            stack.enter_context(unittest.mock.patch.object(owner, name, start))
        yield


def model(compute: float, communication: float, num_chunks: int) -> float:
    """The time that a pipeline of C equal chunks takes, of the two parts' own times."""
    return max(compute + communication / num_chunks, communication + compute / num_chunks)


def communication(plan: ExpertPlan, hidden: Tensor, passes: int) -> Callable[[], None]:
    """The collectives of `passes` passes alone: what a forward sends, and a backward again."""
    depth = hidden.shape[1]
    buffers = [
        (hidden.new_zeros(sum(chunk.sent), depth), hidden.new_empty(sum(chunk.received), depth))
        for chunk in plan.chunks
    ]

    def run() -> None:
        for _ in range(passes):
            under_way = []
            for chunk, (here, there) in zip(plan.chunks, buffers, strict=True):
                under_way += [
                    start_all_to_all(there, here, chunk.received, chunk.sent, plan.group),
                    start_all_to_all(here, there, chunk.sent, chunk.received, plan.group),
                ]
            for transfer in under_way:
                transfer.wait()

    return run


def layer(plan: ExpertPlan, tensors: list[Tensor], mode: str) -> Callable[[], object]:
    """A pass of the layer, with all gradients in mode "fwd_bwd". The plan is made already, as it is in a recompute."""
    hidden, gate_up, down, weights = tensors
    d_out = torch.ones_like(hidden)

    def forward() -> Tensor:
        with torch.no_grad():
            return expert_parallel_moe(hidden, gate_up, down, weights, plan)

    def whole() -> object:
        return torch.autograd.grad(expert_parallel_moe(hidden, gate_up, down, weights, plan), tensors, d_out)

    return whole if mode == "fwd_bwd" else forward


def timed(run: Callable[[], object], device: str) -> float:
    """Milliseconds on the slowest rank."""
    dist.barrier()
    took = torch.tensor(elapsed_ms(run, device), device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def bench(case: str, device: str, rounds: int, where: dict[str, str], names: str) -> list:  # type: ignore[type-arg]
    """All rows of one case."""
    shape, tokens = case.split("_")
    group = new_expert_group(dist.get_world_size())
    num_experts = SHAPES[shape][2]
    hidden, gate_up, down, weights, index = inputs(shape, int(tokens), device)
    local = num_experts // group.size()
    mine = slice(dist.get_rank() * local, (dist.get_rank() + 1) * local)
    tensors = [t.clone().requires_grad_() for t in (hidden, gate_up[mine], down[mine], weights)]
    del gate_up, down
    name = f"{shape}_N{tokens}_ep{group.size()}"
    providers = chosen({f"{d}_{c}": (d, c) for d in DISPATCHERS for c in CHUNKS}, names)
    plans = {
        provider: expert_plan(hidden, index, num_experts, group=group, dispatcher=dispatcher, num_chunks=num_chunks)
        for provider, (dispatcher, num_chunks) in providers.items()
    }
    rows = []
    for mode, passes in (("fwd", 1), ("fwd_bwd", 2)):
        runs = {provider: layer(plan, tensors, mode) for provider, plan in plans.items()}
        transfers = {provider: communication(plan, hidden, passes) for provider, plan in plans.items()}
        found: dict[str, dict[str, list[float]]] = {
            metric: {provider: [] for provider in plans} for metric in ("time", "compute", "communication")
        }
        for turn in range(rounds + 2):
            for provider, run in runs.items():
                took = {"time": timed(run, device), "communication": timed(transfers[provider], device)}
                with without_communication():
                    took["compute"] = timed(run, device)
                for metric, value in took.items():
                    if turn >= 2:  # the first two warm up
                        found[metric][provider].append(value)
        found["exposed"] = {
            provider: [a - b for a, b in zip(found["time"][provider], found["compute"][provider], strict=True)]
            for provider in plans
        }
        found["model"] = {
            provider: [
                model(*(statistics.median(found[part][provider]) for part in ("compute", "communication")), num_chunks)
            ]
            for provider, (_, num_chunks) in providers.items()
        }
        if dist.get_rank() == 0:
            for metric, times in found.items():
                rows += rows_of(times, where, OP, name, mode, metric)
    return rows


def offered(device: str) -> tuple[list[str], list[str]]:
    """Cases, with any number of tokens, and providers, for `fusedce bench`."""
    cases = [f"{shape}_{64 if shape == 'smoke' else 16384}" for shape in SHAPES]
    return cases, [f"{dispatcher}_{chunks}" for dispatcher in DISPATCHERS for chunks in CHUNKS]


def main() -> None:
    """Bench the cases of the command line; every rank runs it."""
    args = arguments(__doc__)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    if args.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    where = environment(args.device, args.commit)
    for case in (args.cases or "A_16384,A_65536").split(","):
        rows = bench(case, args.device, args.rounds, where, args.providers)
        if args.out and rows:
            write(rows, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
