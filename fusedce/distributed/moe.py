"""ExpertParallelMoE: a mixture-of-experts block whose experts lie on the ranks of a group."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusedce.distributed.collectives import all_gather, local_part
from fusedce.distributed.expert_pipeline import expert_parallel_moe
from fusedce.distributed.expert_plan import ExpertPlan, expert_plan
from fusedce.distributed.kept_plans import kept_plans
from fusedce.functional import Routing
from fusedce.nn import Router
from fusedce.options import ExpertOptions

__all__ = ["ExpertParallelMoE", "LocalExperts"]


class LocalExperts(nn.Module):
    """One rank's experts: a module of its own, so that FSDP can shard it over other ranks than the rest of the block.

    Parameters: `gate_up_proj` (E/R, 2F, D), `down_proj` (E/R, D, F). `settings`: the activation, and what is kept for
    the backward; another `ExpertOptions` may take its place, on all ranks alike. Its `combine` plays no part.
    """

    def __init__(self, num_local: int, hidden_size: int, ffn_size: int, **factory: Any) -> None:
        super().__init__()
        self.settings = ExpertOptions()
        self.gate_up_proj = nn.Parameter(torch.empty(num_local, 2 * ffn_size, hidden_size, **factory))
        self.down_proj = nn.Parameter(torch.empty(num_local, hidden_size, ffn_size, **factory))

    def forward(self, hidden: Tensor, top_k_weights: Tensor, plan: ExpertPlan, backend: str = "auto") -> Tensor:
        """`expert_parallel_moe` of hidden (N, D) and top_k_weights (N, K)."""
        settings = self.settings
        return expert_parallel_moe(
            hidden, self.gate_up_proj, self.down_proj, top_k_weights, plan, activation=settings.activation,
            limit=settings.limit, interleaved=settings.interleaved, save=settings.save, backend=backend,
        )  # fmt: skip


class ExpertParallelMoE(nn.Module):
    """`fusedce.nn.MoE` with rank r of a group of R holding experts [r·E/R, (r + 1)·E/R), and every rank the router.

    Args:
        hidden_size: D.
        ffn_size: F, of one expert.
        num_experts: E, a multiple of R.
        top_k: K, experts a token, from 1 to E.
        group: see `new_expert_group`; None for all ranks.
        dispatcher, num_chunks: see `expert_plan`; num_chunks may be changed between calls, on all ranks alike.
        shared: a module (N, D) -> (N, D) on this rank's tokens whose result is added, or None.
        backend: of every op, see `fusedce.explain()`.
        device, dtype: of the parameters.
        options: the routing, see `fusedce.nn.Router`.

    Modules: `router`, of the same parameters on every rank (an equal seed before the constructor makes them so; keep
    them equal by summing their gradients over the ranks), `experts` (`LocalExperts`), `shared`.

    Shape: hidden (..., D) -> (..., D), the leading dimensions of any size on each rank, also 0. Gradients of the
    experts are sums over the group's tokens, see `expert_parallel_moe`. Inside `keep_plans` a recompute does not route
    again.

    Raises:
        ValueError: E that is no multiple of R; what `fusedce.nn.Router` refuses.

    Errors in a call, memory and determinism: `expert_plan` and `expert_parallel_moe`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        top_k: int,
        *,
        group: dist.ProcessGroup | None = None,
        dispatcher: str = "auto",
        num_chunks: int = 1,
        shared: nn.Module | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        ranks = dist.get_world_size(group)
        if num_experts % ranks:
            raise ValueError(
                f"fusedce.ExpertParallelMoE: num_experts is {num_experts}; expected a multiple of the group's {ranks} "
                "ranks"
            )
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.group, self.dispatcher, self.num_chunks, self.backend = group, dispatcher, num_chunks, backend
        self.router = Router(hidden_size, num_experts, top_k, backend=backend, **factory, **options)
        self.experts = LocalExperts(num_experts // ranks, hidden_size, ffn_size, **factory)
        self.shared = shared
        self.reset_parameters()

    @property
    def num_experts(self) -> int:
        """E, of all ranks."""
        return self.router.weight.shape[0]

    @property
    def local_experts(self) -> slice:
        """The experts of this rank among all E."""
        count = self.num_experts // dist.get_world_size(self.group)
        return slice(dist.get_rank(self.group) * count, (dist.get_rank(self.group) + 1) * count)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform in ±1/√(inputs of the layer). Every rank draws all E experts, one at a time, and keeps its own: with
        one seed on all ranks no two ranks have the same experts."""
        self.router.reset_parameters()
        local = self.local_experts
        for parameter in (self.experts.gate_up_proj, self.experts.down_proj):
            bound = parameter.shape[-1] ** -0.5
            for expert in range(self.num_experts):
                drawn = torch.empty_like(parameter[0]).uniform_(-bound, bound)
                if local.start <= expert < local.stop:
                    parameter[expert - local.start] = drawn

    @torch.no_grad()
    def load_experts(self, gate_up_proj: Tensor, down_proj: Tensor) -> None:
        """Take this rank's part of all experts' weights, (E, 2F, D) and (E, D, F), such as a checkpoint's."""
        for parameter, whole in ((self.experts.gate_up_proj, gate_up_proj), (self.experts.down_proj, down_proj)):
            if whole.shape != (self.num_experts, *parameter.shape[1:]):
                raise ValueError(
                    f"fusedce.ExpertParallelMoE: weights {tuple(whole.shape)} are not those of {self.num_experts} "
                    f"experts of {tuple(parameter.shape[1:])}"
                )
            parameter.copy_(whole[self.local_experts])

    @torch.no_grad()
    def gathered_experts(self) -> tuple[Tensor, Tensor]:
        """All experts' (E, 2F, D) and (E, D, F), on every rank of the group: for a checkpoint that any number of ranks
        can load. A collective call; parameters that FSDP has sharded must be whole in the group's rank."""
        wholes = []
        for parameter in (self.experts.gate_up_proj, self.experts.down_proj):
            part = local_part(parameter).contiguous()
            whole = part.new_empty((self.num_experts, *part.shape[1:]))
            all_gather(whole, part, group=self.group)
            wholes.append(whole)
        return wholes[0], wholes[1]

    def plan(self, hidden: Tensor, top_k_index: Tensor) -> ExpertPlan:
        """The plan for tokens (N, D) and their experts (N, K); a collective call, see `expert_plan`."""
        return expert_plan(
            hidden, top_k_index, self.num_experts, group=self.group, dispatcher=self.dispatcher,
            num_chunks=self.num_chunks, backend=self.backend,
        )  # fmt: skip

    def forward(
        self,
        hidden: Tensor,
        routing: Routing | None = None,
        *,
        plan: ExpertPlan | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The block's output for hidden (..., D).

        routing: made before, by `router` or another engine; None to route here. plan: made before, for this routing;
        its experts are weighed where no routing is given. mask: see `fusedce.nn.MoE.route`.
        """
        flat = hidden.reshape(-1, hidden.shape[-1])
        kept = kept_plans()
        if plan is None and kept is not None and kept.recomputing:
            plan = kept.take()
        if routing is None:
            num_sequences = hidden.shape[0] if hidden.dim() > 2 and hidden.numel() else 1
            index = None if plan is None else plan.top_k_index
            routing = self.router(flat, index, mask=mask, num_sequences=num_sequences)
        if plan is None:
            plan = self.plan(flat, routing.top_k_index)
            if kept is not None:
                kept.add(plan)
        out = self.experts(flat, routing.top_k_weights, plan, self.backend)
        if self.shared is not None:
            out = out + self.shared(flat)
        return out.reshape(hidden.shape)

    def extra_repr(self) -> str:
        ranks = dist.get_world_size(self.group)
        chosen = f"dispatcher={self.dispatcher!r}, num_chunks={self.num_chunks}"
        return f"num_experts={self.num_experts}, ranks={ranks}, {chosen}"
