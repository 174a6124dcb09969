"""The blocks of the pages that are about transformers, with transformers; the others are run by tests/pages."""

import types
from typing import Any

import pytest
import torch

from fusedce.integrations.transformers import fuse_lm_head
from tests.integrations.tiny import tiny
from tests.pages.blocks import blocks
from tests.pages.test_python import WITH_TRANSFORMERS

FAMILY = {
    ("README.md", 1): "qwen3-moe",
    ("docs/integrations.md", 1): "llama",
    ("docs/integrations.md", 2): "llama",
    ("docs/moe.md", 2): "qwen3-moe",
}


class Trainer:
    """Stands for any trainer whose model is fused: it takes one loss."""

    def __init__(self, model: Any, *_: Any) -> None:
        self.model = model

    def train(self) -> None:
        ids = torch.randint(3, 90, (2, 9))
        self.model(input_ids=ids, labels=ids).loss.backward()


def test_these_are_the_blocks() -> None:
    assert set(FAMILY) == WITH_TRANSFORMERS


@pytest.mark.parametrize("key", FAMILY, ids=str)
def test_block_runs(key: tuple[str, int]) -> None:
    (block,) = [block for block in blocks("python") if block.key == key]
    model, ids = tiny(FAMILY[key]), torch.randint(3, 90, (2, 9))
    if key == ("docs/integrations.md", 2):
        fuse_lm_head(model)  # the page has done so by then
    names = {"model": model, "ids": ids, "mask": torch.ones_like(ids), "Trainer": Trainer}
    # The page's "…" stands for a trainer's other arguments.
    text = block.text.replace("model=model, ...", "model=model")
    types.FunctionType(compile(text, block.page, "exec"), names)()
    if key == ("docs/integrations.md", 2):
        assert names["out"].logprob.shape == ids.shape
    assert model(input_ids=ids, labels=ids).loss.isfinite()
