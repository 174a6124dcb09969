"""Argument checks with one form of message, in front of every op. All of them are shape and dtype checks: no device
sync."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def describe(value: object) -> str:
    """ "shape (8,) and dtype torch.float32" for a tensor, "type int" for anything else."""
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"type {type(value).__name__}"


def wrong(op: str, argument: str, value: object, expected: str) -> str:
    """The message of every refused tensor."""
    return f"fusedce.{op}: argument '{argument}' has {describe(value)}; expected {expected}"


def tensor(op: str, argument: str, value: object, dtypes: Sequence[torch.dtype]) -> None:
    """TypeError unless `value` is a plain dense tensor of one of `dtypes`."""
    names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    if not isinstance(value, Tensor):
        raise TypeError(wrong(op, argument, value, f"a tensor of {names}"))
    if is_distributed(value):
        placements = getattr(value, "placements", None)
        raise TypeError(
            f"fusedce.{op}: argument '{argument}' is a DTensor placed {placements}; pass a full or local plain tensor"
        )
    if value.layout != torch.strided or value.is_nested:
        raise TypeError(f"fusedce.{op}: argument '{argument}' is sparse or nested; expected a dense tensor")
    if value.dtype not in dtypes:
        raise TypeError(wrong(op, argument, value, names))


def is_distributed(value: Tensor) -> bool:
    """Whether `value` is a DTensor, without importing torch.distributed."""
    return type(value).__name__ == "DTensor"


def shape(op: str, argument: str, value: Tensor, expected: Sequence[int | None], letters: str) -> None:
    """ValueError unless `value` has the sizes `expected`; None there takes any size. letters: "(N, D)", for the
    message."""
    sizes = tuple(value.shape)
    if len(sizes) != len(expected) or any(e is not None and e != s for s, e in zip(sizes, expected, strict=False)):
        want = ", ".join("any" if e is None else str(e) for e in expected)
        raise ValueError(wrong(op, argument, value, f"{letters} = ({want}{',' if len(expected) == 1 else ''})"))


def same_device(op: str, **tensors: Tensor | None) -> None:
    """ValueError naming the first two arguments that live on different devices."""
    given = [(name, t.device) for name, t in tensors.items() if t is not None]
    for name, device in given[1:]:
        if device != given[0][1]:
            raise ValueError(
                f"fusedce.{op}: argument '{name}' is on {device}, argument '{given[0][0]}' on {given[0][1]}; "
                "expected one device"
            )


def same_dtype(op: str, **tensors: Tensor | None) -> None:
    """TypeError naming the first two arguments of different dtypes."""
    given = [(name, t.dtype) for name, t in tensors.items() if t is not None]
    for name, dtype in given[1:]:
        if dtype != given[0][1]:
            raise TypeError(
                f"fusedce.{op}: argument '{name}' has dtype {dtype}, argument '{given[0][0]}' {given[0][1]}; expected "
                "one dtype (or torch.autocast, which casts both)"
            )


def positive(op: str, **sizes: int) -> None:
    """ValueError for a size of 0 where the op has no meaning without it."""
    for name, size in sizes.items():
        if size <= 0:
            raise ValueError(f"fusedce.{op}: {name} is {size}; expected at least 1")


def count(op: str, argument: str, value: int, most: float = math.inf, letter: str = "") -> None:
    """TypeError unless `value` is an int, ValueError unless it is from 1 to `most`, `letter` in the message."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"fusedce.{op}: argument '{argument}' has {describe(value)}; expected an int")
    if value < 1 or value > most:
        limit = f"1 to {letter} = {most}" if letter else "at least 1"
        raise ValueError(f"fusedce.{op}: argument '{argument}' is {value}; expected {limit}")


def one_of(op: str, argument: str, value: object, allowed: Sequence[str]) -> None:
    """ValueError listing the allowed words."""
    if value not in allowed:
        raise ValueError(f"fusedce.{op}: argument '{argument}' is {value!r}; expected one of {', '.join(allowed)}")


def positive_number(op: str, argument: str, value: float) -> None:
    """ValueError unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"fusedce.{op}: argument '{argument}' has {describe(value)}; expected a number")
    if not 0 < value < math.inf:
        raise ValueError(f"fusedce.{op}: argument '{argument}' is {value}; expected a finite number above 0")
