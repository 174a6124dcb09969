"""Router replay: a forward that takes the experts which another forward chose, and weighs them by its own scores.

A rollout engine in bf16 now and then chooses another expert than the trainer: a token's log-prob then jumps. Replayed
are the ids alone, from the rollout (R3) or from the policy before its updates (R2); the weights are gathered from live
scores (`fusedce.moe_replay`), so that the router learns. How far the two are apart: `route_flips`, and `mismatch_kl` of
`losses.policy_loss`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fusedce.functional import Routing
from fusedce.nn import Router

Choices = list[Tensor]  # of each router in the order of the model's modules: (B, S, K) int64


@contextmanager
def recorded(model: nn.Module, num_rows: int) -> Iterator[Choices]:
    """What the routers of `model` choose inside, for batches of `num_rows` rows; filled at the end.

    Several forwards are one after the other in S, as a generation's with a cache: the prompt, then each new token. The
    last token that was drawn went through no forward: S is that of `ids[:, :-1]`.
    """
    routers = _routers(model)
    parts: list[list[Tensor]] = [[] for _ in routers]
    choices: Choices = []

    def keep(row: int) -> Any:
        def hook(module: nn.Module, args: Any, routing: Routing) -> None:
            parts[row].append(routing.top_k_index.detach().unflatten(0, (num_rows, -1)))

        return hook

    handles = [router.register_forward_hook(keep(row)) for row, router in enumerate(routers)]
    try:
        yield choices
    finally:
        for handle in handles:
            handle.remove()
    choices.extend(torch.cat(each, 1) for each in parts)


@contextmanager
def replayed(model: nn.Module, choices: Choices) -> Iterator[None]:
    """Inside, the routers of `model` take `choices`, forward and recompute alike: run the backward inside as well.

    The forward's batch is that of the choices, B rows of S tokens; of a micro-batch, their rows. ValueError where the
    model has another number of routers; a number of tokens that is not B·S is told by `moe_replay`.
    """
    routers = _routers(model)
    if len(routers) != len(choices):
        raise ValueError(f"fusedce.train: choices of {len(choices)} routers for a model of {len(routers)}")

    def give(index: Tensor) -> Any:
        return lambda module, args, options: ((args[0], index.flatten(0, 1), *args[2:]), options)

    handles = [
        router.register_forward_pre_hook(give(index), with_kwargs=True)
        for router, index in zip(routers, choices, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rows(choices: Choices, part: slice) -> Choices:
    """The choices of some rows of the batch."""
    return [index[part] for index in choices]


def route_flips(ours: Choices, theirs: Choices, mask: Tensor | None = None) -> Tensor:
    """() fp32: the share of slots whose expert the other side did not choose for that token, over all routers.

    mask: (B, S) bool, the tokens to look at; None for all. 0 without any.
    """
    flips = [(a[..., :, None] != b[..., None, :]).all(-1).float().mean(-1) for a, b in zip(ours, theirs, strict=True)]
    by_token = torch.stack(flips).mean(0)
    weights = torch.ones_like(by_token) if mask is None else mask.float()
    return (by_token * weights).sum() / weights.sum().clamp(min=1)


def _routers(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]
