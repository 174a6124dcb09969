"""What docs/plan.md shows can be typed."""

import re
import shlex
import subprocess
import sys

import pytest

from fusedce import cli
from fusedce.plan.gpus import GPUS
from fusedce.plan.layout import POLICIES
from fusedce.plan.measured import ASSUMED, HBM_SHARE, LINK_SHARE
from fusedce.plan.models import MODELS
from tests.house.source import ROOT, read

PAGE = read("docs/plan.md")
LINES = re.findall(r"^fusedce (plan .*?)\s*#", PAGE, re.MULTILINE)


def test_commands_are_found() -> None:
    assert len(LINES) == 6


@pytest.mark.parametrize("line", LINES)
def test_command_runs(line: str, capsys) -> None:
    assert cli.main(shlex.split(line)) == 0
    assert capsys.readouterr().out


def test_python_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "linear CE" in done.stdout


def test_names_and_numbers_are_the_code_s() -> None:
    assert all(f"`{name}`" in PAGE for name in (*MODELS, *GPUS))
    for policy in POLICIES.values():
        assert re.search(rf"^\| `{policy.name}`.*\| {policy.static} \|$", PAGE, re.MULTILINE)
    shares = {"attention": "attention", "projections": "projections", "experts": "experts", "loss": "the loss"}
    assert all(f"{text} {ASSUMED[part]:.0%}".replace("%", " %") in PAGE for part, text in shares.items())
    assert f"links {LINK_SHARE:.0%}, HBM {HBM_SHARE:.0%}".replace("%", " %") in PAGE.replace("\n", " ")
