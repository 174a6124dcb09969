"""LinearCrossEntropyLoss: the language-model head and its loss as one module, without the logits."""

import torch
from torch import Tensor, nn

from fusedce.functional import linear_cross_entropy

__all__ = ["LinearCrossEntropyLoss"]


class LinearCrossEntropyLoss(nn.Module):
    """A linear layer and cross-entropy in one: `cross_entropy(input · linear_weightᵀ + linear_bias, target)`.

    The arguments are those of `torch.nn.LinearCrossEntropyLoss` (torch ≥ 2.13), then ours.

    Args:
        in_features: D, the size of a hidden state.
        num_classes: V, the size of the vocabulary.
        bias: whether there is a learnt `linear_bias` (V,).
        device, dtype: of the parameters.
        reduction, weight, ignore_index, label_smoothing, temperature, softcap, backend: see
            `fusedce.linear_cross_entropy`.

    Parameters: `linear_weight` (V, D), `linear_bias` (V,) or None. `weight` (V,), where given, is a buffer.

    Shape: input (..., D) and target (...) int64 -> () fp32, or target's shape for reduction "none". Errors, memory and
    determinism are those of `fusedce.linear_cross_entropy`.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        temperature: float = 1.0,
        softcap: float | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.in_features, self.num_classes = in_features, num_classes
        self.reduction, self.ignore_index, self.label_smoothing = reduction, ignore_index, label_smoothing
        self.temperature, self.softcap, self.backend = temperature, softcap, backend
        self.linear_weight = nn.Parameter(torch.empty(num_classes, in_features, device=device, dtype=dtype))
        self.linear_bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype)) if bias else None
        self.register_buffer("weight", weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in ±1/√D, as torch.nn.Linear."""
        bound = self.in_features**-0.5
        nn.init.uniform_(self.linear_weight, -bound, bound)
        if self.linear_bias is not None:
            nn.init.uniform_(self.linear_bias, -bound, bound)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of input (..., D) against target (...) int64."""
        return linear_cross_entropy(
            input,
            self.linear_weight,
            target,
            linear_bias=self.linear_bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            temperature=self.temperature,
            softcap=self.softcap,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, num_classes={self.num_classes}, reduction={self.reduction!r}"
