"""A checkpoint's weights as the safetensors files that transformers and rollout engines read."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors.torch import save as bytes_from_tensors
from torch import Tensor

from fusedce.train import checkpoint

Rename = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]


def export(
    folder: Path,
    out: Path,
    rename: Rename = lambda name, tensor: [(name, tensor)],
    max_bytes: int = 5 * 10**9,
) -> list[Path]:
    """Write the model of checkpoint `folder`, by any number of processes, to a new folder `out`; the files.

    rename: a parameter to what stands for it in the export, such as experts unpacked one by one. max_bytes: of a file,
    unless a single tensor is larger. One file is model.safetensors; several are named in model.safetensors.index.json.

    One process's work, with the whole model in host memory. Raises CheckpointError as `checkpoint.load`, and OSError
    with `out` not there.
    """
    tensors = checkpoint.load_alone(folder, ("model",))[1]["model"]
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in (pair for item in tensors.items() for pair in rename(*item)):
        if files[-1] and size + tensor.nbytes > max_bytes:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    names = names if len(files) > 1 else ["model.safetensors"]
    unfinished = out.with_name(out.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        for name, held in zip(names, files, strict=True):
            data = bytes_from_tensors({k: t.contiguous() for k, t in held.items()}, {"format": "pt"})
            checkpoint.write_file(unfinished / name, data)
        if len(files) > 1:
            places = {k: name for name, held in zip(names, files, strict=True) for k in held}
            total = sum(t.nbytes for held in files for t in held.values())
            index = {"metadata": {"total_size": total}, "weight_map": places}
            checkpoint.write_file(unfinished / "model.safetensors.index.json", json.dumps(index, indent=1).encode())
        checkpoint.sync(unfinished)
        unfinished.rename(out)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    checkpoint.sync(out.parent)
    return [out / name for name in names]
