"""The seeded faults of tools/mutants.py still fit the code and the tests, without running any of them."""

import ast
import shlex
import sys
from pathlib import Path

import pytest

from tests.house.source import functions, read
from tests.house.test_tools import load

TOOL = load("mutants")
MUTANTS = TOOL.mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fits(mutant) -> None:  # type: ignore[no-untyped-def]
    """Its old text is in its file exactly once, what comes out is Python and differs, and its tests are there."""
    assert mutant.stale() is None
    text = read(mutant.file)
    assert ast.dump(ast.parse(text.replace(mutant.old, mutant.new))) != ast.dump(ast.parse(text))
    names = [word for word in shlex.split(mutant.tests) if "::" in word]
    assert names
    for name in names:
        path, test = name.split("[")[0].split("::")
        assert test in names_of_tests(path), f"{path} has no {test}"


def names_of_tests(path: str) -> set[str]:
    """The tests of a file: its own, and those of the files that it imports from."""
    tree, found = ast.parse(read(path)), {function.name for function in functions(read(path))}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.test_"):
            theirs = {function.name for function in functions(read(node.module.replace(".", "/") + ".py"))}
            given = {alias.name for alias in node.names}
            found |= theirs if "*" in given else theirs & given
    return found


def test_there_are_mutants_of_every_kind() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.file.split("/")[1] for mutant in MUTANTS} >= {
        "eager", "triton", "ops", "functional", "rows.py", "chunked.py",
    }  # fmt: skip


def test_a_stale_mutant_is_told(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("x = 1\nx = 1\n")
    fault = dict(file="code.py", new="x = 2", breaks="x", tests="t.py::t")
    twice, once = TOOL.Mutant("twice", old="x = 1", **fault), TOOL.Mutant("once", old="x = 1\nx", **fault)
    with pytest.raises(ValueError, match="twice: its old text is in code.py 2 times; expected 1"):
        twice.apply(tmp_path)
    once.apply(tmp_path)
    assert (tmp_path / "code.py").read_text() == "x = 2 = 1\n"


def test_a_survivor_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By exit codes of pytest: 1 is a kill, 0 a survivor, 5, nothing collected, neither."""
    codes = {MUTANTS[0].name: 1, MUTANTS[1].name: 0, MUTANTS[2].name: 5}
    monkeypatch.setattr(TOOL, "mutants", lambda: MUTANTS[:3])
    monkeypatch.setattr(TOOL, "run", lambda tests, mutant: (codes[mutant.name] if mutant else 0, "last words"))
    monkeypatch.setattr(sys, "argv", ["mutants.py"])
    with pytest.raises(SystemExit) as end:
        TOOL.main()
    printed = capsys.readouterr().out
    assert end.value.code == 1 and "1 of 3 mutants killed" in printed
    assert f"SURVIVED         0 s  {MUTANTS[1].name}" in printed and "no verdict" in printed and "last words" in printed
    monkeypatch.setattr(TOOL, "run", lambda tests, mutant: (1, "it fails anyway"))
    with pytest.raises(SystemExit, match="without any mutant these tests do not pass"):
        TOOL.main()
