"""Small runs on one thread, so that they are quick and repeat bitwise."""

from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fusedce.train import plot
from fusedce.train.config import GrpoConfig, ModelConfig, OptimConfig, SftConfig
from tests.train.forks import Server

TINY = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, ffn_size=16, num_experts=4)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Forks the ranks of the tests that ask for it."""
    server = Server("tests.train.toy", "tests.train.sharded_cases", "tests.train.single")
    yield server
    server.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than these runs; tests about the picture ask for `picture`."""
    if "picture" not in request.fixturenames:
        monkeypatch.setattr(plot, "draw", lambda *_: None)


@pytest.fixture
def picture() -> None:
    """Asked for by the tests that look at the drawn curve."""


@pytest.fixture
def console() -> Console:
    """A console that is no terminal; `console.file.getvalue()` is what it printed."""
    return Console(file=StringIO(), width=200)


@pytest.fixture
def grpo(tmp_path: Path) -> GrpoConfig:
    return GrpoConfig(
        steps=6, device="cpu", threads=1, out=str(tmp_path / "run"), save_every=2, eval_every=3, num_prompts=4,
        group_size=4, eval_prompts=16, model=TINY, optim=OptimConfig(warmup_steps=2),
    )  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of text files."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"file {number}: " + "the quick brown fox " * (20 + number))
    return folder


@pytest.fixture
def sft(tmp_path: Path, text: Path) -> SftConfig:
    return SftConfig(
        steps=6, device="cpu", threads=1, out=str(tmp_path / "run"), save_every=2, eval_every=3, data=str(text),
        seq_len=32, batch_size=4, eval_batches=2, model=replace(TINY, tied=True), optim=OptimConfig(warmup_steps=2),
    )  # fmt: skip
