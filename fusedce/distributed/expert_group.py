"""The process group of the experts: of its own, so that its collectives queue behind no one else's."""

import warnings
from typing import Any

import torch.distributed as dist

from fusedce import env

__all__ = ["new_expert_group"]

MOST_BLOCKS = 8  # thread blocks of an NCCL collective: each takes an SM from the experts' GEMMs


def new_expert_group(num_ranks: int, *, backend: str | None = None, max_blocks: int = MOST_BLOCKS) -> dist.ProcessGroup:
    """The group of this rank among the blocks [0, R), [R, 2R), … of all ranks; a collective call of all ranks.

    With NCCL or RCCL its stream has high priority, so that a transfer that could start is not queued behind the kernels
    of a chunk, and a collective takes at most max_blocks thread blocks. It must be no group that FSDP or data
    parallelism uses: collectives of a group run one after the other.

    Args:
        num_ranks: R, a divisor of the number of all ranks.
        backend: "gloo" or "nccl"; None for that of all ranks.
        max_blocks: at least 1.

    Raises:
        ValueError: ranks that are no multiple of num_ranks.

    Warns where CUDA_DEVICE_MAX_CONNECTIONS is 1: kernels and collectives then share one queue, and nothing overlaps.
    """
    world = dist.get_world_size()
    if num_ranks < 1 or world % num_ranks:
        raise ValueError(f"fusedce.new_expert_group: num_ranks is {num_ranks}; expected a divisor of {world} ranks")
    name = backend or str(dist.get_backend())
    on_gpu = "nccl" in name
    if on_gpu and env.one_device_queue():
        warnings.warn(
            "fusedce.new_expert_group: CUDA_DEVICE_MAX_CONNECTIONS=1 puts kernels and collectives in one queue; the "
            "experts will not overlap with their communication",
            stacklevel=2,
        )
    mine = None
    for first in range(0, world, num_ranks):
        ranks = list(range(first, first + num_ranks))
        group = dist.new_group(ranks, backend=backend, pg_options=_nccl_options(max_blocks) if on_gpu else None)
        if dist.get_rank() in ranks:
            mine = group
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def _nccl_options(max_blocks: int) -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = max_blocks
    return options
