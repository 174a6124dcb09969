"""What crosses between the ranks for a token: the dispatchers as rows of one table, and the choice among them.

Each takes the same way: rows for every rank, out by one collective a chunk, and as many rows back by one all-to-all.
They differ in which tokens a rank is sent, so in how many rows cross, and in nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DISPATCHERS", "Dispatcher", "choose_dispatcher"]


@dataclass(frozen=True)
class Dispatcher:
    """How tokens reach the ranks of their experts.

    once_per_rank: a row stands for all the experts of a token on a rank, K slots of which those elsewhere take no part,
    and comes back as their weighted sum; else for one expert. to_all: every rank is sent every token, so that the
    exchange is an all-gather. rows: how many rows a token sends to other ranks, of R ranks and K experts a token.
    """

    once_per_rank: bool
    to_all: bool
    rows: Callable[[int, int], float]
    because: str


def slot_ranks(top_k_index: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """(N, K) the rank of each slot's expert. −1 stays, and what is out of range for the experts is so for the ranks."""
    ranks = top_k_index // (num_experts // num_ranks)
    return torch.where(top_k_index < 0, top_k_index, ranks.clamp(max=num_ranks))


DISPATCHERS = {
    "naive": Dispatcher(
        False,
        False,
        lambda ranks, top_k: top_k * (ranks - 1) / ranks,
        "one row for each expert: what others send, to compare with",
    ),
    "deduplicated": Dispatcher(
        True,
        False,
        # each other rank, if one of K experts is there; drawn with replacement, which understates it a little
        lambda ranks, top_k: (ranks - 1) * (1 - (1 - 1 / ranks) ** top_k),
        "one row for each rank that has experts of the token",
    ),
    "all_gather": Dispatcher(
        True,
        True,
        lambda ranks, top_k: float(ranks - 1),
        "every token to every rank: as many rows, in collectives of equal sizes",
    ),
}


def choose_dispatcher(num_ranks: int, top_k: int) -> tuple[str, str]:
    """(name, reason) of the dispatcher for R ranks and K experts a token. Both are the same on every rank.

    Up to R = K / 2 ranks nearly every token has an expert on every rank, and the all-gather's rows are at most a tenth
    or so more; its sizes do not depend on the routing, so no rank waits for the fullest. Beyond, once per rank.
    One rank sends nothing, and has least to do in the plan of "deduplicated".
    """
    name = "all_gather" if 1 < num_ranks <= top_k / 2 else "deduplicated"
    chosen = DISPATCHERS[name]
    rows = {other: round(each.rows(num_ranks, top_k), 2) for other, each in DISPATCHERS.items()}
    return name, f"{chosen.because} (rows a token to other ranks: {rows})"
