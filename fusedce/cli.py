"""The command `fusedce`. Each subcommand is a module that parses its own options; it is imported when it is asked for,
so that this much works without any extra."""

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fusedce.plan.recipe import Answer


class Command(NamedTuple):
    """One subcommand. module: where its `main(arguments)` is; extra: the extra that installs what it needs."""

    module: str
    extra: str
    about: str


COMMANDS = {
    "doctor": Command(
        "fusedce.commands.doctor", "cli", "what is installed, what would run, and the settings that are traps"
    ),
    "explain": Command("fusedce.commands.explain", "cli", "which backend runs each op on this machine, and why"),
    "verify": Command("fusedce.commands.verify", "cli", "every op against its twin in fp64, on this device"),
    "tune": Command(
        "fusedce.commands.tune", "cli", "better tiles for an op and shape on this GPU, kept for later runs"
    ),
    "plan": Command("fusedce.plan.command", "train", "one layout for a model on some GPUs: memory, time, and why"),
    "bench": Command("fusedce.commands.bench", "bench", "times against the peers that are installed; from a checkout"),
    "train": Command("fusedce.train.run", "train", "[grpo|sft]: reinforcement learning on a checkable task, or text"),
}
# What the extras install; any other module that is missing is an error of ours.
EXTRAS = ("tyro", "rich", "matplotlib", "safetensors")
USAGE = "\n".join([
    "usage: fusedce [--version] <command> ...",
    "",
    *(f"  {name:<9}{command.about}" for name, command in COMMANDS.items()),
    "",
    "fusedce <command> --help lists a command's options, with examples. Exit codes: 0; 1 where what a command asks is",
    "answered with no, or an extra is missing; 2 for arguments that make no sense.",
])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name == "--version":
        from fusedce.version import __version__

        print(__version__)
        return 0
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    if name not in COMMANDS:
        print(f"fusedce: unknown command {name!r}\n\n{USAGE}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    try:
        run = importlib.import_module(command.module).main
        return run(rest, _measure) if name == "plan" else run(rest)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        print(f"fusedce {name} needs {error.name}: pip install 'fusedce[{command.extra}]'", file=sys.stderr)
        return 1


def _measure(answer: "Answer") -> "dict[str, Any]":
    """`fusedce plan --run`, which needs torch: the planner's room may not import it."""
    from fusedce.dryrun import measure

    return measure(answer)


if __name__ == "__main__":
    sys.exit(main())
