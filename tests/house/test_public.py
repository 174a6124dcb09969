"""What is public does not change unseen and has types throughout."""

import importlib
import inspect
import re

import pytest

from tests.house.public import LIST, MODULES, arguments_of, lines, names_of
from tests.house.source import read


def test_the_list_is_what_there_is() -> None:
    listed, found = LIST.read_text(encoding="utf-8").splitlines(), list(lines())
    gone, new = sorted(set(listed) - set(found)), sorted(set(found) - set(listed))
    assert not gone and not new, (
        "CONTRIBUTING.md has the deprecation rule; `python -m tests.house.public` writes the list"
    )
    assert listed == found and len(found) > 60


def test_arguments_are_listed_with_their_kinds() -> None:
    def given(a: int, b: int = 1, *, c: int, d: int = 2, **rest: int) -> None: ...

    def positional(*values: int, key: int) -> None: ...

    assert arguments_of(given) == "(a, b=…, *, c, d=…, **rest)"
    assert arguments_of(positional) == "(*values, key)" and arguments_of(3) == ""


@pytest.mark.parametrize("name", MODULES[:-1])
def test_every_public_name_is_there_and_not_of_another_package(name: str) -> None:
    module = importlib.import_module(name)
    assert len(names_of(module)) == len(set(names_of(module)))
    for public in names_of(module):
        home = inspect.getmodule(getattr(module, public))
        assert home is None or home.__name__.startswith("fusedce"), public


@pytest.mark.parametrize("name", MODULES)
def test_types_are_complete(name: str) -> None:
    """mypy's strictness covers the package; here, that no public function has a hole by an exception."""
    module = importlib.import_module(name)
    found = [getattr(module, public) for public in names_of(module) if inspect.isfunction(getattr(module, public))]
    for function in found:
        signature = inspect.signature(function)
        bare = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
        assert not bare and signature.return_annotation is not signature.empty, f"{function.__name__}: {bare}"


def test_the_settings_of_mypy_stay_strict() -> None:
    settings = read("pyproject.toml").split("[tool.mypy]")[1].split("[[")[0]
    assert "strict = true" in settings and 'packages = ["fusedce"]' in settings
    loosened = set(re.findall(r"^(\w+) = false$", settings, re.MULTILINE))
    assert loosened <= {
        "disallow_untyped_calls", "disallow_untyped_decorators", "warn_return_any",
        "warn_unused_ignores",
    }  # fmt: skip
