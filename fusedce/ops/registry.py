"""Which backend runs an op, and why. The only place that decides it; nothing here is silent.

A backend is a package with one function per op, all with the same signature: fusedce.eager, fusedce.triton,
fusedce.hip. They are imported on first use, so that `import fusedce` needs neither a GPU nor Triton nor the extension.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusedce import arch, env

PACKAGES = {"eager": "fusedce.eager", "triton": "fusedce.triton", "native": "fusedce.hip"}
OPS = (
    "linear_logprob",
    "linear_ce_sum",
    "linear_logprob_sparse",
    "linear_parts",
    "linear_argmax",
    "linear_logprob_of",
    "moe_route",
    "moe_replay",
    "moe_balance",
    "moe_plan",
    "moe_plan_chunks",
    "moe_experts",
    "moe_dispatch",
    "moe_combine",
)
NATIVE_OPS = frozenset({"linear_logprob", "linear_ce_sum", "linear_parts", "linear_argmax", "linear_logprob_of"})
ORDER = ("triton", "native", "eager")  # what "auto" tries, but for what is known to be faster
# Where the rows of bench/results have another backend ahead with bf16 operands: on an H200 at 7c25fce native's own
# GEMMs took 0.94 to 0.97 of Triton's time for log-probs at three shapes; 0.97, 0.98 and 1.02 for the loss and its
# gradients.
AHEAD = {"linear_logprob": ("native", "sm_90"), "linear_ce_sum": ("native", "sm_90")}
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Choice:
    """The backend that will run `op`, and the reason in words."""

    op: str
    backend: str
    reason: str


@functools.cache
def _triton_missing() -> str | None:
    return None if importlib.util.find_spec("triton") else "Triton is not installed"


def why_not(op: str, backend: str, device_type: str, dtype: torch.dtype) -> str | None:
    """None if `backend` can run `op` there, else the reason."""
    if backend == "eager":
        return None
    if dtype not in KERNEL_DTYPES:
        return f"the kernels take fp32, bf16 and fp16, not {dtype}"
    if backend == "triton":
        if _triton_missing():
            return _triton_missing()
        if device_type != "cuda" and not env.triton_interpreted():
            return f"Triton needs a GPU, and the tensors are on {device_type}"
        return None
    if op not in NATIVE_OPS:
        return f"there is no native kernel for {op}"
    if device_type != "cuda":
        return f"the native kernels need a GPU, and the tensors are on {device_type}"
    return importlib.import_module(PACKAGES["native"]).unavailable()


def choose(op: str, backend: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """The backend for `op` on `device` with operands of `dtype`.

    A named backend that cannot run raises RuntimeError with the reason; "auto" takes the first that can.
    """
    if backend not in env.BACKENDS:
        raise ValueError(f"fusedce.{op}: argument 'backend' is {backend!r}; expected one of {', '.join(env.BACKENDS)}")
    asked = "argument" if backend != "auto" else "FUSEDCE_BACKEND"
    named = backend if backend != "auto" else env.default_backend()
    if named != "auto":
        reason = why_not(op, named, device.type, dtype)
        if reason:
            raise RuntimeError(f"fusedce.{op}: backend {named!r} was asked for ({asked}) and cannot run: {reason}")
        return Choice(op, named, f"asked for ({asked})")
    if device.type == "cpu":
        return Choice(op, "eager", "the tensors are on the CPU")
    ahead = _ahead(op, device, dtype)
    if ahead:
        return Choice(op, ahead, "measured ahead on this GPU")
    passed: list[str] = []
    for name in ORDER:
        reason = why_not(op, name, device.type, dtype)
        if reason is None:
            return Choice(op, name, "; ".join(passed) or f"the first of {', '.join(ORDER)} that runs here")
        passed.append(f"not {name}: {reason}")
    raise AssertionError("eager runs everywhere")


def _ahead(op: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """The backend of AHEAD, if it can run with the kernels that were measured."""
    if op not in AHEAD or dtype != torch.bfloat16:
        return None
    name, on = AHEAD[op]
    if why_not(op, name, device.type, dtype) or arch.of_device(device).name != on:
        return None
    return name if importlib.import_module(PACKAGES[name]).has_hopper() else None


def function(choice: Choice, name: str) -> Callable[..., Any]:
    """The function `name` (an op or its backward) of the chosen backend.

    Under torch.autocast it runs with autocast off: an op's operands were cast before it, and inside, fp32 means fp32.
    """
    run = getattr(importlib.import_module(PACKAGES[choice.backend]), name)
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return functools.partial(_without_autocast, run)
    return run


def _without_autocast(run: Callable[..., Any], *arguments: object) -> object:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        return run(*arguments)


def explain(
    op: str | None = None, device: torch.device | str | None = None, dtype: torch.dtype = torch.bfloat16
) -> str:
    """Which backend runs each op on `device` and why, a line an op, with every backend that was passed over.

    op: one op's name, or None for all. device: default the current GPU, else the CPU.
    """
    if op is not None and op not in OPS:
        raise ValueError(f"fusedce.explain: argument 'op' is {op!r}; expected one of {', '.join(OPS)}")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    lines = []
    for name in (op,) if op else OPS:
        choice = choose(name, "auto", where, dtype)
        lines.append(f"{name} on {where}, {str(dtype).removeprefix('torch.')}: {choice.backend} ({choice.reason})")
        for other in PACKAGES:
            if other != choice.backend:
                lines.append(f"    {other}: {why_not(name, other, where.type, dtype) or 'could run'}")
    return "\n".join(lines)
