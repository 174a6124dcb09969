"""Tasks and text: right answers, held-out data that training never sees, an order that resumes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusedce.train import data, tasks
from fusedce.train.config import ConfigError, SftConfig

TASKS = [tasks.Task(name, alphabet, length) for name in tasks.SOLUTIONS for alphabet, length in
         (("digits", 2), ("digits", 4), ("letters", 2), ("letters", 12))]  # fmt: skip


def strings(prompts: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(row) for row in prompts[:, 1:-1].tolist()}


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_held_out_strings_are_never_trained_on(task: tasks.Task) -> None:
    held_out, _ = task.held_out(200)
    assert len(held_out) == len(strings(held_out)) > 0
    trained = set()
    for seed in range(20):
        prompts, _ = task.training(500, torch.Generator().manual_seed(seed))
        assert prompts.shape == (500, task.length + 2)
        trained |= strings(prompts)
    assert not trained & strings(held_out)
    assert torch.equal(held_out, task.held_out(200)[0])


def test_a_tenth_is_held_out() -> None:
    every = torch.cartesian_prod(*[torch.arange(10)] * 4)
    assert 0.08 < tasks.is_held_out(every).float().mean() < 0.12


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_answers_and_token_ids(task: tasks.Task) -> None:
    prompts, truth = task.training(50, torch.Generator().manual_seed(0))
    assert int(prompts.min()) >= 0 and int(prompts.max()) == task.num_tokens - 1
    for prompt, answer in zip(prompts.tolist(), truth.tolist(), strict=True):
        assert answer == (prompt[-2:0:-1] if task.name == "reverse" else sorted(prompt[1:-1]))


def test_rewards() -> None:
    truth = torch.tensor([[1, 2, 3, 4]] * 3)
    answers = torch.tensor([[1, 2, 3, 4], [1, 2, 4, 3], [4, 3, 2, 1]])
    assert tasks.rewards(answers, truth).tolist() == [1.0, 0.25, 0.0]
    assert tasks.exact(answers, truth).tolist() == [1.0, 0.0, 0.0]
    assert (
        tasks.Task("reverse", "digits", 3).show(torch.tensor([10, 1, 2, 3, 11]), torch.tensor([3, 2, 1]))
        == "123 -> 321"
    )
    assert tasks.Task("sort", "digits", 2).show(torch.tensor([10, 1, 2, 11]), torch.tensor([12, 1])) == "12 -> ?1"


def test_packed_windows_cover_the_text_once_an_epoch(sft: SftConfig) -> None:
    stream, _ = data.read(sft.data)
    packed = data.Packed(stream, sft, "training")
    per_epoch = packed.num_windows // sft.batch_size
    epochs = [[packed.batch(step) for step in range(e * per_epoch, (e + 1) * per_epoch)] for e in range(2)]
    rows = [{tuple(row) for ids, _ in epoch for row in ids.tolist()} for epoch in epochs]
    whole = {tuple(stream[i * 32 : (i + 1) * 32].tolist()) for i in range(packed.num_windows)}
    assert rows[0] <= whole and len(whole - rows[0]) < sft.batch_size
    assert not torch.equal(epochs[0][0][0], epochs[1][0][0]), "each epoch has its own order"
    ids, target = packed.batch(3)
    assert torch.equal(ids[:, 1:], target[:, :-1])
    assert torch.equal(ids, data.Packed(stream, sft, "training").batch(3)[0])


def test_files_are_split_by_name(text: Path) -> None:
    training, held_out = data.read(str(text))
    assert (training == data.END).sum() + (held_out == data.END).sum() == 30
    assert (held_out == data.END).sum() > 0
    (text / "0.txt").write_text("changed")
    assert (data.read(str(text))[1] == data.END).sum() == (held_out == data.END).sum()


def test_the_standard_library_is_text() -> None:
    training, held_out = data.read("")
    assert len(training) > 1_000_000 and len(held_out) > 50_000
    assert int(training.max()) == data.END == data.NUM_TOKENS - 1
    assert b"import " in bytes(held_out[held_out < 256].to(torch.uint8).tolist())


def test_one_file_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x" * 999)
    training, held_out = data.read(str(file))
    assert (len(training), len(held_out)) == (900, 100)


def test_too_little_text(sft: SftConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a batch takes 4 × 32"):
        data.Packed(torch.arange(100), sft, "training")
    with pytest.raises(ConfigError, match="data: no .py, .txt, .md file"):
        data.read(str(tmp_path / "nothing"))
    (tmp_path / "text" / "empty.txt").write_text("")
    assert len(data.read(replace(sft).data)[0]) > 1000
