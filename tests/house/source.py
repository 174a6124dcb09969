"""The files of the repository, and questions about their text and syntax that the house rules ask."""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What git would track, by kind: an unpacked source archive has no git to ask.
SUFFIXES = ("py", "md", "toml", "cff", "cpp", "h", "cuh", "cu", "in", "yaml")
KINDS = (*(f"*.{suffix}" for suffix in SUFFIXES), "Makefile", ".ci/run")
NOT_OURS = ("build", "dist", "runs", "node_modules")

Find = Callable[[str], Iterator[int]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Rule:
    """One rule of the house.

    files, allowed: patterns of the paths it speaks of and of those it lets off; find: the numbers of the lines of a
    text that break it; bad: a text that must break it, so that a rule that finds nothing is known to look.
    """

    name: str
    files: tuple[str, ...]
    find: Find
    bad: str
    allowed: tuple[str, ...] = ()

    def speaks_of(self, path: str) -> bool:
        """Whether the rule holds for a path relative to the root."""
        return any(fnmatch(path, p) for p in self.files) and not any(fnmatch(path, p) for p in self.allowed)


def paths() -> list[str]:
    """Every text file of ours, relative to the root."""
    return [p for p in _walk(ROOT) if any(fnmatch(p, kind) for kind in KINDS)]


def folders() -> list[str]:
    """Every folder of ours, relative to the root."""
    return sorted({str(parent) for p in _walk(ROOT) for parent in Path(p).parents})


def _walk(folder: Path) -> Iterator[str]:
    for entry in sorted(folder.iterdir()):
        hidden = entry.name.startswith(".") and entry.name != ".ci"
        if hidden or entry.name in NOT_OURS or entry.name == "__pycache__" or entry.name.endswith(".egg-info"):
            continue
        if entry.is_dir():
            if not (entry / "pyvenv.cfg").exists():
                yield from _walk(entry)
        else:
            yield str(entry.relative_to(ROOT))


def read(path: str) -> str:
    """The text of a file of ours."""
    return (ROOT / path).read_text(encoding="utf-8")


def lines_with(pattern: str) -> Find:
    """Finds the lines that a regular expression matches."""
    compiled = re.compile(pattern)

    def find(text: str) -> Iterator[int]:
        return (number for number, line in enumerate(text.splitlines(), 1) if compiled.search(line))

    return find


def more_lines_than(limit: int) -> Find:
    """Finds the line after the last that a file may have."""

    def find(text: str) -> Iterator[int]:
        if len(text.splitlines()) > limit:
            yield limit + 1

    return find


def functions(text: str) -> Iterator[Function]:
    """Every function of a Python text, inner ones and methods too."""
    return (node for node in ast.walk(ast.parse(text)) if isinstance(node, Function))


def is_kernel(function: Function) -> bool:
    """Whether Triton compiles it."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def parameters(function: Function) -> list[str]:
    """The names of its parameters, without self and cls."""
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if a]
    return [name for name in names if name not in ("self", "cls")]


def longer_than(limit: int, kernels: bool) -> Find:
    """Finds functions of more than `limit` lines, decorators and docstring aside; among kernels, or the others."""

    def find(text: str) -> Iterator[int]:
        for function in functions(text):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            length -= len(text.splitlines()[docstring_lines(function)])
            if is_kernel(function) == kernels and length > limit:
                yield function.lineno

    return find


def docstring_lines(function: ast.FunctionDef) -> slice:
    """The lines of a function's docstring, which may be as long as its subject."""
    first = function.body[0]
    if ast.get_docstring(function) is None:
        return slice(0, 0)
    return slice(first.lineno - 1, first.end_lineno)


def more_parameters_than(limit: int, except_names: frozenset[str]) -> Find:
    """Finds functions, kernels and `except_names` aside, with more than `limit` parameters."""

    def find(text: str) -> Iterator[int]:
        for function in functions(text):
            if function.name not in except_names and not is_kernel(function) and len(parameters(function)) > limit:
                yield function.lineno

    return find
