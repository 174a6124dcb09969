"""fuse_experts: the experts of a transformers MoE model by fusedce's ops, through transformers' own registry of
experts.

transformers ≥ 5 asks a registry, by a name in the model's config, which function stands for the forward of an experts
module. This puts fusedce's functions there and sets the name. Routers, shared experts and losses stay the model's own.
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor, nn

from fusedce import checks, env
from fusedce.functional import moe_combine, moe_experts, moe_plan

__all__ = ["ExpertsHandle", "fuse_experts"]

_SILU = ("SiLU", "SiLUActivation")


class ExpertsHandle:
    """What `fuse_experts` returns: `undo()` takes it back, and so does leaving it as a context manager."""

    def __init__(self, model: Any, before: dict[str, Any]) -> None:
        self._model, self._before = model, before
        self._done = False

    def undo(self) -> None:
        """Set what was set before. Twice is once; of several handles of a model, undo the newest first."""
        if not self._done:
            self._model.set_experts_implementation(self._before)
        self._done = True

    def __enter__(self) -> "ExpertsHandle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


def fuse_experts(model: nn.Module, *, backend: str = "auto") -> ExpertsHandle:
    """Let every experts module of a transformers MoE model run by `moe_plan`, `moe_experts` and `moe_combine`.

    Values and gradients are those of the stock experts up to rounding; routing weights are applied in fp32. Parameters,
    their names, state_dict and class stay as they are, so checkpoints, PEFT and optimizers see no difference.

    Args:
        model: a model of transformers ≥ 5 with SwiGLU experts, such as Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE,
            Qwen3-Next, Qwen3.5-MoE, DeepSeek-V2 and V3, GLM-4-MoE; or a PeftModel around one.
        backend: see `fusedce.moe_experts`.

    Returns:
        An `ExpertsHandle` to undo it, also a context manager.

    Raises:
        TypeError: there are no experts that transformers' registry serves, or a module's experts are not what
            `moe_experts` computes (another activation, biases, interleaved gates, a norm behind them), by its name.
            The same at a call, where the module has changed since or was given the registered name by its config.

    Memory: that of `fusedce.moe_experts`. Works under autocast, gradient checkpointing, torch.compile (one graph) and
    transformers' own expert parallelism, whose slots for other ranks take no part. The name of the function lies in the
    model's config: an unpickled copy needs one call of this in its process.
    """
    checks.one_of("fuse_experts", "backend", backend, env.BACKENDS)
    target = _pretrained(model)
    found = [module for module in target.modules() if _is_experts(module)]
    if not found:
        raise TypeError(
            f"fusedce.fuse_experts: {type(target).__name__} has no experts of transformers' registry; expected an MoE "
            "model of transformers 5, before DDP, FSDP1 or torch.compile wrap it"
        )
    for module in found:
        _refuse(module)
    name = _registered(backend)
    handle = ExpertsHandle(target, target.get_experts_implementation())
    target.set_experts_implementation(name)
    missed = [module for module in found if module.config._experts_implementation != name]
    if missed:
        handle.undo()
        raise TypeError(
            f"fusedce.fuse_experts: {type(target).__name__} does not pass the choice on to {type(missed[0]).__name__}"
        )
    return handle


def _pretrained(model: nn.Module) -> Any:
    """The PreTrainedModel in a PeftModel, or the model itself."""
    base = getattr(model, "get_base_model", None)
    target: Any = base() if callable(base) else model
    if not hasattr(target, "set_experts_implementation"):
        raise TypeError(
            f"fusedce.fuse_experts: {type(target).__name__} has no set_experts_implementation; expected a model of "
            "transformers 5, before DDP, FSDP1 or torch.compile wrap it"
        )
    return target


def _registered(backend: str) -> str:
    """The name of the backend's function in transformers' registry."""
    registry = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    name = "fusedce" if backend == "auto" else f"fusedce_{backend}"
    registry.register(name, functools.partial(_forward, backend))
    return name


def _is_experts(module: Any) -> bool:
    """Whether transformers' decorator of experts made it: these are the attributes that it sets."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated"))


def _refuse(module: Any) -> None:
    """TypeError unless the module's experts are down · (silu(gate · x) · (up · x)), gate and up one behind the
    other."""
    reason = None
    apply_gate = getattr(type(module), "_apply_gate", None)
    if not module.has_gate:
        reason = "have no gate"
    elif getattr(apply_gate, "__name__", "") != "_default_apply_gate":
        reason = "have an activation of their own"
    elif type(getattr(module, "act_fn", None)).__name__ not in _SILU:
        reason = f"have the activation {type(getattr(module, 'act_fn', None)).__name__}, not SiLU"
    elif module.has_bias:
        reason = "have biases"
    elif not module.is_concatenated:
        reason = "have gate and up rows interleaved"
    elif getattr(module, "has_post_expert_norm", False):
        reason = "have a norm behind each expert"
    if reason:
        raise TypeError(f"fusedce.fuse_experts: the experts of {type(module).__name__} {reason}, which is not fused")


def _forward(backend: str, self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module: hidden_states (N, D), ids and weights (N, K) -> (N, D)."""
    _refuse(self)
    gate_up, down = self.gate_up_proj, self.down_proj
    if self.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    num_experts = down.shape[0]
    if self._is_expert_parallel:
        # E stands for the experts of other ranks.
        top_k_index = torch.where(top_k_index >= num_experts, -1, top_k_index)
    plan = moe_plan(top_k_index, num_experts, backend=backend)
    rows = moe_experts(hidden_states.to(gate_up.dtype), gate_up, down, top_k_weights, plan, backend=backend)
    return moe_combine(rows, plan, backend=backend).to(hidden_states.dtype)
