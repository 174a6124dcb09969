"""Router and MoE: a dropless mixture-of-experts feed-forward block, its parameters laid out as in transformers."""

import warnings

import torch
from torch import Tensor, nn

from fusedce.functional import Routing, moe_combine, moe_experts, moe_plan, moe_route

__all__ = ["MoE", "Router"]


class Router(nn.Module):
    """A linear layer over the experts and the choice of `top_k` of them: `moe_route(hidden · weightᵀ, top_k, ...)`.

    Args:
        hidden_size: D.
        num_experts: E.
        top_k: K, experts a token, from 1 to E.
        score, renormalize, scale, backend: see `fusedce.moe_route`. With top_k 1, `renormalize` leaves the router
            without a gradient, and a warning says so.
        device, dtype: of the parameter.

    Parameters: `weight` (E, D). Shape: hidden (N, D) -> `Routing` of (N, K).
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"fusedce.nn.Router: top_k is {top_k}; expected 1 to num_experts = {num_experts}")
        if top_k == 1 and renormalize:
            warnings.warn(
                "fusedce.nn.Router: with top_k=1 and renormalize=True every weight is the constant `scale`, so the "
                "router gets no gradient from the loss; pass renormalize=False",
                stacklevel=2,
            )
        self.top_k, self.score, self.renormalize, self.scale = top_k, score, renormalize, scale
        self.backend = backend
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in ±1/√D, as torch.nn.Linear."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, hidden: Tensor) -> Routing:
        """The routing of hidden (N, D)."""
        return moe_route(
            nn.functional.linear(hidden, self.weight),
            self.top_k,
            score=self.score,
            renormalize=self.renormalize,
            scale=self.scale,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        num_experts, hidden_size = self.weight.shape
        sizes = f"hidden_size={hidden_size}, num_experts={num_experts}, top_k={self.top_k}"
        return f"{sizes}, score={self.score!r}, renormalize={self.renormalize}, scale={self.scale}"


class MoE(nn.Module):
    """A mixture of SwiGLU experts: out[n] = Σ_k w[n,k] · down_e · (silu(gate_e · x) · (up_e · x)), e = index[n,k].

    Every token reaches all its experts: nothing is dropped or padded.

    Args:
        hidden_size: D.
        ffn_size: F, of one expert.
        num_experts: E.
        top_k: K, experts a token, from 1 to E.
        score, renormalize, scale: the routing, see `fusedce.moe_route`.
        backend: of every op, see `fusedce.explain()`.
        device, dtype: of the parameters.

    Parameters: `router.weight` (E, D), `gate_up_proj` (E, 2F, D), `down_proj` (E, D, F).

    Shape: hidden (..., D) -> (..., D). Under torch.autocast the GEMMs run in its dtype, the routing weights in fp32.
    Errors, memory and determinism are those of `fusedce.moe_experts`.

    `forward(hidden, routing)` uses a routing that was made before, by `route(hidden)` or by another engine: for
    metrics of the expert load, for losses on the router, and for replaying the experts that a rollout chose.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.router = Router(
            hidden_size,
            num_experts,
            top_k,
            score=score,
            renormalize=renormalize,
            scale=scale,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_experts, 2 * ffn_size, hidden_size, device=device, dtype=dtype)
        )
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in ±1/√(inputs of the layer), as torch.nn.Linear."""
        self.router.reset_parameters()
        for weight in (self.gate_up_proj, self.down_proj):
            bound = weight.shape[2] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def route(self, hidden: Tensor) -> Routing:
        """The routing of hidden (..., D), its leading dimensions flattened to N tokens."""
        return self.router(hidden.reshape(-1, hidden.shape[-1]))

    def forward(self, hidden: Tensor, routing: Routing | None = None) -> Tensor:
        """The block's output for hidden (..., D). routing: made by `route` if None."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        weights, index = self.router(flat) if routing is None else routing
        plan = moe_plan(index, self.gate_up_proj.shape[0], backend=self.backend)
        rows = moe_experts(flat, self.gate_up_proj, self.down_proj, weights, plan, backend=self.backend)
        return moe_combine(rows, plan, backend=self.backend).reshape(hidden.shape)

    def extra_repr(self) -> str:
        num_experts, hidden_size, ffn_size = self.down_proj.shape
        return f"hidden_size={hidden_size}, ffn_size={ffn_size}, num_experts={num_experts}"
