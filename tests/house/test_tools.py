"""The scripts behind the Makefile: a torch that is there stays, the right one is chosen, mistakes end in one line."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.house.source import ROOT, read


def load(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, list[tuple[str, ...]]]:
    """setup_env with a pip that installs nothing, and the list of what it was asked for."""
    module = load("setup_env")
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(module, "try_pip", lambda python, *arguments: asked.append(arguments) or True)
    return module, asked


def has(module: ModuleType, monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Let the environment have these distributions, and the modules that they own."""

    def probe(python, distributions=(), modules=()):
        owns = {"torch": "torch" in versions, "triton": any("triton" in name for name in versions)}
        named = {n.replace("_", "-"): v for n, v in versions.items()}
        return {
            "versions": {n: named.get(n) for n in distributions},
            "missing": [m for m in modules if not owns[m]],
        }

    monkeypatch.setattr(module, "probe", probe)


def constraints(arguments: tuple[str, ...]) -> list[str]:
    return Path(arguments[arguments.index("--constraint") + 1]).read_text().split()


def test_rocm_s_torch_and_triton_are_kept(setup, monkeypatch, tmp_path: Path) -> None:
    module, asked = setup
    (tmp_path / "bin").mkdir()
    has(module, monkeypatch, torch="2.12.0+rocm7.1", triton_rocm="3.7.0")
    module.install(str(tmp_path / "bin" / "python"), "")
    assert all(constraints(a) == ["torch==2.12.0+rocm7.1", "triton-rocm==3.7.0"] for a in asked)
    # No requirement names torch or triton outright, so pip has no reason to touch either.
    assert not [word for a in asked for word in a if re.match(r"(torch|triton)\b", word)]
    assert not [word for a in asked for word in a if ",triton" in word]


def test_a_cpu_torch_gets_the_triton_it_lacks(setup, monkeypatch, tmp_path: Path) -> None:
    module, asked = setup
    (tmp_path / "bin").mkdir()
    has(module, monkeypatch, torch="2.13.0+cpu")
    module.install(str(tmp_path / "bin" / "python"), "")
    assert asked[-1][2].endswith("[dev,train,bench,triton]")
    assert constraints(asked[-1]) == ["torch==2.13.0+cpu"]


@pytest.mark.parametrize(("gpu", "first"), [(True, "torch>=2.11"), (False, "torch==2.13.0+cpu")])
def test_torch_is_chosen_by_machine(setup, monkeypatch, gpu: bool, first: str) -> None:
    module, asked = setup
    monkeypatch.setattr(module, "has_gpu", lambda: gpu)
    module.install_torch("python", "")
    assert asked == [(first,)]


def test_torch_can_be_given(setup) -> None:
    module, asked = setup
    module.install_torch("python", "torch==2.14.1 --find-links wheels")
    assert asked == [("torch==2.14.1", "--find-links", "wheels")]


def test_no_cpu_build_in_sight_takes_the_usual_one(setup, monkeypatch) -> None:
    module, asked = setup
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    monkeypatch.setattr(module, "try_pip", lambda python, *a: asked.append(a) or not a[0].endswith("+cpu"))
    module.install_torch("python", "")
    assert asked == [("torch==2.13.0+cpu",), ("torch==2.13.0",)]


def test_failing_pip_ends_in_one_line(setup, monkeypatch) -> None:
    module, _ = setup
    monkeypatch.setattr(module, "try_pip", lambda python, *a: False)
    with pytest.raises(SystemExit, match="pip could not install"):
        module.pip("python", "no-such-package")


def test_python_without_venv_is_told(setup, monkeypatch, tmp_path: Path) -> None:
    module, _ = setup
    monkeypatch.setattr(module, "probe", lambda *_, **__: {"python": [3, 11], "missing": ["ensurepip"]})
    with pytest.raises(SystemExit, match="apt-get install python3-venv"):
        module.create("python3", tmp_path / "venv")


def test_every_make_target_is_in_the_help() -> None:
    makefile = read("Makefile")
    phony = re.search(r"\.PHONY: (.*)", makefile).group(1).split()
    assert set(phony) == set(re.findall(r"^([a-z-]+):.*  ## ", makefile, re.MULTILINE))


def test_stages_are_run_in_order_and_stop_at_a_failure(monkeypatch, capsys) -> None:
    stages = load("stages")
    ran: list[str] = []
    monkeypatch.setattr(stages, "run", lambda stage, jobs: ran.append(stage.name) or stage.name != "format")
    monkeypatch.setattr(stages.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(sys, "argv", ["stages.py", "lint"])
    with pytest.raises(SystemExit) as end:
        stages.main()
    assert end.value.code == 1
    assert ran == ["ruff", "format"]
    assert "not reached" in capsys.readouterr().out


def test_a_missing_tool_is_an_error_unless_it_is_allowed(monkeypatch, capsys) -> None:
    stages = load("stages")
    monkeypatch.setattr(stages.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["stages.py", "ruff"])
    with pytest.raises(SystemExit, match="needs ruff"):
        stages.main()
    monkeypatch.setattr(sys, "argv", ["stages.py", "ruff", "--allow-missing"])
    with pytest.raises(SystemExit) as end:
        stages.main()
    assert end.value.code == 0
    assert "not run: ruff is not installed" in capsys.readouterr().out


def test_ci_script_is_shell_without_errors() -> None:
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")]).returncode == 0


def test_readme_shows_what_was_measured() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "figures.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_figures_are_the_medians_and_the_latest_row_counts() -> None:
    figures = load("figures")
    row = {"op": "linear_ce", "case": "N8", "mode": "fwd", "metric": "time", "unit": "ms"}
    row |= {"gpu": "H200", "torch": "2.11", "triton": "3.6", "commit": "0123456789ab"}
    rows = [
        row | {"provider": "liger", "p50": "2.50001", "date": "2026-01-01"},
        row | {"provider": "fusedce-triton", "p50": "9", "date": "2026-01-01"},
        row | {"provider": "fusedce-triton", "p50": "1.25", "date": "2026-01-02"},
    ]
    text = figures.section(rows)
    assert "| case | mode | metric | fusedce-triton | liger |" in text
    assert "| N8 | fwd | time, ms | 1.25 | 2.5 |" in text
    assert text.startswith("**linear_ce** at 0123456, on H200, ")
    readme = f"a\n{figures.BEGIN}old\n{figures.END}\nb\n"
    assert figures.with_figures(readme, text) == f"a\n{figures.BEGIN}{text}{figures.END}\nb\n"
