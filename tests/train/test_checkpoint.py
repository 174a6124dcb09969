"""Checkpoints: what comes back, what a damaged byte does, what a full disk leaves behind."""

import json
from pathlib import Path

import pytest
import torch

from fusedce.train import checkpoint
from fusedce.train import manifest as manifest_

STATE = {
    "model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(1, dtype=torch.bfloat16)},
    "optimizer": {"s": torch.tensor(3.0)},
}


def save(run: Path, *steps: int, keep: int = 3) -> None:
    for step in steps:
        checkpoint.save(run, step, {"lr": 0.1}, STATE, keep)


def test_round_trip(tmp_path: Path) -> None:
    save(tmp_path, 7)
    manifest, state = checkpoint.load(tmp_path / "step-000007")
    assert manifest.step == 7 and manifest.world == 1 and manifest.config == {"lr": 0.1}
    assert {k: v.keys() for k, v in state.items()} == {k: v.keys() for k, v in STATE.items()}
    for name, tensors in STATE.items():
        for key, value in tensors.items():
            assert torch.equal(state[name][key], value) and state[name][key].dtype == value.dtype
    assert (tmp_path / "latest" / "manifest.json").exists()


def test_old_ones_go_and_published_ones_stay_untouched(tmp_path: Path) -> None:
    (tmp_path / "step-000005.tmp").mkdir()  # left by a kill
    save(tmp_path, 1, 2, 9, 10, 5, keep=3)
    assert [p.name for p in checkpoint.published(tmp_path)] == ["step-000010", "step-000009", "step-000005"]
    with pytest.raises(RuntimeError, match="never overwritten"):
        save(tmp_path, 5)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
def test_damage_is_seen_and_the_one_before_is_taken(tmp_path: Path, file: str, damage: str) -> None:
    save(tmp_path, 1, 2)
    path = tmp_path / "step-000002" / file
    data = bytearray(path.read_bytes())
    for place in range(0, len(data), max(1, len(data) // 7)) if damage == "flip" else [0]:
        spoiled = bytearray(data)
        spoiled[place] ^= 1
        path.write_bytes({"flip": spoiled, "cut": data[:-1], "empty": b"", "gone": b""}[damage])
        if damage == "gone":
            path.unlink()
        with pytest.raises(checkpoint.CheckpointError, match="step-000002"):
            checkpoint.load(path.parent)
    said: list[str] = []
    manifest, state = checkpoint.load_newest(tmp_path, said.append)
    assert manifest.step == 1 and torch.equal(state["model"]["a"], STATE["model"]["a"])
    assert len(said) == 1 and "damaged" in said[0] and file in said[0]
    save(tmp_path, 2)  # the damaged one is out of the way
    assert checkpoint.load_newest(tmp_path, said.append)[0].step == 2


def test_another_format_and_an_empty_folder(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step-000001" / "manifest.json"
    body = json.loads(path.read_text()) | {"format": 99}
    del body["sha256"]
    path.write_text(json.dumps({"sha256": manifest_.seal(body), **body}))
    with pytest.raises(checkpoint.CheckpointError, match="format 99"):
        checkpoint.load(path.parent)
    with pytest.raises(checkpoint.OtherFormatError, match="format 99"):
        checkpoint.load_newest(tmp_path, print)
    assert path.exists(), "whole, and not to be put aside"
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint that can be read"):
        checkpoint.load_newest(tmp_path / "nothing", print)


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    write = checkpoint._write

    def full(path: Path, data: bytes) -> None:
        if path.name == "optimizer.safetensors":
            raise OSError(28, "No space left on device", str(path))
        write(path, data)

    monkeypatch.setattr(checkpoint, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["latest", "step-000001"]
    assert checkpoint.load(tmp_path / "latest")[0].step == 1
