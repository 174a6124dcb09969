"""No test is left out: every marker that keeps a test out of a plain `pytest` is picked up by a stage."""

import re

from tests.house.source import read
from tools.stages import NATIVE


def test_every_marker_has_a_stage() -> None:
    settings, stages = read("pyproject.toml"), read("tools/stages.py")
    stages = stages.replace("{NATIVE}", NATIVE)
    (left_out,) = re.findall(r'-m "(not [^"]*)"', settings)
    for marker in re.findall(r"not (\w+)", left_out):
        if marker == "bench":  # times things; `python -m bench.…` is run by hand, its smoke case by a stage
            assert "bench-linear-ce" in stages and "bench-moe" in stages
        else:
            assert re.search(rf"-m '?[^\"]*(?<!not ){marker}\b", stages), f"no stage runs the tests marked {marker}"
    assert "tests/interpret -m 'interpret and not gpu'" in stages
