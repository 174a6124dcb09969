"""How an op's gradient is registered: as by torch.library.register_autograd, with less work a call.

torch's own looks for defaults by walking the op's schema in every call, which it reads anew for every argument: work of
the host that grows with the square of their number. Here the defaults are read once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import _C

from fusedce.ops.schema import LIB, NAMESPACE


class _Call(NamedTuple):
    """What the dispatcher hands down beside the positional arguments."""

    keys: Any
    options: dict[str, Any]


def register_autograd(name: str, backward: Callable[..., Any], setup_context: Callable[..., Any] | None = None) -> None:
    """Give the op `name` a gradient.

    backward(ctx, *grads): a gradient for each positional argument. setup_context(ctx, inputs, keyword_only_inputs,
    output): saves what that needs. Both see all arguments, also those that were left to their default.
    """
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    arguments = list(overload._schema.arguments)
    positional = tuple(argument.default_value for argument in arguments if not argument.kwarg_only)
    by_name = {argument.name: argument.default_value for argument in arguments if argument.kwarg_only}

    def run(call: _Call, inputs: tuple[Any, ...]):  # type: ignore[no-untyped-def]
        with _C._AutoDispatchBelowAutograd():
            return overload.redispatch(call.keys & _C._after_autograd_keyset, *inputs, **call.options)

    def forward(ctx, *inputs_and_call):  # type: ignore[no-untyped-def]
        inputs, call = inputs_and_call[:-1], inputs_and_call[-1]
        output = run(call, inputs)
        if setup_context is not None:
            setup_context(ctx, inputs, by_name | call.options, output)
        return output

    def of_inputs(ctx, *grads):  # type: ignore[no-untyped-def]
        return *backward(ctx, *grads), None

    functions = {"forward": staticmethod(forward), "backward": staticmethod(of_inputs)}
    function: Any = type(f"{name}_", (torch.autograd.Function,), functions)

    def implementation(keys, *given, **options):  # type: ignore[no-untyped-def]
        # The dispatcher leaves out trailing arguments that have their default.
        inputs, call = (*given, *positional[len(given) :]), _Call(keys, options)
        if torch.is_grad_enabled() and _C._any_requires_grad(*inputs):
            return function.apply(*inputs, call)
        return run(call, inputs)

    LIB.impl(name, implementation, "Autograd", with_keyset=True)
