"""What the pages say to type can be typed: commands, options, make targets, stages, modules, extras and files exist."""

import contextlib
import importlib
import importlib.util
import io
import re
import shlex

import pytest
import tomllib
import tyro

from fusedce import cli
from fusedce.plan.command import EXAMPLES, PlanConfig
from fusedce.train.run import parse as parse_train
from tests.house.source import ROOT, read
from tests.pages.blocks import Block, blocks, inline, languages, words_of
from tools.stages import GROUPS, STAGES

# Pictures made of letters.
DIAGRAMS = {("CONTRIBUTING.md", 0), ("docs/expert_parallel.md", 0)}
PARSED = ("doctor", "explain", "verify", "tune", "bench")
EXTRAS = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
TARGETS = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
LINES = [(block, line) for block in blocks("") if block.key not in DIAGRAMS for line in block.text.splitlines() if line]


def config_of(name: str) -> type:
    """The config of a command's module."""
    module = importlib.import_module(f"fusedce.commands.{name}")
    return getattr(module, f"{name.title()}Config")


def options_of(name: str) -> set[str]:
    """The options that a command's help lists."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit):
        cli.main([name, "--help"])
    if name == "train":
        with contextlib.redirect_stdout(said), pytest.raises(SystemExit):
            cli.main(["train", "sft", "--help"])
    return set(re.findall(r"--[a-z][a-z.-]*", said.getvalue()))


def check_fusedce(words: list[str], whole: bool) -> None:
    """whole: nothing is left out or stands for something else, so that it must parse."""
    if words[0].startswith("--"):
        assert words in (["--version"], ["--help"])
        return
    name, *rest = words
    assert name in cli.COMMANDS
    given = {word.split("=")[0] for word in rest if word.startswith("--")} - {"--help"}
    assert given <= options_of(name), given
    if not whole or "--help" in rest:
        return
    if name == "train":
        parse_train(rest)
    else:
        tyro.cli(PlanConfig if name == "plan" else config_of(name), args=rest)


def check_python(words: list[str]) -> None:
    """python -m module, python file, python tools/stages.py name …; -c is not looked into."""
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) or (ROOT / words[1].replace(".", "/")).exists(), words[1]
        paths = [word for word in words[2:] if word.startswith(("tests", "tools"))]
    elif words[0] == "-c":
        paths = []
    else:
        paths = words[:1]
        if words[0] == "tools/stages.py":
            known = {stage.name for stage in STAGES} | set(GROUPS)
            assert set(words[1:]) <= known | {"NAME", "…"}, words
    assert all((ROOT / path.split("::")[0]).exists() for path in paths), paths


def check(words: list[str], whole: bool) -> None:
    """One command line."""
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, *rest = words
    if program == "rocprofv3":  # AMD's own, before what it profiles
        check(rest[rest.index("--") + 1 :], whole)
    elif program == "fusedce":
        check_fusedce(rest, whole)
    elif program == "make":
        targets = [word for word in rest if re.fullmatch(r"[a-z-]+", word)]
        assert targets and set(targets) <= TARGETS, targets
    elif program == "python":
        check_python(rest)
    elif program == "torchrun":
        assert "-m" in rest and importlib.util.find_spec(rest[rest.index("-m") + 1])
    else:
        assert program == "pip" and rest[0] == "install", words
        assert set(re.findall(r"\[([\w,]+)\]", " ".join(rest))) <= set(EXTRAS)


def test_every_block_is_of_a_language_that_is_looked_at() -> None:
    assert languages() == {"", "python"}
    assert {block.key for block in blocks("")} > DIAGRAMS


@pytest.mark.parametrize(("block", "line"), LINES, ids=lambda value: str(value)[:40])
def test_a_line_can_be_typed(block: Block, line: str) -> None:
    check(words_of(line), whole=True)


def test_commands_in_running_text_exist() -> None:
    found = inline()
    assert len(found) > 20
    for page, span in found:
        try:
            check(shlex.split(span.replace("…", "")), whole=False)
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"{page}: `{span}`: {error}") from error


@pytest.mark.parametrize("name", PARSED)
def test_every_example_of_a_command_s_help_parses(name: str) -> None:
    about = importlib.import_module(f"fusedce.commands.{name}").ABOUT
    lines = re.findall(rf"^  (fusedce {name}\b.*)$", about, re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        check(words_of(line), whole=True)
    assert EXAMPLES.count("  fusedce plan ") >= 5


@pytest.mark.parametrize(
    "line",
    ["fusedce prove", "fusedce verify --ops x", "fusedce tune", "make tests", "python -m bench.moes",
     "python tools/stages.py cpus", "python tools/stage.py", "pip install '.[trains]'", "conda install fusedce",
     "torchrun -m bench.expert"],
)  # fmt: skip
def test_the_check_bites(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((AssertionError, SystemExit)):
        check(words_of(line), whole=True)
    capsys.readouterr()


def test_a_command_s_words_end_where_its_comment_begins() -> None:
    assert words_of("fusedce train --task sort  sorts") == ["fusedce", "train", "--task", "sort"]
    assert words_of("pip install '.[cli]' # and more") == ["pip", "install", ".[cli]"]
