"""`fusedce bench`: the front door of bench/, which is in a checkout and not in the wheel: for those who work on the
package or doubt its figures, and its results and peers' settings lie beside it."""

import contextlib
import csv
import importlib
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

import fusedce
from fusedce.commands.common import UsageError, command, device_named, print_json

ABOUT = """Times of ours and of the peers that are installed, on the same inputs, in turns, right before they are timed.
Runs `python -m bench.NAME` of a checkout: bench/ is not in the wheel.
Exit codes: 0, 1 if a benchmark fails, 2 for arguments that make no sense or outside a checkout.

  fusedce bench                                             the benchmarks, their cases and providers here
  fusedce bench linear_ce --cases llama --out rows.csv      rows appended to a CSV file, and a table
  fusedce bench moe --cases A_16384,A_65536 --png moe.png   and a picture: time, memory, ratio to the bare GEMMs
  fusedce bench expert_parallel --ranks 2 --cases A_16384   with that many processes, one a GPU
  fusedce bench --rows bench/results/linear_ce.csv --png x.png   draw what was measured; run nothing"""

NAMES = {
    "linear_ce": "the scalar loss and per-token log-probs, forward and backward",
    "linear_sparse": "log-probs whose backward leaves out what does not count",
    "moe": "the experts of one MoE layer, routing given",
    "expert_parallel": "one expert-parallel layer on several ranks: dispatchers × chunks",
}
SMOKE = {"linear_ce": "smoke", "linear_sparse": "smoke", "moe": "smoke_64", "expert_parallel": "smoke_64"}
Row = dict[str, str]


@dataclass(frozen=True)
class BenchConfig:
    """The command line."""

    name: Annotated[str, tyro.conf.Positional] = ""
    """which; left out, they are listed"""
    cases: str = ""
    """with commas between them; left out, the benchmark's own choice on a GPU, the smoke case on a CPU"""
    providers: str = ""
    """with commas between them; left out, all that are installed"""
    device: str = ""
    """cpu or cuda; left out, cuda if there is a GPU"""
    rounds: int = 7
    """times each provider is timed, in turns"""
    ranks: int = 2
    """processes of expert_parallel"""
    commit: str = ""
    """of the code that runs, where git cannot tell"""
    out: str = ""
    """CSV file to append the rows to"""
    png: str = ""
    """also draw the rows into this file"""
    rows: str = ""
    """run nothing; show the rows of these CSV files, with commas between them"""
    json: bool = False
    """print one JSON object instead of the table"""


def run(config: BenchConfig) -> int:
    """List, or run and show, or show."""
    root = checkout()
    if config.rounds < 1 or config.ranks < 1:
        raise UsageError(f"rounds is {config.rounds} and ranks {config.ranks}; expected at least 1")
    if ":" in config.device:
        raise UsageError(f"device is {config.device!r}; expected cpu or cuda: CUDA_VISIBLE_DEVICES says which")
    device = device_named(config.device).type
    if config.rows:
        if config.name or config.out:
            raise UsageError("--rows runs nothing: no name and no --out go with it")
        return show(config, [row for path in config.rows.split(",") for row in read(Path(path))])
    if not config.name:
        return listed(config, device)
    if config.name not in NAMES:
        raise UsageError(f"name is {config.name!r}; expected one of {', '.join(NAMES)}")
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder) / "rows.csv"
        # What the benchmark prints on its way is not the answer.
        done = subprocess.run(words(config, device, new), cwd=root, stdout=sys.stderr, check=False)
        if done.returncode:
            return 1
        rows = read(new) if new.exists() else []
        if config.out and rows:
            append(rows, Path(config.out))
    if not rows:
        print(f"fusedce bench: {config.name} gave no row: no provider ran, or none was right", file=sys.stderr)
        return 1
    return show(config, rows)


def checkout() -> Path:
    """The root that holds bench/, which is then importable. UsageError outside a checkout."""
    root = Path(fusedce.__file__).resolve().parent.parent
    if not (root / "bench" / "harness.py").is_file():
        raise UsageError(
            "bench/ is not in the wheel: run this from a checkout of fusedce, installed with pip install -e ."
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return root


def words(config: BenchConfig, device: str, out: Path) -> list[str]:
    """The command line of the benchmark itself."""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(config.ranks)]
    cases = config.cases or (SMOKE[config.name] if device == "cpu" else "")
    options = {"device": device, "cases": cases, "providers": config.providers, "commit": config.commit}
    given = [word for name, value in options.items() if value for word in (f"--{name}", value)]
    return [
        sys.executable, *(several if config.name == "expert_parallel" else []), "-m", f"bench.{config.name}", *given,
        "--rounds", str(config.rounds), "--out", str(out),
    ]  # fmt: skip


def listed(config: BenchConfig, device: str) -> int:
    """What there is, here."""
    found = {}
    for name, about in NAMES.items():
        with contextlib.redirect_stdout(sys.stderr):  # what is not installed is said there
            cases, providers = importlib.import_module(f"bench.{name}").offered(device)
        found[name] = {"about": about, "cases": cases, "providers": providers}
    if config.json:
        print_json(found)
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "what", "cases", f"providers on this {device}"):
        table.add_column(column)
    for name, one in found.items():
        table.add_row(name, one["about"], ", ".join(one["cases"]), ", ".join(one["providers"]))
    Console().print(table)
    return 0


def show(config: BenchConfig, rows: list[Row]) -> int:
    """The rows as a table or JSON, and the picture."""
    if not rows:
        raise UsageError("there is no row to show")
    if config.png:
        try:
            importlib.import_module("bench.picture").draw(rows, Path(config.png))
        except ValueError as error:
            raise UsageError(str(error)) from None
    if config.json:
        print_json(rows)
        return 0
    series = importlib.import_module("bench.series")
    floors = series.floors(rows)
    table = Table(box=None, pad_edge=False, header_style="bold", title=f"{rows[0]['gpu']}, torch {rows[0]['torch']}")
    for column in ("op", "case", "mode", "metric", "provider", "p50", "p20–p80", "× floor"):
        right = column.startswith(("p", "×")) and column != "provider"
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        floor = floors.get(series.run_of(row))
        ratio = f"{float(row['p50']) / floor:.2f}" if floor else ""
        spread = f"{float(row['p20']):.4g}–{float(row['p80']):.4g}"
        named = (row["op"], row["case"], row["mode"], f"{row['metric']}, {row['unit']}", row["provider"])
        table.add_row(*named, f"{float(row['p50']):.4g}", spread, ratio)
    Console().print(table)
    return 0


def read(path: Path) -> list[Row]:
    """The rows of a CSV file. UsageError for one that is not of bench/."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        needed = "op provider case mode metric unit p20 p50 p80 gpu torch commit date"
        missing = set(needed.split()) - set(reader.fieldnames or ())
        if missing:
            raise UsageError(f"{path} has no column {', '.join(sorted(missing))}")
        return list(reader)


def append(rows: list[Row], path: Path) -> None:
    """Add rows to a CSV file; the header goes first where it is new."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer: Any = csv.DictWriter(file, list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)


main = command("bench", BenchConfig, ABOUT, run)
