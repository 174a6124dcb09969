"""The model's weights, whole or this rank's part of them: drawn from a seed, loaded, gathered.

Each weight, and each expert of one, has random numbers of its own name: the same weights on any number of ranks.
"""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fusedce import checks
from fusedce.distributed.collectives import local_part
from fusedce.train.config import ConfigError
from fusedce.train.model import LM

INIT_STD = 0.02  # of embeddings and head: a fresh model's next token is all but uniform

Where = tuple[slice, ...]


def part(parameter: Tensor) -> Where:
    """Which rows and columns of the whole weight this rank has: all of them, or those of a DTensor's shard."""
    bounds = [(0, size) for size in parameter.shape]
    if checks.is_distributed(parameter):
        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        # The last dimension (ep) cuts first, FSDP cuts its part once more; both as torch.chunk does.
        for dim in reversed(range(mesh.ndim)):
            placement = parameter.placements[dim]  # type: ignore[attr-defined]
            if not placement.is_replicate():
                first, last = bounds[placement.dim]
                rows = -(-(last - first) // mesh.size(dim))
                start = min(first + rows * mesh.get_local_rank(dim), last)
                bounds[placement.dim] = start, min(start + rows, last)
    return tuple(slice(*bound) for bound in bounds)


@torch.no_grad()
def init_weights(model: LM, seed: int) -> LM:
    """Draw all weights; the model itself. Norms are 1, embeddings and head normal, the rest uniform in ±1/√inputs."""
    for name, parameter in model.named_parameters():
        local, where = local_part(parameter), part(parameter)
        if parameter.dim() < 3:
            local.copy_(_drawn(name, parameter.shape, seed)[where])
            continue
        for row, expert in enumerate(range(where[0].start, where[0].stop)):  # only the experts that are here
            local[row].copy_(_drawn(f"{name}[{expert}]", parameter.shape[1:], seed)[where[1:]])
    return model


def _drawn(name: str, shape: torch.Size, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    if "norm" in name:
        return torch.ones(shape)
    if name.startswith(("embed", "positions", "head")):
        return torch.randn(shape, generator=generator) * INIT_STD
    return (torch.rand(shape, generator=generator) * 2 - 1) * shape[-1] ** -0.5


def whole(parameter: Tensor) -> Tensor:
    """All of a weight, or of a tensor placed like one, on every rank; of a DTensor by a collective call."""
    tensor = parameter.detach()
    return tensor.full_tensor() if checks.is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def load_weights(model: LM, tensors: Mapping[str, Tensor]) -> None:
    """Take this rank's part of weights, whole or DTensors placed as the model's; ConfigError where a name or shape is
    not the model's."""
    parameters = dict(model.named_parameters())
    for name in sorted(parameters.keys() ^ tensors.keys()):
        where = "the checkpoint" if name in parameters else "the model"
        raise ConfigError(
            f"model: {where} has no {name}; pass the --model options that the checkpoint was trained with"
        )

    def read(name: str, where: Where) -> Tensor:
        return local_part(tensors[name]) if checks.is_distributed(tensors[name]) else tensors[name][where]

    copy_weights(model, read, {name: tensor.shape for name, tensor in tensors.items()})


@torch.no_grad()
def copy_weights(model: LM, read: Callable[[str, Where], Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Fill every weight with read(name, where): the part of the whole one that is this rank's. ConfigError for a shape
    that is not the model's.
    """
    for name, parameter in model.named_parameters():
        if parameter.shape != shapes[name]:
            here, there = tuple(parameter.shape), tuple(shapes[name])
            raise ConfigError(f"model: {name} is {here} here and {there} in the checkpoint; pass its --model options")
        local_part(parameter).copy_(read(name, part(parameter)))
