"""The lines of `fusedce doctor`: what is in order, what to know, what will not work, each with the reason."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fusedce import env
from fusedce.configs import tuned
from fusedce.doctor import facts
from fusedce.doctor.settings import SETTINGS
from fusedce.ops import registry

NUMA_BALANCING = Path("/proc/sys/kernel/numa_balancing")
ROCM_TRAINING = (
    "https://rocm.docs.amd.com/en/docs-6.3.3/how-to/rocm-for-ai/training/prerequisite-system-validation.html"
)
# What the package says of itself in pyproject.toml.
OLDEST = {"torch": (2, 11), "triton": (3, 6)}


@dataclass(frozen=True)
class Line:
    """One finding. status: "pass", "warn" or "fail"; source: where the reason is written, if not here."""

    status: str
    topic: str
    text: str
    source: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def examine(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[Line]:
    """Every finding about this process on `device`."""
    lines = [*_installed(device), *_machine(device)]
    try:
        env.default_backend(), env.workspace_bytes()
    except ValueError as error:
        return [*lines, *_settings(device), Line("fail", "settings", str(error), "docs/install.md")]
    return [*lines, *_backends(device, dtype), *_settings(device), *_tuned(device)]


def exit_code(lines: list[Line]) -> int:
    """1 if something will not work, else 0."""
    return int(any(line.status == "fail" for line in lines))


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, as far as they are numbers: "2.13.0+cpu" is (2, 13)."""
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal())


def _installed(device: torch.device) -> list[Line]:
    found, lines = facts.versions(), []
    for name, oldest in OLDEST.items():
        text = found[name]
        if name == "triton" and text == "none":
            status = "fail" if device.type == "cuda" else "warn"
            why = "a GPU build of torch brings it" if device.type == "cuda" else "a CPU needs none but for tests"
            lines.append(Line(status, name, f"not installed: {why}"))
        elif release(text) < oldest:
            needed = ".".join(map(str, oldest))
            lines.append(Line("fail", name, f"{text} is older than {needed}", "docs/install.md"))
        else:
            runtime = [f"{kind} {found[kind]}" for kind in ("cuda", "hip", "nccl") if found[kind] != "none"]
            lines.append(Line("pass", name, " ".join([text, *(runtime or ["CPU build"]) * (name == "torch")])))
    missing = found["extension"].startswith("none: ")
    # An addition, except where it was asked for.
    status = "warn" if missing and "not built" not in found["extension"] else "pass"
    lines.append(Line(status, "extension", found["extension"].removeprefix("none: "), "docs/install.md" * missing))
    return [Line("pass", "fusedce", f"{found['fusedce']}, Python {found['python']}, {found['platform']}"), *lines]


def _machine(device: torch.device) -> list[Line]:
    try:
        row = facts.machine(device)
    except (RuntimeError, AssertionError) as error:
        return [Line("fail", "device", f"torch cannot use {device}: {str(error).splitlines()[0]}")]
    if device.type != "cuda":
        return [
            Line("pass", "device", f"{row['name']}, {os.cpu_count()} cores: the eager backend, plain torch in chunks")
        ]
    memory = f"{row['memory_bytes'] / 2**30:.0f} GiB, driver {row['driver']}"
    lines = [Line("pass", "device", f"{row['count']} × {row['name']}, {memory}")]
    limits = (
        f"{row['wave_size']} lanes a wave, {row['num_units']} units, {row['shared_bytes'] >> 10} KiB of shared memory "
        f"and {row['max_threads']} threads a workgroup, {row['matrix_bf16']}"
    )
    known = row["arch"] != "generic"
    text = f"{row['arch']}: {limits}" if known else f"no table for this one, the tiles that fit anywhere: {limits}"
    lines.append(Line("pass" if known else "warn", "arch", text))
    if row["vendor"] == "amd":
        lines += [Line("warn", "arch", facts.AMD_UNTRIED, "docs/amd.md"), *_numa_balancing()]
    return lines


def _numa_balancing() -> list[Line]:
    """AMD asks for it to be off on MI300X."""
    if not NUMA_BALANCING.exists():
        return []
    value = NUMA_BALANCING.read_text(encoding="utf-8").strip()
    text = f"{NUMA_BALANCING} is {value}"
    if value == "0":
        return [Line("pass", "host", text)]
    why = "AMD recommends 0 for Instinct: the kernel moves pages about while GPUs use them"
    return [Line("warn", "host", f"{text}; {why}", ROCM_TRAINING)]


def _backends(device: torch.device, dtype: torch.dtype) -> list[Line]:
    lines = []
    for op in registry.OPS:
        try:
            choice = registry.choose(op, "auto", device, dtype)
        except RuntimeError as error:
            lines.append(Line("fail", op, str(error)))
            continue
        slow = device.type == "cuda" and choice.backend == "eager"
        lines.append(Line("warn" if slow else "pass", op, f"{choice.backend} ({choice.reason})"))
    return lines


def _settings(device: torch.device) -> list[Line]:
    vendor = ("amd" if torch.version.hip else "nvidia") if device.type == "cuda" else "cpu"
    lines = []
    for setting in SETTINGS:
        value = env.setting(setting.name)
        if value is None:
            continue
        text = f"{setting.name}={value}"
        if setting.vendor not in ("any", vendor):
            lines.append(Line("pass", "settings", f"{text}: of no effect on this device"))
            continue
        status = "warn" if setting.bad(value) else "pass"
        lines.append(Line(status, "settings", f"{text}: {setting.reason}", setting.source))
    return lines or [Line("pass", "settings", "no variable that changes how the kernels run")]


def _tuned(device: torch.device) -> list[Line]:
    if device.type != "cuda":
        return []
    state = tuned.state(facts.machine(device)["arch"])
    return [Line("warn" if state.ignored else "pass", "tiles", state.text)]
