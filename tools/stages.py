"""The stages of `make test` and of CI in one table, cheapest first. Standard library only.

    python tools/stages.py lint        ruff, formats, spelling, contracts, types, house rules
    python tools/stages.py test        lint, CPU suite, interpreter
    python tools/stages.py ci          what CI runs after `make test`
    python tools/stages.py gpu         the whole suite on a machine with a GPU
    python tools/stages.py multi-gpu   what needs two GPUs
    python tools/stages.py NAME …      single stages

A run ends at the first stage that fails, and always with a table of what ran and how long it took.
"""

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = "{python} -m pytest -q"
NATIVE = "(native or slow) and not gpu and not compile"
EXPERT_PARALLEL = (
    "{python} -m torch.distributed.run --standalone --nproc-per-node 2 -m bench.expert_parallel --device cpu "
    "--cases smoke_64 --rounds 2 --providers naive_1,deduplicated_4"
)
CPP_SUFFIXES = (".cpp", ".h", ".cuh", ".cu")


@dataclass(frozen=True)
class Stage:
    """One command. needs: the module that it runs, told apart from a failure where nothing may be installed.

    parallel: tests over several processes, each with one thread.
    """

    name: str
    group: str
    command: str
    needs: str
    parallel: bool = False


STAGES = (
    Stage("ruff", "lint", "{python} -m ruff check .", "ruff"),
    Stage("format", "lint", "{python} -m ruff format --check .", "ruff"),
    Stage("format-c++", "lint", "{bin}/clang-format --dry-run --Werror {cpp}", "clang_format"),
    Stage("spelling", "lint", "{python} -m codespell_lib", "codespell_lib"),
    Stage("contracts", "lint", "{bin}/lint-imports --no-cache", "importlinter"),
    Stage("types", "lint", "{python} -m mypy", "mypy"),
    Stage("house", "lint", f"{PYTEST} tests/house", "pytest"),
    Stage("cpu", "test", f"{PYTEST} --ignore=tests/house", "pytest", parallel=True),
    # Sets TRITON_INTERPRET before Triton is imported: a process of its own.
    Stage("interpret", "test", f"{PYTEST} tests/interpret -m 'interpret and not gpu'", "triton", parallel=True),
    Stage("compile-matrix", "ci", f"{PYTEST} -m compile", "triton", parallel=True),
    Stage("amd", "ci", f"{PYTEST} -m amd", "triton", parallel=True),
    Stage("oldest-triton", "ci", "{python} tools/oldest_triton.py", "triton", parallel=True),
    Stage("native", "ci", f"{PYTEST} --dist loadgroup -m '{NATIVE}'", "pybind11", parallel=True),
    Stage("integrations", "ci", "{python} tools/integrations.py", "torch", parallel=True),
    Stage("bench-linear-ce", "ci", "{python} -m bench.linear_ce --device cpu --cases smoke --rounds 2", "torch"),
    Stage(
        "bench-linear-sparse", "ci", "{python} -m bench.linear_sparse --device cpu --cases smoke --rounds 2", "torch"
    ),
    Stage("bench-moe", "ci", "{python} -m bench.moe --device cpu --cases smoke_64 --rounds 2", "torch"),
    Stage("bench-expert-parallel", "ci", EXPERT_PARALLEL, "torch"),
    Stage("wheel", "ci", "{python} tools/check_wheel.py", "wheel"),
    Stage("demo", "ci", "{python} tools/check_demo.py", "tyro"),
    Stage("gpu", "gpu", f"{PYTEST} -m 'gpu and not slow'", "triton", parallel=True),
    Stage("multi-gpu", "multi-gpu", f"{PYTEST} -m multigpu", "triton"),
    Stage("soak", "soak", f"{PYTEST} -m 'gpu and slow'", "triton"),
    # Needs no GPU.
    Stage("faults", "soak", f"{PYTEST} -m soak", "tyro", parallel=True),
    Stage("sanitizer", "soak", "{python} -m tests.sanitizer", "triton"),
    # Two processes at most, by itself.
    Stage("mutants", "soak", "{python} tools/mutants.py", "triton"),
)
# A group that is asked for brings the cheaper ones along. A single stage may bear a group's name; the group is meant.
GROUPS = {
    "lint": ("lint",),
    "test": ("lint", "test"),
    "ci": ("ci",),
    "gpu": ("lint", "test", "gpu"),
    "multi-gpu": ("multi-gpu",),
    "soak": ("soak",),
}
OUTCOME = {True: "passed", False: "FAILED", None: "not run: {needs} is not installed"}


def main() -> None:
    """Run the chosen stages in the table's order and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", help="a group or names of stages")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8), help="processes of a parallel stage")
    parser.add_argument("--allow-missing", action="store_true", help="name stages whose tool is missing, and go on")
    args = parser.parse_args()
    chosen = select(args.what)
    results: list[tuple[Stage, bool | None, float]] = []
    for stage in chosen:
        if importlib.util.find_spec(stage.needs) is None:
            if not args.allow_missing:
                sys.exit(f"stage {stage.name} needs {stage.needs}, which {sys.executable} has not; run `make setup`")
            results.append((stage, None, 0.0))
            continue
        start = time.perf_counter()
        passed = run(stage, args.jobs)
        results.append((stage, passed, time.perf_counter() - start))
        if not passed:
            break
    report(chosen, results)
    sys.exit(any(passed is False for _, passed, _ in results))


def select(names: list[str]) -> list[Stage]:
    """The stages of the groups and names given, in the table's order."""
    known = {stage.name for stage in STAGES} | set(GROUPS)
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"no stage or group is called {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    groups = {group for name in names for group in GROUPS.get(name, ())}
    return [stage for stage in STAGES if stage.group in groups or stage.name in names]


def run(stage: Stage, jobs: int) -> bool:
    """Whether the stage's command ended with 0."""
    cpp = " ".join(str(p.relative_to(ROOT)) for p in sorted((ROOT / "csrc").rglob("*")) if p.suffix in CPP_SUFFIXES)
    command = stage.command.format(python=sys.executable, bin=Path(sys.executable).parent, cpp=cpp)
    environment = dict(os.environ)
    if stage.parallel:
        # One thread a process: torch would otherwise take every core in each of them.
        environment.setdefault("OMP_NUM_THREADS", "1")
        if jobs > 1 and importlib.util.find_spec("xdist"):
            command += f" -n {jobs}"
    print(f"\n── {stage.name} ── {command}", flush=True)
    return subprocess.run(shlex.split(command), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL).returncode == 0


def report(chosen: list[Stage], results: list[tuple[Stage, bool | None, float]]) -> None:
    """The closing table."""
    width = min(shutil.get_terminal_size().columns, 60)
    print("\n" + "─" * width)
    for stage, passed, seconds in results:
        print(f"{stage.name:<16}{seconds:>8.1f} s  {OUTCOME[passed].format(needs=stage.needs)}")
    for stage in chosen[len(results) :]:
        print(f"{stage.name:<16}{'':>8}    not reached")
    print(f"{'total':<16}{sum(seconds for _, _, seconds in results):>8.1f} s", flush=True)


if __name__ == "__main__":
    main()
