"""Who takes part in bench/linear_ce.py: torch in its several ways, our backends, and the peers that are installed.

None of the peers is needed to run a benchmark: one that does not import is left out, and a line says so. What the peers
are called on PyPI, and the releases that this file is written for: liger-kernel 0.8.5, cut-cross-entropy 25.1.1,
quack-kernels 0.6.5 (Hopper and later). torch's own chunked loss is in torch 2.13.
"""

import contextlib
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedce

# hidden (N, D), weight (V, D), target (N,) -> the mean loss, or each token's log-prob
Run = Callable[[Tensor, Tensor, Tensor], Tensor]
QUACK_CHUNK = 4096  # rows


def losses(device: str) -> dict[str, Run]:
    """Provider name -> loss(hidden, weight, target)."""

    def eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), target)

    found: dict[str, Run] = {"torch-eager": eager}
    if device == "cuda":
        found["torch-compile"] = torch.compile(eager)
    for backend in _backends(device):
        found[f"fusedce-{backend}"] = lambda h, w, t, b=backend: fusedce.linear_cross_entropy(h, w, t, backend=b)
    for name, peer in PEERS.items():
        try:
            found |= peer()
        except (ImportError, AttributeError, RuntimeError) as error:
            print(f"  {name} is not here: no row for it ({type(error).__name__}: {str(error)[:120]})", flush=True)
    return found


def log_probs(device: str) -> dict[str, Run]:
    """Provider name -> log-prob of each token. Without a line for who is not here: `losses` has said so."""

    def eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return -F.cross_entropy(F.linear(hidden, weight), target, reduction="none")

    found: dict[str, Run] = {"torch-eager": eager}
    if device == "cuda":
        found["torch-compile"] = torch.compile(eager)
    for backend in _backends(device):
        found[f"fusedce-{backend}"] = lambda h, w, t, b=backend: fusedce.linear_logprob(
            h, w, t, with_entropy=False, backend=b
        )[0]
    with contextlib.suppress(ImportError):
        found |= {name: lambda h, w, t, run=run: -run(h, w, t, reduction="none") for name, run in _cce().items()}
    return found


def _backends(device: str) -> list[str]:
    """Those of ours that run there; on a GPU not eager, whose GEMMs are fp32: hours at these sizes."""
    said = fusedce.explain("linear_logprob", device)
    runs = [name for name in ("triton", "native", "eager") if f"{name}: could run" in said or f": {name} (" in said]
    return [name for name in runs if name != "eager" or device != "cuda"]


def _torch_chunked() -> dict[str, Run]:
    """torch's own chunked loss, with its own choice of chunks and accumulation, and the exact one."""
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    def run(options: LinearCrossEntropyOptions) -> Run:
        return lambda h, w, t: F.linear_cross_entropy(h, w, t, options=options)

    accurate = LinearCrossEntropyOptions(acc_policy="accurate")
    return {"torch-chunked": run(LinearCrossEntropyOptions()), "torch-chunked-accurate": run(accurate)}


def _liger() -> dict[str, Run]:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    def run(loss: Callable[..., Tensor]) -> Run:
        return lambda h, w, t: loss(w, h, t)

    exact = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
    return {"liger": run(LigerFusedLinearCrossEntropyLoss()), "liger-fp32": run(exact)}


def _cce() -> dict[str, Callable[..., Tensor]]:
    """Cut Cross-Entropy, with its filter of small gradients and without."""
    from cut_cross_entropy import linear_cross_entropy

    return {"cce": linear_cross_entropy, "cce-no-filter": functools.partial(linear_cross_entropy, filter_eps=None)}


def _quack() -> dict[str, Run]:
    """QuACK. Its cache of compiled kernels has no key for some values and raises TypeError: those get their type's
    name."""
    from quack.gemm_runtime import identity

    of_value = identity.semantic_value_key

    def key(value: object, seen: object) -> object:
        try:
            return of_value(value, seen)
        except TypeError:
            return repr(type(value))

    identity.semantic_value_key = key
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return {"quack": lambda h, w, t: chunked_linear_cross_entropy(h, w, t, chunk_size=QUACK_CHUNK)}


PEERS: dict[str, Callable[[], dict[str, Run]]] = {
    "torch.nn.functional.linear_cross_entropy": _torch_chunked,
    "liger-kernel": _liger,
    "cut-cross-entropy": _cce,
    "quack-kernels": _quack,
}
