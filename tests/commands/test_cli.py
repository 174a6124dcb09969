"""The front door: consistent help, exit codes, a missing extra in one line."""

import json
import re
import subprocess
import sys

import pytest
import tomllib

from fusedce import cli
from fusedce.ops import registry
from fusedce.version import __version__
from tests.house.source import ROOT, read

PARSED = ("doctor", "explain", "verify", "tune", "plan", "bench")


def test_the_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        assert cli.main(arguments) == 0
        printed = capsys.readouterr().out
        assert all(f"  {name} " in printed for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out == f"{__version__}\n"
    assert cli.main(["docter"]) == 2
    assert capsys.readouterr().err.startswith("fusedce: unknown command 'docter'\n\nusage: ")


@pytest.mark.parametrize("name", PARSED)
def test_help_has_examples_and_exit_codes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    printed = capsys.readouterr().out
    assert end.value.code == 0 and f"fusedce {name}" in printed and "--json" in printed
    assert re.search(r"Exit\s+codes", printed) and len(re.findall(rf"^\s+fusedce {name}", printed, re.MULTILINE)) >= 3


@pytest.mark.parametrize("name", PARSED)
def test_an_unknown_option_is_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([name, *(["linear_ce_sum"] if name == "tune" else []), "--no-such-option"])
    assert end.value.code == 2 and "--no-such-option" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_missing_extra_is_one_line(name: str) -> None:
    code = f"import sys; sys.modules['tyro'] = None; from fusedce import cli; sys.exit(cli.main([{name!r}]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    extra = cli.COMMANDS[name].extra
    assert done.stderr == f"fusedce {name} needs tyro: pip install 'fusedce[{extra}]'\n" and done.returncode == 1
    wanted = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"][extra]
    assert {"tyro", "rich"} <= {re.match(r"\w+", requirement).group() for requirement in wanted}


def test_another_missing_module_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fusedce.commands.explain", raising=False)
    monkeypatch.setitem(sys.modules, "fusedce.commands.common", None)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["explain"])


def test_explain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["explain", "moe_plan", "--device", "cpu"]) == 0
    assert "moe_plan on cpu, bfloat16: eager (the tensors are on the CPU)\n    triton: " in capsys.readouterr().out
    assert cli.main(["explain", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(registry.OPS) and found["moe_plan"]["backend"] == "eager"
    assert cli.main(["explain", "moe_plans"]) == 2
    assert "op is 'moe_plans'; expected one of linear_logprob, " in capsys.readouterr().err
    monkeypatch.setenv("FUSEDCE_BACKEND", "native")
    assert cli.main(["explain", "--device", "cpu"]) == 2
    assert "cannot run" in capsys.readouterr().err
