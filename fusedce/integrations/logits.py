"""Logits: what a fused head returns in place of a tensor, so that a model's own forward can go on with it."""

import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

__all__ = ["Logits"]

_CASTS = ("float", "double", "half", "bfloat16", "to", "type", "contiguous")


@dataclass(frozen=True, eq=False)
class Logits:
    """Logits that were not made: the head's input, and the scalar maps that the model has applied to its output since.

    logits = outer · x without a cap, outer · tanh(inner · x) with one; x the head's own. A scale is kept as its
    numerator and denominator, so that dividing by a softcap and multiplying by it leaves a temperature of exactly 1.
    """

    hidden: Tensor
    head: nn.Linear
    model_name: str
    outer: tuple[float, float] = (1.0, 1.0)
    inner: tuple[float, float] | None = None
    vocab_size: int | None = None

    def options(self) -> dict[str, Any]:
        """The same map as softcap · tanh(x / softcap) / temperature of the first vocab_size words."""
        (over, under), (inner_over, inner_under) = self.outer, self.inner or (1.0, 1.0)
        return dict(
            temperature=(inner_under * under) / (inner_over * over),
            softcap=None if self.inner is None else inner_under / inner_over,
            vocab_size=self.vocab_size,
        )

    # what code between head and loss asks of logits
    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.vocab_size or self.head.weight.shape[0]))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    def __mul__(self, factor: object) -> "Logits":
        over, under = self.outer
        return replace(self, outer=(over * self._number("multiplies", factor), under))

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> "Logits":
        over, under = self.outer
        return replace(self, outer=(over, under * self._number("divides", divisor)))

    def tanh(self) -> "Logits":
        if self.inner is not None:
            self._refuse("caps its logits twice")
        return replace(self, inner=self.outer, outer=(1.0, 1.0))

    def _number(self, does: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            shown = type(value).__name__ if isinstance(value, Tensor) else repr(value)
            self._refuse(f"{does} its logits by {shown}, where only a number above 0 becomes a temperature")
        return float(value)

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(
            f"fusedce: {self.model_name}.forward {what}; the fused head cannot follow it, so leave this model unfused"
        )

    def __getattr__(self, name: str) -> Any:
        if name in _CASTS:  # the op keeps its sums in fp32 whatever the model casts to
            return lambda *args, **kwargs: self
        if name.startswith("_"):
            raise AttributeError(name)
        return self._refuse(f"uses logits.{name}")

    def __getitem__(self, index: object) -> "Logits":
        # logits[..., :n]: the words before the padding of the vocabulary
        match index:
            case (types.EllipsisType(), slice(start=None, stop=int(stop), step=None)) if 0 < stop <= self.shape[-1]:
                return replace(self, vocab_size=stop)
        return self._refuse("indexes its logits")

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], kinds: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", str(function))
        method = {"tanh": "tanh", "mul": "__mul__", "div": "__truediv__", "true_divide": "__truediv__"}.get(name)
        if method is not None and isinstance(args[0], cls) and not kwargs:
            return getattr(args[0], method)(*args[1:])
        self = next((a for a in (*args, *(kwargs or {}).values()) if isinstance(a, cls)), None)
        if self is None:
            return NotImplemented
        return self._refuse(f"applies torch's {name} to its logits")
