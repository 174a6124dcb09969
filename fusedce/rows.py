"""What the loss asks of each row's gradient, in three numbers a row: the algebra that all backends share."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedce.options import LogitOptions, Upstream

LOG2_E = math.log2(math.e)
ROW_NUMBERS = 8  # of which seven are used: a power of two


class RowGradient(NamedTuple):
    """The gradient of the loss in a row's raw logits (after the softcap, before the temperature), each number (N,).

    d_raw_j = p_j · (on_probs − on_surprise · (log p_j + H)) for every word j but the target, whose entry is on_target.
    Rows that take no part have zeros. on_surprise is None where no gradient of the entropy is asked for.
    """

    on_probs: Tensor
    on_surprise: Tensor | None
    on_target: Tensor

    def over(self, scale: Tensor) -> "RowGradient":
        """All numbers divided by a scalar tensor."""
        surprise = None if self.on_surprise is None else self.on_surprise / scale
        return RowGradient(self.on_probs / scale, surprise, self.on_target / scale)

    def of_rows(self, start: int, stop: int) -> "RowGradient":
        """The same for a range of rows."""
        surprise = None if self.on_surprise is None else self.on_surprise[start:stop]
        return RowGradient(self.on_probs[start:stop], surprise, self.on_target[start:stop])


def row_gradient(
    upstream: Upstream, logprob: Tensor, entropy: Tensor, target: Tensor, options: LogitOptions
) -> RowGradient:
    """From the upstream gradients and the forward's log-prob and entropy, (N,) each.

    With y the target: d_z_j = p_j·(d_lse − d_logprob − d_entropy·(log p_j + H)), and d_logprob more for j = y. There
    1 − p_y is taken from the log-prob, which is exact where p_y is near 1.
    """
    d_logprob, d_entropy, d_lse = upstream
    zeros = torch.zeros_like(logprob)
    d_logprob = zeros if d_logprob is None else d_logprob
    d_lse = zeros if d_lse is None else d_lse
    probs = logprob.exp()
    on_target = d_lse * probs - d_logprob * torch.expm1(logprob)
    if d_entropy is not None:
        # p·(log p + H) is 0 where p is 0, although log p is −inf there.
        on_target = on_target - d_entropy * torch.where(probs == 0, 0.0, probs * (logprob + entropy))
    slope = 1.0 / (options.temperature if options.row_temperature is None else options.row_temperature.to(logprob))
    kept = target != options.ignore_index

    def of_kept(numbers: Tensor) -> Tensor:
        return torch.where(kept, numbers * slope, 0.0)

    surprise = None if d_entropy is None else of_kept(d_entropy)
    return RowGradient(of_kept(d_lse - d_logprob), surprise, of_kept(on_target))


def row_slopes(options: LogitOptions, num_rows: int, like: Tensor) -> Tensor:
    """slope (N,) fp32: 1 / temperature of each row."""
    if options.row_temperature is None:
        return like.new_full((num_rows,), 1.0 / options.temperature, dtype=torch.float32)
    return 1.0 / options.row_temperature.float()


def row_numbers(gradient: RowGradient, entropy: Tensor, normalizer: Tensor, slopes: Tensor) -> Tensor:
    """(N, 8) fp32, what a kernel that makes d_logits in registers reads of each row: slope·log₂e, the normalizer's
    maximum and log₂ Σ, on_probs, on_target, on_surprise / log₂e and H·log₂e. Such kernels take exponentials, and so
    log-probs, to base 2. Without on_surprise, the last two are not to be read.
    """
    numbers = [slopes * LOG2_E, normalizer[:, 0], normalizer[:, 1] * LOG2_E, gradient.on_probs, gradient.on_target]
    if gradient.on_surprise is not None:
        numbers += [gradient.on_surprise / LOG2_E, entropy * LOG2_E]
    numbers += [slopes] * (ROW_NUMBERS - len(numbers))
    return torch.stack(numbers, 1)


def merge_parts(
    parts: Tensor, target: Tensor, options: LogitOptions, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprob, entropy, lse (N,) and normalizer (N,2) from the parts (P,N,4) of P shards; see `linear_parts`.

    Sums move with the maximum, each by e^(its change); the target, which all leave out, comes last.
    """
    slope = 1.0 / (options.temperature if options.row_temperature is None else options.row_temperature.to(parts))
    maxima, rests, gaps, targets = parts.unbind(-1)
    raw_target = targets.amax(0)
    largest = torch.maximum(maxima.amax(0), raw_target)
    # A row that is all −inf is shifted by 0: −inf − (−inf) would hide that nothing is there.
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    moved = torch.where(maxima == -torch.inf, 0.0, (maxima - largest) * slope)
    rest = (rests * moved.exp()).sum(0)
    gap = (raw_target - largest) * slope
    of_target = gap.exp()
    likely = of_target >= rest
    log_sum = torch.where(likely, (rest / of_target).log1p() + gap, (rest + of_target).log())
    logprob = torch.where(likely, -(rest / of_target).log1p(), gap - log_sum)
    kept = target != options.ignore_index
    entropy = logprob[:0]
    if with_entropy:
        sum_gap = ((gaps + rests * moved) * moved.exp()).sum(0) + torch.where(of_target == 0, 0.0, of_target * gap)
        entropy = torch.where(kept, log_sum - sum_gap / (rest + of_target), 0.0)
    # Shifted by +inf, every probability of an ignored row is 0.
    normalizer = torch.stack((torch.where(kept, largest, torch.inf), torch.where(kept, log_sum, 0.0)), 1)
    return torch.where(kept, logprob, 0.0), entropy, torch.where(kept, largest * slope + log_sum, 0.0), normalizer


class Selection(NamedTuple):
    """Which words of each row are selected: ids (N,K), of a vocabulary of `vocab` words.

    A slot whose id is options.ignore_index takes no part.
    """

    ids: Tensor
    options: LogitOptions
    vocab: int

    def slopes(self, like: Tensor) -> Tensor:
        """(N, 1): 1 / temperature of each row, in the dtype of `like`."""
        rows = self.options.row_temperature
        scalar = like.new_full((1, 1), 1.0 / self.options.temperature)
        return scalar.expand(self.ids.shape[0], 1) if rows is None else 1.0 / rows.to(like.dtype)[:, None]

    def inside(self) -> Tensor:
        """(N,K): whether a slot takes part and names a word."""
        ids = self.ids
        return (ids != self.options.ignore_index) & (ids >= 0) & (ids < self.vocab)

    def target(self, raw: Tensor) -> Tensor:
        """(N,): the likeliest of a row's words, by the raw logits (N,K) of the slots.

        As the target it is what a row's normalizer is exact for where its probability is near 1. An id out of range if
        there is nothing better, so that the row is NaN; ignore_index where no slot takes part.
        """
        lowest = torch.finfo(raw.dtype).min
        score = torch.where(self.inside(), raw, lowest).clamp(min=lowest)
        score = torch.where(self.ids == self.options.ignore_index, -torch.inf, score)
        return self.ids.gather(1, score.argmax(1, keepdim=True))[:, 0]

    def logprobs(self, raw: Tensor, normalizer: Tensor) -> Tensor:
        """(N,K): log-prob of every slot, from its raw logit and the row's normalizer. NaN for an id out of range."""
        values = (raw - normalizer[:, :1]) * self.slopes(raw) - normalizer[:, 1:]
        values = torch.where(self.inside(), values, torch.nan)
        return torch.where(self.ids == self.options.ignore_index, 0.0, values)

    def upstream(self, d_logprob: Tensor) -> Tensor:
        """(N,K): the upstream gradient over the temperature; 0 where a slot takes no part, NaN where its id is bad."""
        numbers = torch.where(self.inside(), d_logprob * self.slopes(d_logprob), torch.nan)
        return torch.where(self.ids == self.options.ignore_index, 0.0, numbers)

    def on_probs(self, upstream: Tensor, d_lse: Tensor | None) -> Tensor:
        """(N,): what multiplies every word's probability: d_lse over the temperature, less all `upstream` of a row."""
        total = -upstream.sum(1)
        return total if d_lse is None else total + d_lse.to(total.dtype) * self.slopes(total)[:, 0]
