"""`fusedce doctor`: findings as lines, or as JSON."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusedce.commands.common import STYLES, command, device_named, print_json
from fusedce.doctor import examine, exit_code, facts

ABOUT = """What is installed, which backend runs each op and why, the GPU and its limits, the settings that are traps.
Runs on a CPU, NVIDIA and AMD GPUs (not yet run on AMD hardware by us). Changes nothing.
Exit codes: 0, also with warnings; 1 if something will not work; 2 for arguments that make no sense.

  fusedce doctor                   on the GPU if there is one
  fusedce doctor --device cpu
  fusedce doctor --json            for programs, and for reports of a fault"""


@dataclass(frozen=True)
class DoctorConfig:
    """The command line."""

    device: str = ""
    """cpu, cuda or cuda:N; left out, the current GPU if there is one, else the CPU"""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """of the operands, for the choice of backends"""
    json: bool = False
    """print one JSON object instead"""


def run(config: DoctorConfig) -> int:
    """Examine and show."""
    device = device_named(config.device)
    lines = examine(device, getattr(torch, config.dtype))
    if config.json:
        found = {"versions": facts.versions(), "machine": facts.machine(device), "ok": not exit_code(lines)}
        print_json({**found, "lines": [line.as_dict() for line in lines]})
        return exit_code(lines)
    table = Table(box=None, show_header=False, pad_edge=False)
    for line in lines:
        text = Text(line.text)
        if line.source:
            text.append(f"  {line.source}", style="dim")
        table.add_row(Text(line.status, style=STYLES[line.status]), line.topic, text)
    console, count = Console(), Counter(line.status for line in lines)
    console.print(table)
    console.print(f"{count['pass']} pass, {count['warn']} warn, {count['fail']} fail", highlight=False)
    return exit_code(lines)


main = command("doctor", DoctorConfig, ABOUT, run)
