"""linear_ce and linear_ce_heads as torch ops: what each row weighs, then linear_ce_sum, which has its gradients ready,
where one scalar is differentiated, and linear_logprob where not."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce.ops.linear_logprob import result_dtype
from fusedce.ops.main_grad import CeSumInto, Deposit
from fusedce.ops.row_weights import RowWeights, row_weights
from fusedce.ops.schema import LIB


class _Head(NamedTuple):
    """The operands of the logits and how they become those of the softmax. main_grad: where d_weight goes, if not to
    autograd."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    row_temperature: Tensor | None
    main_grad: Tensor | None
    options: dict[str, Any]

    def wants_gradients(self) -> list[bool]:
        """The mask of hidden, weight and bias."""
        return [
            t is not None and t.requires_grad and torch.is_grad_enabled() for t in (self.hidden, self.weight, self.bias)
        ]

    def rows(self) -> tuple[Tensor, Tensor]:
        """Log-prob and log-sum-exp (N,), differentiable."""
        arguments = (self.hidden, self.weight, self.target, self.bias, self.row_temperature)
        options = {**self.options, "with_entropy": False}
        if self.main_grad is None:
            logprob, _, lse, _ = torch.ops.fusedce.linear_logprob(*arguments, **options)
        else:
            logprob, _, lse, _ = torch.ops.fusedce.linear_logprob_into(*arguments, self.main_grad, **options)
        return logprob, lse

    def scalar(self, weights: "RowWeights") -> tuple[Tensor, Tensor, Tensor]:
        """The loss (), differentiable, and log-prob and log-sum-exp (N,), which are not."""
        given = (weights.nll, weights.lse, weights.square)
        if self.main_grad is None:
            loss, _, _, _, logprob, lse = torch.ops.fusedce.linear_ce_sum(
                self.hidden, self.weight, self.target, self.bias, self.row_temperature, *given,
                mask=self.wants_gradients(), **self.options,
            )  # fmt: skip
            return loss, logprob, lse
        rows = (self.target, self.row_temperature, *given)
        return CeSumInto.apply(self.hidden, self.weight, self.bias, self.main_grad, rows, self.options)

    def mean_logit(self, class_weight: Tensor | None, kept: Tensor) -> Tensor:
        """(N,): the plain logits' mean over the vocabulary, each times its class weight: one product with one vector,
        over the temperature."""
        dtype, vocab = result_dtype(self.hidden), self.weight.shape[0]
        weight = self.weight if self.main_grad is None else Deposit.apply(self.weight, self.main_grad)
        bias = self.bias
        if class_weight is None:
            word, offset = weight.sum(0, dtype=dtype), 0.0 if bias is None else bias.sum(dtype=dtype)
        else:
            word = (class_weight[:, None] * weight).sum(0, dtype=dtype)
            offset = 0.0 if bias is None else (class_weight * bias).sum(dtype=dtype)
        # Rows that take no part may hold NaN or inf.
        rows = torch.where(kept[:, None], self.hidden, 0.0)
        temperature = self.options["temperature"] if self.row_temperature is None else self.row_temperature.detach()
        return ((rows * word).sum(1, dtype=dtype) + offset) / vocab / temperature


def _check_options(op: str, reduction: str, allowed: tuple[str, ...], label_smoothing: float, softcap: float) -> None:
    if reduction not in allowed:
        raise ValueError(f"fusedce.{op}: argument 'reduction' is {reduction!r}; expected one of {', '.join(allowed)}")
    if label_smoothing and softcap:
        raise ValueError(f"fusedce.{op}: arguments 'label_smoothing' and 'softcap' do not go together")


def _total(rows: Tensor) -> Tensor:
    """Σ (N,): in fp64, or a sum over the batch would be the least exact thing here."""
    return rows.sum(dtype=torch.float64).to(rows.dtype)


def _ce(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    row_temperature: Tensor | None = None,
    token_weight: Tensor | None = None,
    class_weight: Tensor | None = None,
    main_grad: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    _check_options("linear_ce", reduction, ("none", "mean", "sum"), label_smoothing, softcap)
    options = {"ignore_index": ignore_index, "temperature": temperature, "softcap": softcap, "backend": backend}
    head = _Head(hidden, weight, target, bias, row_temperature, main_grad, options)
    kept = target != ignore_index
    class_weight = None if class_weight is None else class_weight.detach().to(result_dtype(hidden))
    weights = row_weights(
        hidden, target, kept, weight.shape[0], 1, reduction, label_smoothing, z_loss, token_weight, class_weight
    )
    if reduction != "none" and any(head.wants_gradients()):
        loss = head.scalar(weights)[0]
    else:
        loss = weights.rows(*head.rows())
        loss = loss if reduction == "none" else _total(loss)
    if weights.uniform is not None:
        uniform = weights.uniform * head.mean_logit(class_weight, kept)
        loss = loss - (uniform if reduction == "none" else _total(uniform))
    return loss


def _ce_heads(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    num_heads: int,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    row_temperature: Tensor | None = None,
    token_weight: Tensor | None = None,
    class_weight: Tensor | None = None,
    head_weight: Tensor | None = None,
    main_grad: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    _check_options("linear_ce_heads", reduction, ("mean", "sum"), label_smoothing, softcap)
    torch._check_value(
        num_heads > 0 and hidden.shape[0] % num_heads == 0,
        lambda: f"fusedce.linear_ce_heads: {hidden.shape[0]} rows are not of {num_heads} heads",
    )
    options = {"ignore_index": ignore_index, "temperature": temperature, "softcap": softcap, "backend": backend}
    head = _Head(hidden, weight, target, bias, row_temperature, main_grad, options)
    kept = target != ignore_index
    dtype = result_dtype(hidden)
    class_weight = None if class_weight is None else class_weight.detach().to(dtype)
    own = row_weights(
        hidden, target, kept, weight.shape[0], num_heads, reduction, label_smoothing, z_loss, token_weight, class_weight
    )
    factor = hidden.new_ones(num_heads, dtype=dtype) if head_weight is None else head_weight.detach().to(dtype)
    factors = factor.repeat_interleave(hidden.shape[0] // num_heads)
    if any(head.wants_gradients()):
        loss, logprob, lse = head.scalar(own.times(factors))
    else:
        logprob, lse = head.rows()
        loss = _total(own.times(factors).rows(logprob, lse))
    rows = own.rows(logprob, lse)
    if own.uniform is not None:
        uniform = own.uniform * head.mean_logit(class_weight, kept)
        loss, rows = loss - _total(uniform * factors), rows - uniform.detach()
    return loss, rows.reshape(num_heads, -1).sum(1, dtype=torch.float64).to(dtype)


LIB.impl("linear_ce", _ce, "CompositeImplicitAutograd")
LIB.impl("linear_ce_heads", _ce_heads, "CompositeImplicitAutograd")
