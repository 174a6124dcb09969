"""`fusedce verify`: every op against its twin on this device, a table, a record."""

import datetime
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusedce.commands.common import STYLES, UsageError, command, device_named, one_of, print_json, progress, write_json
from fusedce.doctor import facts
from fusedce.ops import registry
from fusedce.verify import Result, check_all
from fusedce.verify.check import DTYPES

ABOUT = """Every op against its eager twin in fp64, on this device: each backend that runs here, in fp32, bf16 and fp16,
values and every gradient by the one tolerance of the tests (at most twice plain torch's error in the same dtype), on
memory poisoned with NaN, and the same bits again. "worst" is the share of that bar which the largest error takes.
The same on a CPU, NVIDIA and AMD GPUs (not yet run on AMD hardware by us).
Exit codes: 0 if all pass, 1 if one does not, 2 for arguments that make no sense or leave nothing to check.

  fusedce verify                                      all that this machine has
  fusedce verify --op linear_logprob,moe_experts --backend triton
  fusedce verify --record mi300x.json --repeats 100   for a report: device, versions, results"""

RECORD_FORMAT = 1


@dataclass(frozen=True)
class VerifyConfig:
    """The command line."""

    op: str = ""
    """ops, with commas between them; all if left out"""
    backend: str = ""
    """backends, with commas between them; all if left out"""
    device: str = ""
    """cpu, cuda or cuda:N; left out, the current GPU if there is one, else the CPU"""
    repeats: int = 2
    """how many runs must give the same bits"""
    json: bool = False
    """print one JSON object instead of the table"""
    record: str = ""
    """also write that object into this file"""


def run(config: VerifyConfig) -> int:
    """Check and show."""
    device = device_named(config.device)
    ops = one_of("op", config.op, registry.OPS)
    backends = one_of("backend", config.backend, tuple(registry.PACKAGES))
    if config.repeats < 1:
        raise UsageError(f"repeats is {config.repeats}; expected at least 1")
    total = len(ops or registry.OPS) * len(backends or registry.PACKAGES) * len(DTYPES)
    start = time.perf_counter()
    with progress("verify", total, config.json) as step:
        results = check_all(device, ops, backends, config.repeats, lambda result: step(f"{result.op} {result.backend}"))
    count = Counter(result.status for result in results)
    if not count["pass"] + count["fail"]:
        raise UsageError(f"nothing to check: {results[0].reason}")
    found = record(device, results, config.repeats, time.perf_counter() - start)
    if config.record:
        write_json(Path(config.record), found)
    if config.json:
        print_json(found)
    else:
        show(Console(), device, results, found["seconds"])
    return int(count["fail"] > 0)


def record(device: torch.device, results: list[Result], repeats: int, seconds: float) -> dict[str, Any]:
    """The object for programs and reports."""
    return {
        "format": RECORD_FORMAT,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": facts.versions(),
        "machine": facts.machine(device),
        "repeats": repeats,
        "seconds": round(seconds, 2),
        "passed": all(result.status != "fail" for result in results),
        "results": [result.as_dict() for result in results],
    }


def show(console: Console, device: torch.device, results: list[Result], seconds: float) -> None:
    """The table of what ran, then why the rest did not, a line a reason."""
    machine = facts.machine(device)
    console.print(f"{machine['name']}, {machine['arch']}, torch {torch.__version__}", highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("op", "backend", "dtype", "worst", "of", "s", ""):
        table.add_column(name, justify="right" if name in ("worst", "s") else "left")
    skipped: dict[str, dict[str, None]] = {}
    for result in results:
        if result.status == "not run":
            reason = result.reason.replace(f"for {result.op}", "for it")
            skipped.setdefault(f"{result.backend}: {reason}", {})[result.op] = None
            continue
        status = Text(result.reason or result.status, style=STYLES[result.status])
        worst = "" if result.worst is None else f"{result.worst:.2f}"
        table.add_row(result.op, result.backend, result.dtype, worst, result.where, f"{result.seconds:.1f}", status)
    console.print(table)
    for reason, ops in skipped.items():
        names = "all" if len(ops) == len(registry.OPS) else ", ".join(ops)
        console.print(f"not run: {reason} ({names})", style="dim", highlight=False)
    count = Counter(result.status for result in results)
    summary = f"{count['pass']} pass, {count['fail']} fail, {count['not run']} not run, {seconds:.1f} s"
    console.print(summary, style="bold red" if count["fail"] else "green", highlight=False)
    if machine["vendor"] == "amd":
        console.print(f"{facts.AMD_UNTRIED}: please report this with --record FILE", style="yellow", highlight=False)


main = command("verify", VerifyConfig, ABOUT, run)
