"""`fusedce explain`: which backend runs each op, and why."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro

from fusedce.commands.common import UsageError, command, device_named, print_json
from fusedce.ops import registry

ABOUT = """Which backend runs each op on this machine, and why, with every backend that was passed over.
Exit codes: 0, 2 for arguments that make no sense.

  fusedce explain                                all ops, on the GPU if there is one
  fusedce explain linear_logprob --dtype float32
  fusedce explain --device cpu --json            for programs"""


@dataclass(frozen=True)
class ExplainConfig:
    """The command line."""

    op: Annotated[str, tyro.conf.Positional] = ""
    """one op; all of them if left out"""
    device: str = ""
    """cpu, cuda or cuda:N; left out, the current GPU if there is one, else the CPU"""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "bfloat16"
    """of the operands"""
    json: bool = False
    """print one JSON object instead"""


def run(config: ExplainConfig) -> int:
    """The lines, or the choices as JSON."""
    device, dtype = device_named(config.device), getattr(torch, config.dtype)
    if config.op and config.op not in registry.OPS:
        raise UsageError(f"op is {config.op!r}; expected one of {', '.join(registry.OPS)}")
    ops = (config.op,) if config.op else registry.OPS
    try:
        choices = {op: registry.choose(op, "auto", device, dtype) for op in ops}
    except (ValueError, RuntimeError) as error:  # FUSEDCE_BACKEND names what is none, or what cannot run
        raise UsageError(str(error)) from None
    if config.json:
        print_json({op: {"backend": choice.backend, "reason": choice.reason} for op, choice in choices.items()})
    else:
        print(registry.explain(config.op or None, device, dtype))
    return 0


main = command("explain", ExplainConfig, ABOUT, run)
