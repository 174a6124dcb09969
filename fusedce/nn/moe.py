"""MoE: a dropless mixture-of-experts feed-forward block, its parameters laid out as in transformers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedce import checks
from fusedce.functional import Routing, moe_experts, moe_plan
from fusedce.nn.presets import moe_preset, router_preset
from fusedce.nn.router import Router
from fusedce.options import SAVES

__all__ = ["MoE"]


class MoE(nn.Module):
    """A mixture of SwiGLU experts: out[n] = Σ_k w[n,k] · down_e · (silu(gate_e · x) · (up_e · x)), e = index[n,k].

    Every token reaches all its experts: nothing is dropped or padded. With shared experts, one SwiGLU block of
    shared_ffn_size on every token is added, times sigmoid(x · shared_gateᵀ) where it has a gate.

    Args:
        hidden_size: D.
        ffn_size: F, of one expert.
        num_experts: E.
        top_k: K, experts a token, from 1 to E.
        shared_ffn_size: S, the shared experts' F together; 0 for none.
        shared_gate: whether a gate weighs the shared experts, as in Qwen2-MoE and Qwen3.5-MoE; DeepSeek's have none.
        save: what the experts keep for the backward, see `fusedce.moe_experts`: "pre_activation", or "plan": nothing.
        backend: of every op, see `fusedce.explain()`.
        device, dtype: of the parameters.
        options: the routing, see `fusedce.nn.Router`, `collect` among them.

    Parameters: `router.weight` (E, D), `gate_up_proj` (E, 2F, D), `down_proj` (E, D, F); `shared_gate_up_proj` (2S, D),
    `shared_down_proj` (D, S) and `shared_gate` (1, D), or None.

    Shape: hidden (..., D) -> (..., D). Under torch.autocast the GEMMs run in its dtype, the routing weights in fp32.
    Memory and determinism are those of `fusedce.moe_experts`.

    Raises:
        TypeError, ValueError: when it is made, an option or a size that no router or no shared expert has; when it is
            called, what `fusedce.moe_experts` raises.

    `forward(hidden, routing)` uses a routing that was made before, by `route(hidden)` or by another engine: for
    metrics of the expert load, for losses on the router, and for replaying the experts that a rollout chose
    (`route(hidden, top_k_index)`).
    """

    shared_gate_up_proj: Tensor | None
    shared_down_proj: Tensor | None
    shared_gate: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        top_k: int,
        *,
        shared_ffn_size: int = 0,
        shared_gate: bool = False,
        save: str = "pre_activation",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if shared_ffn_size < 0 or (shared_gate and not shared_ffn_size):
            raise ValueError(
                f"fusedce.nn.MoE: shared_ffn_size is {shared_ffn_size} with shared_gate={shared_gate}; expected at "
                "least 0, and above it for a gate"
            )
        checks.one_of("nn.MoE", "save", save, SAVES)
        self.save, self.backend = save, backend

        def parameter(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(sizes, device=device, dtype=dtype))

        self.router = Router(hidden_size, num_experts, top_k, backend=backend, device=device, dtype=dtype, **options)
        self.gate_up_proj = parameter(num_experts, 2 * ffn_size, hidden_size)
        self.down_proj = parameter(num_experts, hidden_size, ffn_size)
        self.shared_gate_up_proj = parameter(2 * shared_ffn_size, hidden_size) if shared_ffn_size else None
        self.shared_down_proj = parameter(hidden_size, shared_ffn_size) if shared_ffn_size else None
        self.shared_gate = parameter(1, hidden_size) if shared_gate else None
        self.reset_parameters()

    @classmethod
    def from_config(cls, config: Any, **keywords: Any) -> "MoE":
        """The block of a transformers model's config, for the families of docs/moe.md whose experts are SwiGLU.

        keywords: backend, device, dtype, or an option that differs. ValueError for another family.
        """
        router, block = router_preset(config), moe_preset(config)
        shared = dict(shared_ffn_size=block.shared_ffn_size, shared_gate=block.shared_gate)
        sizes = (router.hidden_size, block.ffn_size, router.num_experts, router.top_k)
        return cls(*sizes, **{**router.options, **shared, **keywords})

    def reset_parameters(self) -> None:
        """Uniform in ±1/√(inputs of the layer), as torch.nn.Linear."""
        self.router.reset_parameters()
        for weight in self.parameters(recurse=False):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def route(self, hidden: Tensor, top_k_index: Tensor | None = None, *, mask: Tensor | None = None) -> Routing:
        """The routing of hidden (..., D), its leading dimensions flattened to N tokens; of the ids top_k_index (N, K)
        where they are given.

        mask: N numbers or booleans, 0 for tokens that the router's losses leave out (`collect`). With hidden
        (B, S, D) those have B sequences.
        """
        num_sequences = hidden.shape[0] if hidden.dim() > 2 and hidden.numel() else 1
        flat = hidden.reshape(-1, hidden.shape[-1])
        return self.router(flat, top_k_index, mask=mask, num_sequences=num_sequences)

    def forward(self, hidden: Tensor, routing: Routing | None = None, *, mask: Tensor | None = None) -> Tensor:
        """The block's output for hidden (..., D). routing: made by `route`, with this mask, if None."""
        weights, index = self.route(hidden, mask=mask) if routing is None else routing
        flat = hidden.reshape(-1, hidden.shape[-1])
        plan = moe_plan(index, self.gate_up_proj.shape[0], backend=self.backend)
        out = moe_experts(
            flat, self.gate_up_proj, self.down_proj, weights, plan, save=self.save, combine=True, backend=self.backend
        )
        if self.shared_gate_up_proj is not None and self.shared_down_proj is not None:
            out = out + self._shared(flat, self.shared_gate_up_proj, self.shared_down_proj)
        return out.reshape(hidden.shape)

    def _shared(self, flat: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> Tensor:
        gate, up = F.linear(flat, gate_up_proj).chunk(2, -1)
        out = F.linear(F.silu(gate) * up, down_proj)
        return out if self.shared_gate is None else torch.sigmoid(F.linear(flat, self.shared_gate)) * out

    def extra_repr(self) -> str:
        num_experts, hidden_size, ffn_size = self.down_proj.shape
        sizes = f"hidden_size={hidden_size}, ffn_size={ffn_size}, num_experts={num_experts}"
        if self.shared_down_proj is None:
            return sizes
        return f"{sizes}, shared_ffn_size={self.shared_down_proj.shape[1]}, shared_gate={self.shared_gate is not None}"
