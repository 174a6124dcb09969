"""Inputs, plain-torch references and upstream gradients for the tests of the mixture of experts."""

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedce
from fusedce.ops.registry import PACKAGES
from tests.conftest import Place

NAMES = ("out", "d_hidden", "d_gate_up_proj", "d_down_proj", "d_top_k_weights")


@dataclass(frozen=True)
class Case:
    """One problem. loads: "random"; "one" (expert 0 is everybody's choice); "half" (the upper experts get nothing)."""

    num_tokens: int
    depth: int
    ffn: int
    num_experts: int
    top_k: int
    dtype: torch.dtype = torch.float32
    loads: str = "random"

    def __str__(self) -> str:
        sizes = f"N{self.num_tokens}-D{self.depth}-F{self.ffn}-E{self.num_experts}-K{self.top_k}"
        return f"{sizes}-{str(self.dtype).removeprefix('torch.')}-{self.loads}"

    def index(self, device: str) -> Tensor:
        """top_k_index (N, K) int64, K different experts a token."""
        generator = torch.Generator().manual_seed(self.num_tokens * 31 + self.num_experts)
        scores = torch.rand(self.num_tokens, self.num_experts, generator=generator)
        if self.loads == "one":
            scores[:, 0] = 2.0
        elif self.loads == "half":
            scores[:, max(self.num_experts // 2, self.top_k) :] = -1.0
        return scores.topk(self.top_k, 1).indices.to(device)

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """hidden, gate_up_proj, down_proj, top_k_weights (fp32), top_k_index."""
        generator = torch.Generator().manual_seed(self.num_tokens * 17 + self.ffn)
        hidden = torch.randn(self.num_tokens, self.depth, generator=generator)
        gate_up = torch.randn(self.num_experts, 2 * self.ffn, self.depth, generator=generator) * self.depth**-0.5
        down = torch.randn(self.num_experts, self.depth, self.ffn, generator=generator) * self.ffn**-0.5
        weights = torch.rand(self.num_tokens, self.top_k, generator=generator) + 0.1
        weights = weights.double() if self.dtype == torch.float64 else weights
        moved = [t.to(device, self.dtype) for t in (hidden, gate_up, down)]
        return moved[0], moved[1], moved[2], weights.to(device), self.index(device)


def upstream(case: Case, kind: str, device: str) -> Tensor:
    """An upstream gradient (N, D): "ones", "random", "expanded" (stride 0), "transposed" or "strided"."""
    shape = (case.num_tokens, case.depth)
    if kind == "ones":
        return torch.ones(shape, device=device, dtype=case.dtype)
    if kind == "expanded":
        return torch.tensor(0.7, device=device, dtype=case.dtype).expand(shape)
    random = torch.randn(shape[0], 2 * shape[1], generator=torch.Generator().manual_seed(7)).to(device, case.dtype)
    if kind == "transposed":
        return random[:, : shape[1]].t().contiguous().t()
    return random[:, ::2] if kind == "strided" else random[:, : shape[1]].contiguous()


def plain(hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, index: Tensor) -> list[Tensor]:
    """[out] by plain torch in the inputs' dtype: each expert on the tokens that chose it."""
    rows = hidden.new_zeros((*index.shape, hidden.shape[1]))
    for expert in range(down.shape[0]):
        token, choice = (index == expert).nonzero(as_tuple=True)
        gate, up = F.linear(hidden[token], gate_up[expert]).chunk(2, 1)
        out = F.linear(F.silu(gate) * up, down[expert])
        rows = rows.index_put((token, choice), out * weights[token, choice].to(out.dtype)[:, None])
    return [rows.sum(1)]


def ours(backend: str, hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, index: Tensor) -> list[Tensor]:
    """[out] by the ops."""
    plan = fusedce.moe_plan(index, down.shape[0], backend=backend)
    rows = fusedce.moe_experts(hidden, gate_up, down, weights, plan, backend=backend)
    return [fusedce.moe_combine(rows, plan, backend=backend)]


def package(place: Place) -> ModuleType:
    """The backend itself, for what the ops would refuse or report on the way."""
    return importlib.import_module(PACKAGES[place.backend])
