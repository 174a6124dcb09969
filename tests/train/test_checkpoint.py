"""Checkpoints: what comes back, what a damaged byte does, what a full disk leaves behind."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fusedce.train import checkpoint
from fusedce.train import manifest as manifest_
from fusedce.train.export import export

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
    assert os.readlink(tmp_path / "latest") == "step-000001"
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
    with pytest.raises(checkpoint.UnreadableHereError, match="format 99"):
        checkpoint.load_newest(tmp_path, print)
    assert path.exists(), "whole, and not to be put aside"
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint that can be read"):
        checkpoint.load_newest(tmp_path / "nothing", print)


def forge(folder: Path, change: str) -> None:
    """Alter a manifest and seal it again, as one does who means harm."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    del body["sha256"]
    entry = body["tensors"]["model"]["a"]
    part = entry["parts"]["model.safetensors"]
    if change == "outside":
        body["files"]["../other.safetensors"] = body["files"].pop("model.safetensors")
    if change == "pickle":
        body["files"][".metadata"] = body["files"]["model.safetensors"]
    if change == "dtype":
        entry["dtype"] = "__class__"
    if change == "other dtype":
        entry["dtype"] = "int32"
    if change == "beyond":
        part["start"] = [1, 0]
    if change == "huge":
        entry["shape"] = [10**9, 10**9]
    if change == "negative":
        part["shape"] = [-2, 3]
    if change == "missing":
        del body["tensors"]["model"]["b"]["shape"]
    if change == "no such file":
        entry["parts"] = {"x.safetensors": part}
    if change == "no such tensor":
        body["tensors"]["model"]["c"] = entry
    if change == "a list":
        body["tensors"] = []
    if change == "step":
        body["step"] = 7
    path.write_text(json.dumps({"sha256": manifest_.seal(body), **body}))


FORGED = (
    """outside pickle dtype beyond huge negative missing a-list step no-such-file no-such-tensor other-dtype""".split()
)


@pytest.mark.parametrize("change", [name.replace("-", " ") for name in FORGED])
def test_a_forged_manifest_reads_nothing_it_should_not(tmp_path: Path, change: str) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "step-000001"
    (tmp_path / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    checkpoint.load(folder)
    forge(folder, change)
    with pytest.raises(checkpoint.CheckpointError, match="manifest"):
        checkpoint.load(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "null", "[1]", '{"sha256": 1e999}', '{"a": NaN}'])
def test_a_manifest_that_is_none(tmp_path: Path, text: str) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-000001" / "manifest.json").write_text(text)
    with pytest.raises(checkpoint.CheckpointError, match=r"manifest\.json: "):
        checkpoint.load(tmp_path / "step-000001")


def test_fs_a06_no_pickle_is_read(tmp_path: Path) -> None:
    """The `.metadata` of torch's own checkpoints, one that makes a file when it is read: nothing looks at it."""
    save(tmp_path, 1)
    folder, proof = tmp_path / "step-000001", tmp_path / "proof"
    bomb = f"cos\nmkdir\n(V{proof}\ntR.".encode()
    for name in (".metadata", "__0_0.distcp", "model.pt"):
        (folder / name).write_bytes(bomb)
    assert checkpoint.load(folder)[0].step == 1 and not proof.exists()
    (folder / "model.safetensors").write_bytes(bomb)
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.load(folder)
    assert not proof.exists()


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """A pipe would be waited for until someone writes to it."""
    save(tmp_path, 1)
    path = tmp_path / "step-000001" / "model.safetensors"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(checkpoint.CheckpointError, match="not a file"):
        checkpoint.load(path.parent)


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    """Scalars, nothing at all, strided, requiring a gradient, every dtype; alone and among others."""
    whole = torch.arange(12.0).view(3, 4)
    tensors = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "strided": whole.T,
        "flag": torch.tensor([True]),
    }
    tensors |= {"grad": whole.clone().requires_grad_(), "part": whole[1:, ::2]}
    tensors |= {name: torch.arange(3).to(dtype) for name, dtype in manifest_.DTYPES.items()}
    for step, kind in enumerate(tensors):
        checkpoint.save(tmp_path, step, {}, {"model": {kind: tensors[kind]}, "optimizer": {}}, keep=99)
    checkpoint.save(tmp_path, 99, {}, {"model": tensors, "optimizer": {}}, keep=99)
    loaded = checkpoint.load(tmp_path / "step-000099")[1]
    assert loaded["optimizer"] == {} and loaded["model"].keys() == tensors.keys()
    for step, (name, tensor) in enumerate(tensors.items()):
        alone = checkpoint.load(tmp_path / f"step-{step:06d}")[1]["model"][name]
        for value in (loaded["model"][name], alone):
            assert value.dtype == tensor.dtype and value.shape == tensor.shape
            assert torch.equal(value.double(), tensor.detach().double())


@pytest.mark.parametrize("max_bytes", [10**9, 24])
def test_export(tmp_path: Path, max_bytes: int) -> None:
    """One file or several with an index; renamed and unpacked on the way; never half there."""
    save(tmp_path, 1)

    def rename(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        return [(f"rows.{i}", row) for i, row in enumerate(tensor)] if name == "a" else [(name, tensor)]

    files = export(tmp_path / "latest", tmp_path / "hf", rename, max_bytes)
    found = {key: value for file in files for key, value in load_file(file).items()}
    assert found.keys() == {"rows.0", "rows.1", "b"}
    assert torch.equal(torch.stack((found["rows.0"], found["rows.1"])), STATE["model"]["a"])
    names = {p.name for p in (tmp_path / "hf").iterdir()}
    if max_bytes > 100:
        assert names == {"model.safetensors"}
    else:
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == found.keys() and len(files) == 2
        assert all(key in load_file(tmp_path / "hf" / file) for key, file in index["weight_map"].items())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    with pytest.raises(OSError):
        export(tmp_path / "latest", tmp_path / "hf")
    assert names == {p.name for p in (tmp_path / "hf").iterdir()} and not (tmp_path / "hf.tmp").exists()


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    write = checkpoint.write_file

    def full(path: Path, data: bytes) -> None:
        if path.name == "optimizer.safetensors":
            raise OSError(28, "No space left on device", str(path))
        write(path, data)

    monkeypatch.setattr(checkpoint, "write_file", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["latest", "step-000001"]
    assert checkpoint.load(tmp_path / "latest")[0].step == 1
