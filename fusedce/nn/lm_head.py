"""FusedLMHead: the language-model head, owned or tied, with its loss and log-probs without the logits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedce.functional import LogProb, linear_cross_entropy, linear_logprob

__all__ = ["FusedLMHead"]


class FusedLMHead(nn.Module):
    """A language-model head that gives the loss or the log-probs of its logits, and the logits only when asked.

    logits = cap(hidden · weightᵀ + bias) / temperature, cap(x) = softcap · tanh(x / softcap).

    Args:
        hidden_size: D.
        vocab_size: V.
        bias: whether there is a learnt `bias` (V,).
        device, dtype: of the parameters.
        temperature, softcap, ignore_index, backend: see `fusedce.linear_logprob`; they hold for every call.
        main_grad: True adds the weight's gradient to `weight.main_grad`, an fp32 tensor (V, D) that must be there at
            every call with a gradient, as Megatron's optimizers have it; see `fusedce.linear_cross_entropy`.

    Parameters: `weight` (V, D), `bias` (V,) or None; those of `FusedLMHead.tied_to` belong to another module.

    Shape: hidden (..., D) and target (...) int64 -> () fp32, or target's shape for reduction "none" and for the fields
    of `logprobs`. With `shift=True`, hidden (..., S, D) at position t is held against target at t + 1, and the last
    position takes no part: the target moves by one, hidden is not copied.

    Errors, memory and determinism are those of `fusedce.linear_cross_entropy` and `fusedce.linear_logprob`.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        temperature: float = 1.0,
        softcap: float | None = None,
        ignore_index: int = -100,
        main_grad: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self._set_options(temperature, softcap, ignore_index, main_grad, backend)
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(vocab_size, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    @classmethod
    def tied_to(
        cls,
        source: nn.Module | nn.Parameter,
        *,
        temperature: float = 1.0,
        softcap: float | None = None,
        ignore_index: int = -100,
        main_grad: bool = False,
        backend: str = "auto",
    ) -> "FusedLMHead":
        """A head over the weight of another module, nn.Embedding or nn.Linear, or over a parameter (V, D).

        Nothing is copied: `head.weight` is the source's own Parameter, read anew at every call, so a source that gets
        another one is followed. It is not registered a second time: `state_dict()` and `parameters()` of the head are
        empty, and those of a model that holds both have the weight once, under the source's name. The bias of an
        nn.Linear is used too.

        Raises:
            TypeError: source has no weight (V, D).
        """
        return _TiedLMHead(source, temperature, softcap, ignore_index, main_grad, backend)

    def _set_options(
        self, temperature: float, softcap: float | None, ignore_index: int, main_grad: bool, backend: str
    ) -> None:
        self.temperature, self.softcap, self.ignore_index = temperature, softcap, ignore_index
        self.main_grad, self.backend = main_grad, backend

    def _main_grad(self) -> Tensor | None:
        if not self.main_grad or not self.weight.requires_grad or not torch.is_grad_enabled():
            return None
        tensor = getattr(self.weight, "main_grad", None)
        if tensor is None:
            raise ValueError("fusedce.nn.FusedLMHead: main_grad=True, and the weight has no attribute main_grad")
        return tensor

    def reset_parameters(self) -> None:
        """Uniform in ±1/√D, as torch.nn.Linear."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, hidden: Tensor, target: Tensor, *, reduction: str = "mean", shift: bool = False) -> Tensor:
        """The cross-entropy of target (...) given hidden (..., D); reduction: "none", "mean" or "sum"."""
        return linear_cross_entropy(
            hidden,
            self.weight,
            self._shifted(target) if shift else target,
            linear_bias=self.bias,
            reduction=reduction,
            ignore_index=self.ignore_index,
            temperature=self.temperature,
            softcap=self.softcap,
            main_grad=self._main_grad(),
            backend=self.backend,
        )

    def logprobs(self, hidden: Tensor, target: Tensor, *, with_entropy: bool = True, shift: bool = False) -> LogProb:
        """Log-prob of target (...) given hidden (..., D), entropy and log-sum-exp, each of target's shape, fp32.

        With `shift=True` the results at t are those of target at t + 1, and those at the last position are 0.
        """
        return linear_logprob(
            hidden,
            self.weight,
            self._shifted(target) if shift else target,
            bias=self.bias,
            temperature=self.temperature,
            softcap=self.softcap,
            ignore_index=self.ignore_index,
            with_entropy=with_entropy,
            main_grad=self._main_grad(),
            backend=self.backend,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits (..., V) of hidden (..., D), capped and divided by the temperature, in the dtype of `F.linear`.

        For generation, on the last position. Their log-softmax is what `logprobs` gives, but for the rounding of the
        logits to hidden's dtype.
        """
        logits = F.linear(hidden, self.weight, self.bias)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def _shifted(self, target: Tensor) -> Tensor:
        return F.pad(target[..., 1:], (0, 1), value=self.ignore_index)

    def extra_repr(self) -> str:
        vocab_size, hidden_size = self.weight.shape
        sizes = f"hidden_size={hidden_size}, vocab_size={vocab_size}, bias={self.bias is not None}"
        return f"{sizes}, temperature={self.temperature}, softcap={self.softcap}"


class _TiedLMHead(FusedLMHead):
    """What `FusedLMHead.tied_to` returns: weight and bias are looked up in their owner."""

    def __init__(
        self,
        source: Any,
        temperature: float,
        softcap: float | None,
        ignore_index: int,
        main_grad: bool,
        backend: str,
    ) -> None:
        nn.Module.__init__(self)
        self._set_options(temperature, softcap, ignore_index, main_grad, backend)
        # in a tuple, where nn.Module does not look for parameters and submodules
        self._source = (source,)
        if not isinstance(self.weight, Tensor) or self.weight.dim() != 2:
            raise TypeError(f"fusedce.nn.FusedLMHead.tied_to: {type(source).__name__} has no weight of shape (V, D)")

    @property
    def weight(self) -> Any:  # type: ignore[override]
        source = self._source[0]
        return source if isinstance(source, Tensor) else getattr(source, "weight", None)

    @property
    def bias(self) -> Any:  # type: ignore[override]
        source = self._source[0]
        return None if isinstance(source, Tensor) else getattr(source, "bias", None)

    def reset_parameters(self) -> None:
        """Nothing: the parameters are the source's."""
