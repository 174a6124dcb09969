"""What a backward may leave out, decided from the forward's masses: the arithmetic that all backends share.

A pair is a row and WORD_TILE words of the vocabulary. `docs/linear_ce.md` has the proof. Everything stays on the
device; sums that decide are taken in fp64.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

WORD_TILE = 256
# Thresholds that are tried, each twice the one before.
LEVELS = 16
# Above this share of all pairs of the rows that count, the products over everything are as fast.
MOST_SHARE = 1 / 32
# Words a row, on average, up to which gathering them one by one is cheaper.
WORDS_A_ROW = 48
# What fp32 sums and bf16 rounding may hide of a sum of magnitudes.
MARGIN = 1 + 2.0**-7


class Decision(NamedTuple):
    """Device numbers, each (1,). threshold: pairs from there on are worked. accepted: whether that pays. lost: the most
    that all others hold. num_pairs: how many are worked, if accepted."""

    threshold: Tensor
    accepted: Tensor
    lost: Tensor
    num_pairs: Tensor


def num_tiles(vocab: int) -> int:
    """How many tiles of words there are."""
    return -(-vocab // WORD_TILE)


def stored_mass(mass: Tensor) -> Tensor:
    """bf16, never below `mass`: probabilities are right to 2⁻¹⁰ at least, and the rest is cut upwards."""
    bits = (mass.float() * (1 + 2.0**-10)).contiguous().view(torch.int32)
    up = ((bits + 0xFFFF) & -0x10000).view(torch.float32)
    return torch.where(mass == mass, up, torch.nan).bfloat16()


def pair_bound(mass: Tensor, on_probs: Tensor, on_surprise: Tensor | None, entropy: Tensor) -> Tensor:
    """(tiles, N): at least the sum of |d_raw| over each pair's words but the target. mass: (tiles, N), at least theirs.

    Σ p·|log p + H| over n words of mass m is at most m·(log(n/m) + H), since Σ −p·log p is largest where all are equal.
    """
    mass = mass.to(on_probs.dtype)
    if on_surprise is None:
        return mass * on_probs.abs()
    spread = torch.log(WORD_TILE / torch.where(mass == 0, 1.0, mass)) + entropy
    return mass * (on_probs.abs() + on_surprise.abs() * spread)


def reference(on_probs: Tensor, on_target: Tensor, logprob: Tensor) -> Tensor:
    """(1,) fp64: Σ |on_target| + |on_probs|·(1 − p_y), which is Σ |g|·2·(1 − p_y) for a loss of log-probs."""
    rows = on_target.double().abs() - on_probs.double().abs() * torch.expm1(logprob.double())
    return rows.sum()[None]


def thresholds(half: Tensor, num_rows: int, tiles: int) -> Tensor:
    """(LEVELS,) fp32. Were all pairs at the lowest, they would hold `half`, a half of the budget, together."""
    lowest = half / (MARGIN * max(num_rows * tiles, 1))
    return (lowest * 2.0 ** torch.arange(LEVELS, device=half.device)).float()


def decide(levels: Tensor, lost: Tensor, counts: Tensor, half: Tensor, most_pairs: Tensor) -> Decision:
    """The largest threshold whose pairs below it hold at most `half`. lost, counts: (LEVELS,) what lies below each, and
    how many pairs lie above."""
    lost = lost.double() * MARGIN
    affordable = lost <= half
    # Sums only grow with the threshold; NaN affords nothing.
    best = (affordable.sum(0, keepdim=True) - 1).clamp(min=0)
    num_pairs = counts.gather(0, best)
    accepted = affordable.gather(0, best) & (num_pairs <= most_pairs)
    return Decision(levels.gather(0, best), accepted, lost.gather(0, best), num_pairs)


def most_pairs(num_live: Tensor, tiles: int, capacity: int) -> Tensor:
    """(1,): how many pairs are worth it, and have room."""
    return (num_live * (tiles * MOST_SHARE)).clamp(max=capacity)


def capacity(num_rows: int, tiles: int, room: int) -> int:
    """How many pairs there is memory for: what pays if every row has a gradient, at most `room`."""
    return min(math.ceil(num_rows * tiles * MOST_SHARE), room)


def few_words(num_words: Tensor, num_live: Tensor) -> Tensor:
    """(1,) bool: whether the pairs' large words are few enough to be gathered."""
    return num_words <= num_live * WORDS_A_ROW


def word_threshold(half: Tensor, num_pairs: Tensor) -> Tensor:
    """(1,) fp32: were all words of all pairs just below it, they would hold `half` together."""
    return (half / (MARGIN * WORD_TILE * num_pairs.clamp(min=1))).float()


def certificate(total: Tensor, lost: Tensor, is_sparse: Tensor, scale: Tensor | None) -> Tensor:
    """(4,) fp32: the skipped gradient's bound, what it is measured against, 1 if anything was skipped, and 1.

    All but `is_sparse` (1,): those of gradients divided by `scale`.
    """
    factor = 1.0 if scale is None else scale.double()
    skipped = torch.where(is_sparse, lost, 0.0)
    numbers = (skipped * factor, total * factor, is_sparse.double(), torch.ones_like(total))
    return torch.cat([number.reshape(1) for number in numbers]).float()
