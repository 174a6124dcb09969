"""The tree keeps every rule of rules.py, and every rule bites."""

import pytest

from tests.house.rules import RULES
from tests.house.source import Rule, folders, paths, read


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_tree_keeps(rule: Rule) -> None:
    broken = [f"{path}:{line}" for path in paths() if rule.speaks_of(path) for line in rule.find(read(path))]
    assert not broken, f"{rule.name}: {', '.join(broken)}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_bites(rule: Rule) -> None:
    assert list(rule.find(rule.bad)), f"{rule.name}: its own bad example passes"
    assert any(rule.speaks_of(path) for path in paths()), f"{rule.name}: speaks of no file that exists"


def test_no_folder_is_called_cuda() -> None:
    """hipify turns csrc/cuda/x.cu into csrc/hip/x.hip, over what lies there."""
    assert not [folder for folder in folders() if folder.split("/")[-1] == "cuda"]
