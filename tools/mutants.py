"""Seeded faults: does a test fail when the code is wrong? Standard library only.

    python tools/mutants.py              every mutant of the tables mutants_of_*.py beside this file
    python tools/mutants.py NAME …       those whose name contains one of the words

A mutant is one wrong text in one file. The package and its tests are copied into a temporary folder, the text is put
there, and the tests named with it are run: one of them must fail. First they must all pass on the unchanged copy.
Exits with 1 if a mutant survives, if its old text is not in its file exactly once, or if its tests do not run.
"""

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("fusedce", "tests", "pyproject.toml")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so")
MOST_PROCESSES = 2
TIME_LIMIT = 600  # seconds a test run may take: a mutant may loop for ever
PASSED, FAILED = 0, 1  # exit codes of pytest; any other is neither


@dataclass(frozen=True)
class Mutant:
    """One fault. file: relative to the root; old: in it exactly once; breaks: what is wrong then; tests: arguments of
    pytest that select what must fail."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: str

    def stale(self, root: Path = ROOT) -> str | None:
        """None if the old text is there exactly once, else the complaint."""
        count = (root / self.file).read_text(encoding="utf-8").count(self.old)
        return None if count == 1 else f"{self.name}: its old text is in {self.file} {count} times; expected 1"

    def apply(self, root: Path) -> None:
        """Change the copy under `root`; ValueError if the text is stale."""
        complaint = self.stale(root)
        if complaint:
            raise ValueError(complaint)
        path = root / self.file
        path.write_text(path.read_text(encoding="utf-8").replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant. verdict: "killed", "SURVIVED" or "no verdict"; detail: the tests' last words."""

    mutant: Mutant
    verdict: str
    seconds: float
    detail: str = ""


def main() -> None:
    """Run the chosen mutants and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the names of the mutants to run; all without")
    processes = min(MOST_PROCESSES, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=int, choices=range(1, MOST_PROCESSES + 1), default=processes)
    args = parser.parse_args()
    chosen = [m for m in mutants() if not args.words or any(word in m.name for word in args.words)]
    if not chosen:
        sys.exit(f"no mutant's name contains {' or '.join(args.words)}")
    complaints = [complaint for complaint in map(Mutant.stale, chosen) if complaint]
    if complaints:
        sys.exit("\n".join(complaints))
    with ThreadPoolExecutor(args.jobs) as pool:
        broken = [words for words in pool.map(unchanged, together(chosen)) if words]
        if broken:
            sys.exit("\n".join(["without any mutant these tests do not pass:", *broken]))
        outcomes = list(pool.map(judge, chosen))
    report(outcomes)
    sys.exit(any(outcome.verdict != "killed" for outcome in outcomes))


def mutants() -> list[Mutant]:
    """All mutants of the tables beside this file."""
    found = []
    for path in sorted(Path(__file__).parent.glob("mutants_of_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no module")
        table = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(table)
        found += [Mutant(**row) for row in table.MUTANTS]
    return found


def together(chosen: list[Mutant]) -> list[str]:
    """Their tests in as few runs of pytest as there are different options beside the names of tests."""
    runs: dict[tuple[str, ...], set[str]] = {}
    for mutant in chosen:
        words = shlex.split(mutant.tests)
        options = tuple(word for word in words if "::" not in word)
        runs.setdefault(options, set()).update(word for word in words if "::" in word)
    return [shlex.join((*options, *sorted(names))) for options, names in runs.items()]


def judge(mutant: Mutant) -> Outcome:
    """Run a mutant's tests on a copy that has it."""
    start = time.perf_counter()
    code, words = run(mutant.tests, mutant)
    verdict = {PASSED: "SURVIVED", FAILED: "killed"}.get(code, "no verdict")
    outcome = Outcome(mutant, verdict, time.perf_counter() - start, "" if verdict == "killed" else words)
    print(f"{verdict:<12}{outcome.seconds:>6.0f} s  {mutant.name}", flush=True)
    return outcome


def unchanged(tests: str) -> str | None:
    """None if the tests pass on a copy without a mutant, else their last words."""
    code, words = run(tests, None)
    return None if code == PASSED else f"{tests}\n{words}"


def run(tests: str, mutant: Mutant | None) -> tuple[int, str]:
    """pytest's exit code and last words, on a fresh copy of the package."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        for part in COPIED:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, folder / part, ignore=LEFT_OUT)
            else:
                shutil.copy2(source, folder / part)
        if mutant:
            mutant.apply(folder)
        # The folder first, so that an editable installation of the package elsewhere is not what is tested.
        environment = {**os.environ, "PYTHONPATH": name, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(tests)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        try:
            done = subprocess.run(command, cwd=folder, env=environment, text=True, timeout=TIME_LIMIT, **pipes)
        except subprocess.TimeoutExpired:
            return -1, f"not done after {TIME_LIMIT} s"
        return done.returncode, "\n".join(done.stdout.splitlines()[-15:])


def report(outcomes: list[Outcome]) -> None:
    """The closing table."""
    print()
    for outcome in outcomes:
        mutant = outcome.mutant
        print(
            f"{outcome.verdict:<12}{outcome.seconds:>6.0f} s  {mutant.name:<44}{mutant.file}\n{'':<22}{mutant.breaks}"
        )
        if outcome.detail:
            print(outcome.detail)
    killed = sum(outcome.verdict == "killed" for outcome in outcomes)
    print(
        f"{killed} of {len(outcomes)} mutants killed, {sum(o.seconds for o in outcomes):.0f} s of test runs", flush=True
    )


if __name__ == "__main__":
    main()
