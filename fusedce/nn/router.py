"""Router: the linear layer over the experts, the choice among them, and what the losses on it are made of."""

import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fusedce import checks
from fusedce.functional import Routing, moe_balance, moe_replay, moe_route
from fusedce.functional.moe_route import check_groups, check_scores
from fusedce.nn.presets import router_preset
from fusedce.options import RouterBalance, RouterOptions

__all__ = ["Router", "take_balances"]


class Router(nn.Module):
    """A linear layer over the experts and the choice of `top_k` of them: `moe_route(hidden · weightᵀ + bias, top_k,
    …)`.

    Args:
        hidden_size: D.
        num_experts: E.
        top_k: K, experts a token, from 1 to E, or to the experts of top_groups groups.
        backend: see `fusedce.moe_route`.
        collect: keep what the losses on the router are made of, see `take_balances`, at each call in training mode.
        device, dtype: of the parameters.
        options: the fields of `fusedce.options.RouterOptions`: score, renormalize, scale, num_groups, top_groups and
            group_best of `fusedce.moe_route`; correction, bias, fp32_logits. With top_k 1, `renormalize` leaves the
            router without a gradient, and a warning says so.

    Parameters: `weight` (E, D); `bias` (E,) or None. Buffer: `correction` (E,) fp32 or None, which
    `fusedce.update_correction` moves; keep it in fp32 when the module is cast.

    Shape: hidden (N, D) -> `Routing` of (N, K).

    Raises:
        TypeError, ValueError: an option or a size that no router has.
    """

    weight: Tensor
    bias: Tensor | None
    correction: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        backend: str = "auto",
        collect: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.options = RouterOptions(**options)
        self.top_k, self.backend, self.collect = top_k, backend, collect
        self.balance: RouterBalance | None = None
        _check(num_experts, top_k, self.options)
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if self.options.bias else None
        correction = torch.zeros(num_experts, device=device, dtype=torch.float32) if self.options.correction else None
        self.register_buffer("correction", correction)
        self.reset_parameters()

    @classmethod
    def from_config(cls, config: Any, **keywords: Any) -> "Router":
        """The router of a transformers model's config, for the families of docs/moe.md.

        keywords: backend, collect, device, dtype, or an option that differs. ValueError for another family.
        """
        preset = router_preset(config)
        return cls(preset.hidden_size, preset.num_experts, preset.top_k, **{**preset.options, **keywords})

    def reset_parameters(self) -> None:
        """Uniform in ±1/√D, as torch.nn.Linear; the correction 0."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)
        if self.correction is not None:
            nn.init.zeros_(self.correction)

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, E) of hidden (N, D), in fp32 with fp32_logits, else as torch.nn.Linear makes them."""
        if not self.options.fp32_logits:
            return nn.functional.linear(hidden, self.weight, self.bias)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(dtype)
            return nn.functional.linear(hidden.to(dtype), self.weight.to(dtype), bias)

    def forward(
        self, hidden: Tensor, top_k_index: Tensor | None = None, *, mask: Tensor | None = None, num_sequences: int = 1
    ) -> Routing:
        """The routing of hidden (N, D), or the weights of the ids top_k_index (N, K) where they are given.

        mask, num_sequences: see `fusedce.moe_balance`; used where `collect` is.
        """
        options, logits = self.options, self.logits(hidden)
        score, renormalize, scale = options.score, options.renormalize, options.scale
        if top_k_index is None:
            routing = moe_route(
                logits,
                self.top_k,
                correction=self.correction,
                score=score,
                renormalize=renormalize,
                scale=scale,
                num_groups=options.num_groups,
                top_groups=options.top_groups,
                group_best=options.group_best,
                backend=self.backend,
            )
        else:
            routing = moe_replay(
                logits, top_k_index, score=score, renormalize=renormalize, scale=scale, backend=self.backend
            )
        if self.collect and self.training:
            self.balance = moe_balance(
                logits,
                routing.top_k_index,
                mask=mask,
                num_sequences=num_sequences,
                score=score,
                backend=self.backend,
            )
        return routing

    def extra_repr(self) -> str:
        num_experts, hidden_size = self.weight.shape
        sizes = f"hidden_size={hidden_size}, num_experts={num_experts}, top_k={self.top_k}"
        changed = [
            f"{field.name}={getattr(self.options, field.name)!r}"
            for field in dataclasses.fields(self.options)
            if getattr(self.options, field.name) != field.default
        ]
        return ", ".join([sizes, *changed])


def take_balances(model: nn.Module) -> list[RouterBalance]:
    """What the routers of `model` with `collect` have kept since the last call of this, in the order of its modules.

    For `fusedce.load_balance_loss` and its like, after a forward and before its backward. The routers forget what is
    taken, so that no graph is held longer than its step; of several forwards only the last one is kept.
    """
    taken = []
    for module in model.modules():
        if isinstance(module, Router) and module.balance is not None:
            taken.append(module.balance)
            module.balance = None
    return taken


def _check(num_experts: int, top_k: int, options: RouterOptions) -> None:
    op = "nn.Router"
    checks.count(op, "num_experts", num_experts)
    check_scores(op, options.score, options.scale)
    check_groups(op, num_experts, options.num_groups, options.top_groups, options.group_best)
    most = options.top_groups * (num_experts // options.num_groups)
    if not 1 <= top_k <= most:
        of_groups = "" if options.num_groups == 1 else f" of {options.top_groups} of {options.num_groups} groups"
        raise ValueError(f"fusedce.{op}: top_k is {top_k}; expected 1 to num_experts = {most}{of_groups}")
    if top_k == 1 and options.renormalize:
        warnings.warn(
            "fusedce.nn.Router: with top_k=1 and renormalize=True every weight is the constant `scale`, so the "
            "router gets no gradient from the loss; pass renormalize=False",
            stacklevel=3,
        )
