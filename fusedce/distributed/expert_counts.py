"""The one exchange ahead of the tokens: what every rank was asked for, and how many rows each sends to each.

It has one size whatever the arguments are, so that ranks that disagree, or of which one refused its arguments, all
learn it here and raise at once; none waits for the others.
"""

from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce.distributed.collectives import on_device, on_host, start_all_to_all
from fusedce.distributed.dispatchers import DISPATCHERS

MAX_CHUNKS = 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Header:
    """What a rank was asked for, as numbers. All but num_tokens are to be the same on every rank.

    refused: 1 where a rank's arguments were, and the others mean nothing. dtype, dispatcher: their place in DTYPES and
    in DISPATCHERS.
    """

    refused: int = 1
    dtype: int = 0
    D: int = 0
    E: int = 0
    K: int = 0
    num_chunks: int = 1
    dispatcher: int = 0
    num_tokens: int = 0


NAMES = tuple(field.name for field in fields(Header))
WORDS: dict[str, tuple[object, ...]] = {"dtype": DTYPES, "dispatcher": tuple(DISPATCHERS)}


@dataclass(frozen=True)
class Counts:
    """Known on the host of C chunks and R ranks, each (C, R): rows and slots that this rank sends to each rank, and
    that it receives from each. num_tokens: (R,) of the ranks.
    """

    sent_rows: Table
    received_rows: Table
    sent_slots: Table
    received_slots: Table
    num_tokens: tuple[int, ...]


@dataclass(frozen=True)
class DeviceCounts:
    """What a rank tells that only its device knows: rows and slots for each rank, (C, R), and whether any expert id is
    out of range, () bool."""

    rows: Tensor
    slots: Tensor
    bad_ids: Tensor


def exchange_counts(header: Header, counts: DeviceCounts | None, group: dist.ProcessGroup) -> Counts:
    """Tell the ranks the header and this rank's counts, and learn theirs. One all-to-all, one copy to the host.

    Raises ValueError on every rank where a rank refused its arguments or the ranks do not agree; a rank that refused
    has its own error to raise.
    """
    num_ranks, num_fields = group.size(), len(NAMES)
    sent = torch.zeros((num_ranks, num_fields + 2 * MAX_CHUNKS), dtype=torch.int64)
    sent[:, :num_fields] = torch.tensor(astuple(header))
    sent = on_device(sent, group_device(group))
    if counts is not None:
        sent[:, NAMES.index("refused")] = counts.bad_ids.to(sent)
        for at, table in enumerate((counts.rows, counts.slots)):
            first = num_fields + at * MAX_CHUNKS
            sent[:, first : first + table.shape[0]] = table.t().to(sent)
    received = torch.empty_like(sent)
    one_each = (1,) * num_ranks
    start_all_to_all(received, sent, one_each, one_each, group).wait()
    both = on_host(torch.cat((sent, received)))
    headers = [Header(*row[:num_fields]) for row in both[num_ranks:]]
    check_headers(headers)

    def read(half: list[list[int]], kind: int) -> Table:
        first = num_fields + kind * MAX_CHUNKS
        return tuple(tuple(row[first + chunk] for row in half) for chunk in range(headers[0].num_chunks))

    mine, theirs = both[:num_ranks], both[num_ranks:]
    num_tokens = tuple(each.num_tokens for each in headers)
    return Counts(read(mine, 0), read(theirs, 0), read(mine, 1), read(theirs, 1), num_tokens)


def check_headers(headers: list[Header]) -> None:
    """ValueError, the same on every rank, unless the ranks' headers agree."""
    refused = [str(rank) for rank, header in enumerate(headers) if header.refused]
    if refused:
        raise ValueError(
            f"fusedce.expert_plan: rank {', '.join(refused)} of the group refused its arguments, see its error"
        )
    for name in NAMES:
        values = [getattr(header, name) for header in headers]
        if name != "num_tokens" and len(set(values)) > 1:
            words = WORDS.get(name)
            told = ", ".join(f"rank {rank} has {words[v] if words else v}" for rank, v in enumerate(values))
            raise ValueError(f"fusedce.expert_plan: the ranks do not agree on {name}: {told}")


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Where a group's collectives take small numbers from. Decided by the group alone, so the same on every rank."""
    on_gpu = "nccl" in str(dist.get_backend_config(group)) and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
