"""One op, backend and dtype on one device: values, every gradient, and the same bits again."""

import contextlib
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fusedce.ops import registry
from fusedce.verify.primitives import LARGE, PRIMITIVES, SMALL, Primitive, Sizes, Tensors
from fusedce.verify.tolerance import Margin, margin, twin_of_sum, worst_twin

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Two ways to the same number in fp64, over sums of a few thousand terms.
STANDARD = 1e-9
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Result:
    """What one op, backend and dtype came to.

    status: "pass", "fail" or "not run". worst: the largest share that an error takes of its bar, of result or gradient
    `where`; reason: what is broken, or why it was not run.
    """

    op: str
    backend: str
    dtype: str
    status: str
    worst: float | None
    where: str
    seconds: float
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        return {**asdict(self), "worst": None if self.worst in (None, torch.inf) else self.worst}


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, fresh memory is NaN, so that what a kernel forgets to write shows. torch has it in its deterministic
    mode, whose warnings are not asked for here."""
    settings: Any = torch.utils.deterministic  # type: ignore[attr-defined]
    was_filled = settings.fill_uninitialized_memory
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    settings.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"(?s).*[Dd]eterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=was_warning)
        settings.fill_uninitialized_memory = was_filled


def check_all(
    device: torch.device,
    ops: tuple[str, ...] = (),
    backends: tuple[str, ...] = (),
    repeats: int = 2,
    progress: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Every op (or `ops`) by every backend (or `backends`) in every dtype; a backend that cannot run says why."""
    results = []
    for primitive in PRIMITIVES:
        if ops and primitive.op not in ops:
            continue
        for backend in backends or tuple(registry.PACKAGES):
            for dtype in DTYPES:
                results.append(check(primitive, backend, dtype, device, repeats))
                progress(results[-1])
    return results


def check(primitive: Primitive, backend: str, dtype: torch.dtype, device: torch.device, repeats: int) -> Result:
    """One op by one backend in one dtype. repeats: how often the same bits must come."""
    start, kind = time.perf_counter(), str(dtype).removeprefix("torch.")
    missing = registry.why_not(primitive.op, backend, device.type, dtype)
    if missing:
        return Result(primitive.op, backend, kind, "not run", None, "", 0.0, missing)
    worst, where = Margin(0.0, None), ""
    try:
        for sizes in (SMALL, LARGE) if device.type == "cuda" else (SMALL,):
            for name, found in margins(primitive, backend, dtype, device, sizes, repeats).items():
                if (found.broken is not None, found.ratio) > (worst.broken is not None, worst.ratio):
                    worst, where = found, name
    except Exception as error:  # whatever a kernel may fail with on a machine it never ran on is the answer
        worst, where = Margin(torch.inf, f"{type(error).__name__}: {error}"), "call"
    status = "fail" if worst.broken else "pass"
    reason = f"{where}: {worst.broken}" if worst.broken else ""
    return Result(primitive.op, backend, kind, status, worst.ratio, where, time.perf_counter() - start, reason)


def margins(
    primitive: Primitive, backend: str, dtype: torch.dtype, device: torch.device, sizes: Sizes, repeats: int
) -> dict[str, Margin]:
    """By name, how much of its bar each result and gradient takes."""
    rounded = primitive.make(sizes, dtype)
    there = [t if t is None else t.to(device) for t in rounded]
    wide = [t if t is None or not t.is_floating_point() else t.double() for t in rounded]
    gold = evaluate(primitive, lambda *t: primitive.ours("eager", *t), wide)
    twin = evaluate(primitive, primitive.plain, there)
    if device.type != "cpu":
        # torch's GPU kernels and its CPU kernels are both plain torch, and each is right by luck in other rows.
        on_cpu = evaluate(primitive, primitive.plain, rounded)
        floating = [name for name, tensor in twin.items() if tensor.is_floating_point()]
        twin |= {name: worst_twin([twin[name].cpu(), on_cpu[name]], gold[name]) for name in floating}
    if primitive.tokens is not None:
        errors = primitive.tokens(*there).double().cpu() - primitive.tokens(*wide)
        twin[primitive.names[0]] = twin_of_sum(gold[primitive.names[0]], errors)
    found = _standard(gold, evaluate(primitive, primitive.plain, wide))
    with poisoned_memory():
        out = evaluate(primitive, lambda *t: primitive.ours(backend, *t), there)
    if out.keys() != gold.keys():
        return found | {"gradients": Margin(torch.inf, f"{', '.join(out)} came, expected {', '.join(gold)}")}
    for name, tensor in out.items():
        found[name] = (
            margin(tensor, gold[name], twin[name]) if tensor.is_floating_point() else _equal(tensor, gold[name])
        )
    for _ in range(repeats - 1):  # in the mode that the user runs in
        again = evaluate(primitive, lambda *t: primitive.ours(backend, *t), there)
        differ = [name for name in out if not torch.equal(_bits(out[name]), _bits(again[name]))]
        if differ:
            found["repeat"] = Margin(torch.inf, f"{', '.join(differ)}: other bits from the same inputs")
    return found


def evaluate(primitive: Primitive, run: Callable[..., list[Tensor]], tensors: Tensors) -> Named:
    """The results of `run`, and of every floating input its gradient, upstream gradients random and none alike."""
    leaves = [t if t is None else t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    named = dict(zip(primitive.names, run(*leaves), strict=True))
    upstream = {name: upstream_of(name, result) for name, result in named.items() if result.requires_grad}
    if upstream:
        torch.autograd.backward([named[name] for name in upstream], list(upstream.values()))
    given = zip(primitive.inputs, leaves, strict=True)
    grads = {f"d_{name}": t.grad for name, t in given if t is not None and t.grad is not None}
    return {name: tensor.detach() for name, tensor in (named | grads).items()}


def upstream_of(name: str, result: Tensor) -> Tensor:
    """The upstream gradient of a result, the same each time: normal, and none alike."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(result.shape, generator=draw).to(result.device, result.dtype)


def _bits(tensor: Tensor) -> Tensor:
    """What it is stored as, in which NaN is equal to itself and 0 is not −0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _equal(out: Tensor, gold: Tensor) -> Margin:
    """Of whole numbers, which are right or wrong."""
    if out.shape != gold.shape:
        return Margin(torch.inf, f"shape {tuple(out.shape)}, expected {tuple(gold.shape)}")
    wrong = int((out.cpu() != gold.cpu()).sum())
    return Margin(torch.inf, f"{wrong} of {gold.numel()} differ") if wrong else Margin(0.0, None)


def _standard(gold: Named, plain: Named) -> dict[str, Margin]:
    """Nothing, where the eager twin and plain torch agree in fp64; else which of the results they disagree on."""
    found = {}
    for name, tensor in gold.items():
        if not torch.allclose(tensor.double(), plain[name].double(), rtol=STANDARD, atol=STANDARD):
            found[f"standard {name}"] = Margin(torch.inf, "the eager twin and plain torch disagree in fp64")
    return found
