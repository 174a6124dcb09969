"""The processes of a run: what each has to say, as JSON to all of them, and one error for all where one has failed.

One process without a group is rank 0 of 1. Nothing is pickled, as `torch.distributed.all_gather_object` would.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def size() -> int:
    """How many there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which one this is."""
    return dist.get_rank() if size() > 1 else 0


def gather(value: Any) -> list[Any]:
    """The JSON value of every rank, in rank order, on every rank. A collective call."""
    if size() == 1:
        return [value]
    device = "cpu" if "cpu:" in dist.get_backend_config() else "cuda"
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size())]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device))
    longest = int(torch.cat(lengths).amax())
    texts = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(size())]
    dist.all_gather(texts, torch.nn.functional.pad(data, (0, longest - len(data))))
    return [json.loads(t[: int(n)].cpu().numpy().tobytes()) for t, n in zip(texts, lengths, strict=True)]


def highest(number: int) -> int:
    """The largest of the ranks' numbers, on every rank: a signal that one of them has got. A collective call."""
    return max(gather(number))


def together(work: Callable[[], Any], *, only: int | None = None) -> list[Any]:
    """Do work on every rank, or on rank `only`, and gather its JSON values. A collective call, and a barrier.

    Where it raises on a rank, every rank raises the same kind of error, naming the first rank that failed: none goes on
    alone, and none waits for one that has given up. OSError, ValueError and its subclasses here, and RuntimeError come
    across; any other comes as RuntimeError.
    """
    mine: Any = None
    failed: Exception | None = None
    if only is None or rank() == only:
        try:
            mine = work()
        except Exception as error:
            if size() == 1:
                raise
            failed = error
    if size() == 1:
        return [mine]
    said = gather({"value": mine} if failed is None else {"error": _spelled(failed)})
    for number, answer in enumerate(said):
        if "error" in answer:
            raise failed if failed is not None and number == rank() else _read(answer["error"], number)
    return [answer["value"] for answer in said]


KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "RuntimeError": RuntimeError}


def crosses(kind: type[Exception]) -> type[Exception]:
    """Decorates an error whose one argument is its message: other ranks raise the same kind."""
    KINDS[kind.__name__] = kind
    return kind


def _spelled(error: Exception) -> list[Any]:
    if isinstance(error, OSError) and error.errno is not None:
        name = error.filename
        return ["OSError", error.errno, error.strerror, None if name is None else str(name)]
    name = type(error).__name__
    return [name, str(error)] if name in KINDS else ["RuntimeError", f"{name}: {error}"]


def _read(spelled: list[Any], number: int) -> Exception:
    kind, *rest = spelled
    if kind == "OSError":
        code, text, name = rest
        return OSError(code, f"{text} (on rank {number})", name)
    return KINDS[kind](f"{rest[0]} (on rank {number})")
