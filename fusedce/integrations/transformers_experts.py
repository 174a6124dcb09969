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
from fusedce.functional import moe_experts, moe_plan
from fusedce.options import SAVES

__all__ = ["ExpertsHandle", "fuse_experts"]

# What the class of an experts module's act_fn is called, and what the activation is here.
_ACTIVATIONS = {
    "SiLU": "swiglu",
    "SiLUActivation": "swiglu",
    "GELU": "geglu",
    "GELUActivation": "geglu",
    "GELUTanh": "geglu_tanh",
    "PytorchGELUTanh": "geglu_tanh",
}
_GPT_OSS_ALPHA = 1.702


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


def fuse_experts(model: nn.Module, *, save: str = "pre_activation", backend: str = "auto") -> ExpertsHandle:
    """Let every experts module of a transformers MoE model run by `moe_plan` and `moe_experts`.

    Values and gradients are those of the stock experts up to rounding; routing weights are applied in fp32. Parameters,
    their names, state_dict and class stay as they are, so checkpoints, PEFT and optimizers see no difference.

    Args:
        model: a model of transformers ≥ 5 with SwiGLU experts, such as Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE,
            Qwen3-Next, Qwen3.5-MoE, DeepSeek-V2 and V3, GLM-4-MoE; or a PeftModel around one.
        save: what is kept for the backward, see `fusedce.moe_experts`: "plan" keeps no activation at all.
        backend: see `fusedce.moe_experts`.

    Returns:
        An `ExpertsHandle` to undo it, also a context manager.

    Raises:
        TypeError: there are no experts that transformers' registry serves, or a module's experts are not what
            `moe_experts` computes (another activation, no gate, a norm behind them), by its name.
            The same at a call, where the module has changed since or was given the registered name by its config.

    Memory: that of `fusedce.moe_experts`. Works under autocast, gradient checkpointing, torch.compile (one graph) and
    transformers' own expert parallelism, whose slots for other ranks take no part. The name of the function lies in the
    model's config: an unpickled copy needs one call of this in its process.
    """
    checks.one_of("fuse_experts", "save", save, SAVES)
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
    name = _registered(save, backend)
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


def _registered(save: str, backend: str) -> str:
    """The name of the function with these options in transformers' registry."""
    registry = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    name = "_".join(["fusedce", *(option for option in (save, backend) if option not in ("pre_activation", "auto"))])
    registry.register(name, functools.partial(_forward, save, backend))
    return name


def _is_experts(module: Any) -> bool:
    """Whether transformers' decorator of experts made it: these are the attributes that it sets."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated"))


def _refuse(module: Any) -> None:
    """TypeError unless `moe_experts` computes what the module's experts do."""
    reason = None
    if not module.has_gate:
        reason = "have no gate"
    elif getattr(module, "has_post_expert_norm", False):
        reason = "have a norm behind each expert"
    elif _activation(module) is None:
        own = getattr(type(module), "_apply_gate", None)
        name = type(getattr(module, "act_fn", None)).__name__
        default = getattr(own, "__name__", "") == "_default_apply_gate"
        reason = f"have the activation {name}" if default else "have an activation of their own"
    if reason:
        raise TypeError(f"fusedce.fuse_experts: the experts of {type(module).__name__} {reason}, which is not fused")


def _activation(module: Any) -> str | None:
    """Its name in `moe_experts`, None for another."""
    own = getattr(type(module), "_apply_gate", None)
    if getattr(own, "__name__", "") == "_default_apply_gate":
        return _ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__)
    # A gate of its own is known by its class alone; the clamp is a number of the module's.
    same = type(module).__name__ == "GptOssExperts" and module.alpha == _GPT_OSS_ALPHA and not module.is_concatenated
    return "gpt_oss" if same else None


def _forward(
    save: str, backend: str, self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of an experts module: hidden_states (N, D), ids and weights (N, K) -> (N, D)."""
    _refuse(self)
    activation = _activation(self) or ""
    gate_up, down = self.gate_up_proj, self.down_proj
    if self.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    num_experts = down.shape[0]
    if self._is_expert_parallel:
        # E stands for the experts of other ranks.
        top_k_index = torch.where(top_k_index >= num_experts, -1, top_k_index)
    out = moe_experts(
        hidden_states.to(gate_up.dtype),
        gate_up,
        down,
        top_k_weights,
        moe_plan(top_k_index, num_experts, backend=backend),
        gate_up_bias=self.gate_up_proj_bias if self.has_bias else None,
        down_bias=self.down_proj_bias if self.has_bias else None,
        activation=activation,
        limit=self.limit if activation == "gpt_oss" else 7.0,
        interleaved=not self.is_concatenated,
        save=save,
        combine=True,
        backend=backend,
    )
    return out.to(hidden_states.dtype)
