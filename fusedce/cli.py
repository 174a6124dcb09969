"""The command `fusedce`: train, plan, and explain (which backend runs each op, and why). Each imports what it needs."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusedce.plan.recipe import Answer

USAGE = """usage: fusedce [--version] <command>

commands:
  train [grpo] ...   reinforcement learning on a checkable task (reverse a string); no options needed
  train sft ...      supervised training on text, Python's standard library unless --data says otherwise
  plan ...           one layout for a model on some GPUs: parallelism, recompute, memory, time, and why
  explain [op]       which backend runs each op on this machine, and why

fusedce <command> --help lists a command's options."""

TRAIN_EXTRA = ("tyro", "rich", "matplotlib", "safetensors")  # what the extra [train] installs; plan needs some of it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    command, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command == "train":
        return _train(rest)
    if command == "plan":
        return _plan(rest)
    if command == "explain":
        return _explain(rest)
    if command == "--version":
        from fusedce.version import __version__

        print(__version__)
        return 0
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    print(f"fusedce: unknown command {command!r}\n\n{USAGE}", file=sys.stderr)
    return 2


def _explain(arguments: Sequence[str]) -> int:
    import torch

    import fusedce

    parser = argparse.ArgumentParser(prog="fusedce explain", description="Which backend runs each op, and why.")
    parser.add_argument("op", nargs="?", help="one op; all of them if left out")
    parser.add_argument("--device", help="default: the GPU if there is one, else the CPU")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16", "float64"))
    options = parser.parse_args(arguments)
    try:
        print(fusedce.explain(options.op, options.device, getattr(torch, options.dtype)))
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _plan(arguments: Sequence[str]) -> int:
    try:
        from fusedce.plan.command import main as plan

        return plan(arguments, _measure)
    except ModuleNotFoundError as error:
        return _missing("plan", error)


def _measure(answer: "Answer") -> "dict[str, Any]":
    from fusedce.dryrun import measure

    return measure(answer)


def _train(arguments: Sequence[str]) -> int:
    try:
        from fusedce.train.run import main as train
    except ModuleNotFoundError as error:
        return _missing("train", error)
    return train(arguments)


def _missing(command: str, error: ModuleNotFoundError) -> int:
    """One line for a library of the extra that is not there; any other missing module is an error of ours."""
    if error.name not in TRAIN_EXTRA:
        raise error
    print(f"fusedce {command} needs {error.name}: pip install 'fusedce[train]'", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
