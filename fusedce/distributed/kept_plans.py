"""Plans that outlive a forward, so that its recompute does not route again: `keep_plans`."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

__all__ = ["KeptPlans", "keep_plans", "kept_plans"]


class KeptPlans:
    """The plans of one region's forward, in the order of its layers. recomputing: whether they are being used again.

    A plan is what a layer needs to route as before: an `ExpertPlan`, or the chosen experts (N, K) where all are here.
    """

    def __init__(self) -> None:
        self.plans: list[Any] = []
        self.recomputing = False
        self._taken = 0

    def add(self, plan: Any) -> None:
        self.plans.append(plan)

    def take(self) -> Any:
        """The next layer's plan; RuntimeError where the recompute runs more layers than the forward did."""
        if self._taken == len(self.plans):
            raise RuntimeError(
                f"fusedce.keep_plans: the recompute asks for plan {self._taken + 1} of a forward that made "
                f"{len(self.plans)}; the region must run the same layers both times"
            )
        self._taken += 1
        return self.plans[self._taken - 1]

    @contextlib.contextmanager
    def entered(self, recomputing: bool) -> Iterator[None]:
        """Inside, the layers of this thread keep their plans here, or take them from the first one on."""
        self.recomputing, self._taken = recomputing, 0
        if not recomputing:
            self.plans.clear()
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[KeptPlans | None] = ContextVar("fusedce_kept_plans", default=None)


def kept_plans() -> KeptPlans | None:
    """Where a layer that runs now is to keep its plan, or to take it from; None outside of `keep_plans`."""
    return _current.get()


def keep_plans() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """(forward, recompute): contexts for a region's forward and for running it again.

    `torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False, context_fn=keep_plans)`, or with a recompute of
    your own `with forward: …` and later `with recompute: …`. The `ExpertParallelMoE` layers in the region then route in
    the forward alone: the recompute weighs the same experts (`fusedce.moe_replay`), exchanges no counts and waits for
    no copy to the host, and whatever ties or rounding there are, it sends the same rows. The regions do not nest.

    Memory: the plans, see `fusedce.distributed.expert_plan`, until the graph of the region is freed.
    """
    kept = KeptPlans()
    return kept.entered(recomputing=False), _Repeatable(kept)


class _Repeatable(AbstractContextManager[None]):
    """The recompute's context, which a graph that is kept enters once for each backward."""

    def __init__(self, kept: KeptPlans) -> None:
        self._kept = kept
        self._inside: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._inside.append(self._kept.entered(recomputing=True))
        self._inside[-1].__enter__()

    def __exit__(self, *error: object) -> None:
        self._inside.pop().__exit__(*error)  # type: ignore[arg-type]
