"""The public names of the package with their arguments, as a list that a change shows up in.

python -m tests.house.public     writes tests/house/public.txt
"""

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType

from tests.house.source import ROOT

MODULES = (
    "fusedce", "fusedce.nn", "fusedce.functional", "fusedce.distributed", "fusedce.integrations.transformers",
)  # fmt: skip
LIST = ROOT / "tests" / "house" / "public.txt"


def names_of(module: ModuleType) -> list[str]:
    """Its __all__, or what it defines without an underscore."""
    given = getattr(module, "__all__", None)
    own = [
        n for n, v in vars(module).items() if not n.startswith("_") and getattr(v, "__module__", "") == module.__name__
    ]
    return sorted(own if given is None else given)


def arguments_of(value: object) -> str:
    """The arguments of a function or class, without types; "" for anything else. A default is shown as "=…"."""
    if not callable(value):
        return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parts, star = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        parts.append(f"{prefix}{parameter.name}" + "=…" * (parameter.default is not parameter.empty))
    return f"({', '.join(parts)})"


def lines() -> Iterator[str]:
    """One public name a line."""
    for name in MODULES:
        module = importlib.import_module(name)
        for public in names_of(module):
            yield f"{name}.{public}{arguments_of(getattr(module, public))}"


if __name__ == "__main__":
    LIST.write_text("".join(f"{line}\n" for line in lines()), encoding="utf-8")
