"""How a benchmark runs: correct first, then interleaved rounds; one CSV row a figure.

Every provider gets the same inputs. A round runs each provider once, so that clocks and temperature are shared; the
figure is the median over the rounds. Peak memory is what is allocated beside the inputs and the gradients. A provider
that fails, or whose result is wrong, is reported and gets no row.
"""

import argparse
import csv
import datetime
import gc
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

GIB = 2**30
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One published figure."""

    op: str
    provider: str
    case: str
    mode: str
    metric: str
    unit: str
    p20: float
    p50: float
    p80: float
    n: int
    gpu: str
    torch: str
    triton: str
    commit: str
    date: str


@dataclass(frozen=True)
class Provider:
    """One implementation: run() is a whole pass (forward, or forward and backward) and returns what is checked."""

    name: str
    run: Callable[[], Tensor]


def arguments(doc: str | None) -> argparse.Namespace:
    """The command line that every benchmark has. doc: its module's docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", default="", help="comma-separated; see the module's docstring")
    parser.add_argument("--rounds", type=int, default=7, help="times each provider is timed, in turns")
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    parser.add_argument("--providers", default="", help="comma-separated; default all that are installed")
    parser.add_argument("--commit", default="", help="of the code that runs, where git cannot tell")
    return parser.parse_args()


def environment(device: str, commit: str) -> dict[str, str]:
    """The columns that say where a row was measured. commit: of the code; empty asks git."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    commit = commit or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": commit or "unknown",
        "date": datetime.date.today().isoformat(),
    }


def elapsed_ms(run: Callable[[], object], device: str) -> float:
    """Milliseconds of one call: device events on a GPU, the wall clock on a CPU."""
    if device != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def chosen(found: dict[str, T], names: str) -> dict[str, T]:
    """The providers named on the command line, all where none is."""
    return {name: value for name, value in found.items() if not names or name in names.split(",")}


def interleaved(providers: list[Provider], device: str, rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """The times of every provider in ms, `rounds` of them, taken in turns."""
    for provider in providers:
        for _ in range(warmup):
            provider.run()
    times: dict[str, list[float]] = {provider.name: [] for provider in providers}
    for _ in range(rounds):
        for provider in providers:
            times[provider.name].append(elapsed_ms(provider.run, device))
    return times


def peak_gib(run: Callable[[], object], device: str, gradient_bytes: int) -> float:
    """GiB allocated at most while `run` runs, beside what was there before and `gradient_bytes` that it leaves."""
    if device != "cuda":
        return float("nan")
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before - gradient_bytes) / GIB


def usable(providers: list[Provider], gold: Tensor, tolerance: float) -> list[Provider]:
    """The providers that run and come within `tolerance` of `gold`, relative, in the norm; the others with their
    reason."""
    good = []
    for provider in providers:
        print(f"  {provider.name} …", flush=True)
        try:
            out = provider.run().detach().double()
        except Exception as error:  # a peer may fail in any way, and the others are still to be measured
            print(f"  {provider.name}: failed, {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        wrong = ((out - gold.double()).norm() / gold.double().norm()).item()
        if wrong <= tolerance:
            good.append(provider)
        else:
            print(f"  {provider.name}: refused, relative error {wrong:.2e} above {tolerance:.0e}", flush=True)
    return good


def rows_of(
    times: dict[str, list[float]],
    where: dict[str, str],
    op: str,
    case: str,
    mode: str,
    metric: str = "time",
    unit: str = "ms",
) -> list[Row]:
    """One row a provider: the 20th, 50th and 80th percentile."""
    rows = []
    for name, values in times.items():
        ordered = sorted(values)
        p20, p80 = ordered[len(ordered) // 5], ordered[-1 - len(ordered) // 5]
        p50 = statistics.median(ordered)
        rows.append(
            Row(op, name, case, mode, metric, unit, *(round(v, 4) for v in (p20, p50, p80)), len(ordered), **where)
        )
        print(f"  {op} {case} {mode} {name:16s} {metric} {p50:10.3f} {unit}", flush=True)
    return rows


def write(rows: list[Row], path: Path) -> None:
    """Append to a CSV file; the header goes first where the file is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        if new:
            writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
