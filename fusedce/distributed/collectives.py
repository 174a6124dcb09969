"""The collectives that the ops over several processes use: one name over torch's versions, and what is under way."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce import checks

# torch 2.13 renames them, and warns of the names that 2.11 has.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Transfer:
    """Rows under way. On a GPU the collective runs on the stream of its process group, after what was queued before it
    on the current stream; torch holds its buffers until `wait`.
    """

    rows: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """The rows, for what is queued from here on: a GPU's stream waits, not the host. On a CPU the host does."""
        self.work.wait()
        return self.rows


def start_all_to_all(
    out: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
) -> Transfer:
    """Rows of each rank to each rank: sent[r] of `rows` to rank r, received[r] from it into `out`, in rank order."""
    return Transfer(out, dist.all_to_all_single(out, rows, list(received), list(sent), group=group, async_op=True))


def start_all_gather(out: Tensor, rows: Tensor, group: dist.ProcessGroup) -> Transfer:
    """The ranks' rows, as many from each, one after the other into `out`."""
    return Transfer(out, all_gather(out, rows, group=group, async_op=True))


def on_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy of the host's numbers that no one waits for."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


def on_host(numbers: Tensor) -> list[list[int]]:
    """The rows of an integer matrix. Of a GPU's in one copy to pinned memory, for which the host waits."""
    if numbers.device.type == "cuda":
        pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        pinned.copy_(numbers, non_blocking=True)
        torch.cuda.current_stream(numbers.device).synchronize()
        numbers = pinned
    return numbers.tolist()


def local_part(tensor: Tensor) -> Tensor:
    """A DTensor's part on this rank, with autograd; another tensor as it is."""
    return tensor.to_local() if checks.is_distributed(tensor) else tensor  # type: ignore[attr-defined]
