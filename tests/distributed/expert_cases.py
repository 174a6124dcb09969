"""Problems for the experts over several ranks: whole inputs, the same on every rank, and this rank's part of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from fusedce.distributed import expert_parallel_moe, expert_plan
from tests.linear_ce_cases import in_fp64, with_gradients
from tests.moe_cases import Case, plain, upstream

NAMES = ("out", "d_hidden", "d_gate_up_proj", "d_down_proj", "d_top_k_weights")


@dataclass(frozen=True)
class Layout:
    """How N tokens lie on the ranks. shares: parts of each, in turn where there are more ranks than shares."""

    shares: tuple[int, ...]

    def tokens(self, num_tokens: int) -> slice:
        """This rank's."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        shares = [self.shares[at % len(self.shares)] for at in range(ranks)]
        total = sum(shares)
        bounds = [num_tokens * sum(shares[:at]) // total for at in range(ranks + 1)] if total else [0] * (ranks + 1)
        return slice(bounds[rank], bounds[rank + 1])


EVEN, UNEVEN, ONE_HAS_NONE, FIRST_HAS_ALL = Layout((1,)), Layout((3, 1, 5, 2)), Layout((2, 0)), Layout((1, 0, 0, 0))


@dataclass(frozen=True)
class Problem:
    """A case of the experts on one rank, and where its tokens lie here. missing: some slots take no part."""

    case: Case
    layout: Layout
    grad: str = "random"
    missing: bool = False

    def inputs(self, device: str = "cpu") -> list[Tensor]:
        """hidden, gate_up_proj, down_proj, top_k_weights, top_k_index of all tokens and experts."""
        *tensors, index = self.case.inputs(device)
        if self.missing:
            index[::2, 0], index[4] = -1, -1
        return [*tensors, index]

    def local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's tokens and experts of [hidden, gate_up_proj, down_proj, top_k_weights, …]."""
        tokens, experts = self.layout.tokens(self.case.num_tokens), self.experts
        parts = (tokens, experts, experts, *[tokens] * (len(tensors) - 3))
        return [tensor[part] for tensor, part in zip(tensors, parts, strict=True)]

    @property
    def experts(self) -> slice:
        local = self.case.num_experts // dist.get_world_size()
        return slice(dist.get_rank() * local, (dist.get_rank() + 1) * local)

    def upstream(self, device: str = "cpu") -> Tensor:
        """The gradient (N, D) of all tokens' results."""
        return upstream(self.case, self.grad, device)

    def references(self, device: str = "cpu") -> tuple[list[Tensor], list[Tensor]]:
        """Gold and twin on this rank: out and the gradients, of one rank's layer on everything."""
        tensors, grad = self.inputs(device), self.upstream(device)
        gold = with_gradients(plain, in_fp64(tensors), [grad.cpu().double()])
        return self._mine(gold), self._mine(with_gradients(plain, tensors, [grad]))

    def _mine(self, results: list[Tensor]) -> list[Tensor]:
        out, *grads = results
        return [out[self.layout.tokens(self.case.num_tokens)], *self.local(grads)]

    def ours(self, dispatcher: str, num_chunks: int, device: str = "cpu", backend: str = "auto") -> list[Tensor]:
        """out and the gradients by the ranks together."""
        *tensors, index = self.local(self.inputs(device))

        def layer(hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> list[Tensor]:
            options = dict(dispatcher=dispatcher, num_chunks=num_chunks, backend=backend)
            plan = expert_plan(hidden, index, self.case.num_experts, **options)
            return [expert_parallel_moe(hidden, gate_up, down, weights, plan, backend=backend)]

        grad = self.upstream(device)[self.layout.tokens(self.case.num_tokens)]
        return with_gradients(layer, tensors, [grad])
