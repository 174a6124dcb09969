"""What each row's loss is made of: its weights by reduction, class, token, label smoothing and z-loss."""

from typing import NamedTuple

import torch
from torch import Tensor

from fusedce.ops.linear_logprob import result_dtype


class RowWeights(NamedTuple):
    """What each row's loss is made of, (N,) each or None for 0:
    nll · (−logprob) + lse · lse + square · lse² − uniform · mean logit."""

    nll: Tensor
    lse: Tensor | None
    square: Tensor | None
    uniform: Tensor | None

    def times(self, factor: Tensor) -> "RowWeights":
        """All of them times a factor for each row."""
        lse, square, uniform = (None if weight is None else weight * factor for weight in self[1:])
        return RowWeights(self.nll * factor, lse, square, uniform)

    def rows(self, logprob: Tensor, lse: Tensor) -> Tensor:
        """(N,): the loss of each row but for the mean logit's part."""
        loss = -self.nll * logprob
        loss = loss if self.lse is None else loss + self.lse * lse
        return loss if self.square is None else loss + self.square * lse * lse


def row_weights(
    like: Tensor,
    target: Tensor,
    kept: Tensor,
    vocab: int,
    num_heads: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    token_weight: Tensor | None,
    class_weight: Tensor | None,
) -> RowWeights:
    """like: of the hidden states' dtype. kept: (N,), which rows take part. vocab: how many words there are. reduction
    "mean": over the rows of each head that count, by their class and token weights."""
    row_weight = kept.to(result_dtype(like))
    if token_weight is not None:
        row_weight = torch.where(kept, token_weight.detach().to(row_weight.dtype), 0.0)
    of_target = row_weight
    if class_weight is not None:
        # clamp: a label out of range is reported, and its row is NaN already
        of_target = row_weight * class_weight[target.clamp(0, vocab - 1)]
    if reduction == "mean":
        inverse = _inverse_totals(of_target, num_heads)
        of_target = of_target * inverse
        row_weight = row_weight * inverse if label_smoothing or z_loss else row_weight
    square = row_weight * z_loss if z_loss else None
    if not label_smoothing:
        return RowWeights(of_target, None, square, None)
    smoothed = row_weight * label_smoothing
    mean_class = 1.0 if class_weight is None else class_weight.mean()
    return RowWeights(of_target * (1.0 - label_smoothing), smoothed * mean_class, square, smoothed)


def _inverse_totals(weights: Tensor, num_heads: int) -> Tensor:
    """(N,) or (1,): one over the sum of the head's weights; 0 where that is 0, so that without a row that counts the
    loss and its gradients are 0, not 0/0."""
    # In fp64: weights of both signs may cancel.
    total = weights.reshape(num_heads, -1).sum(1, dtype=torch.float64)
    inverse = torch.where(total == 0, 0.0, total.reciprocal()).to(weights.dtype)
    return inverse if num_heads == 1 else inverse.repeat_interleave(weights.shape[0] // num_heads)
