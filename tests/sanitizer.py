"""Linear cross-entropy under NVIDIA's compute-sanitizer: memory out of bounds, memory that nothing wrote, races in
shared memory. Needs a GPU, and the sanitizer of the CUDA toolkit in PATH.

    python -m tests.sanitizer          all tools over all cases; ends with 1 if one found something in our kernels
    python -m tests.sanitizer cases    the cases alone, without a tool
"""

import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import fusedce
from fusedce import hip

TOOLS = ("memcheck", "initcheck", "racecheck")
TIMEOUT = 1500  # seconds for one tool
# Rows, words and depth that end in the midst of every tile; two tiles each way in the last.
SHAPES = ((1, 2, 8), (37, 129, 24), (131, 515, 72))
BF16 = torch.bfloat16
OPTIONS = (
    {"dtype": BF16},
    {"dtype": BF16, "bias": True},
    {"dtype": BF16, "softcap": 3.0, "temperature": True},
    {"dtype": BF16, "bias": True, "softcap": 3.0},
    {"dtype": torch.float32, "bias": True, "softcap": 3.0},
    {"dtype": torch.float16, "bias": True, "temperature": True},
)
ROOT = Path(__file__).resolve().parent.parent
# A report says "… access at NAME(…" or, on a line of its own, "at NAME+0x…".
PLACE = re.compile(r"^=+ .*\bat (?:void )?([A-Za-z_](?:\w|::|\(anonymous namespace\))*)", re.MULTILINE)
SUMMARY = re.compile(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """One call with its gradients."""

    backend: str
    what: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    bias: bool = False
    softcap: float | None = None
    temperature: bool = False

    def run(self) -> None:
        """Every seventh row is ignored and full of NaN; the first target is out of the exponential's reach."""
        num_rows, vocab, depth = self.shape
        new = partial(torch.randn, device="cuda")
        hidden, weight = new(num_rows, depth).to(self.dtype), new(vocab, depth).to(self.dtype)
        bias = new(vocab).to(self.dtype) if self.bias else None
        target = torch.randint(0, vocab, (num_rows,), device="cuda")
        if bias is not None:
            bias[target[0]] = -300.0
        target[6::7], hidden[6::7] = -100, torch.nan
        leaves = [t.requires_grad_() for t in (hidden, weight, bias) if t is not None]
        options = {
            "softcap": self.softcap,
            "temperature": 0.5 + torch.rand(num_rows, device="cuda") if self.temperature else 0.7,
            "backend": self.backend,
        }
        results = CALLS[self.what](hidden, weight, target, bias, options)
        torch.autograd.backward(results, [torch.randn_like(result) for result in results])
        grads = [leaf.grad for leaf in leaves]
        finite = [t.isfinite().all() for t in (*results, *grads)]
        assert torch.stack(finite).all().item(), f"{self} has results that are not finite"


def _log_probs(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: dict, with_entropy: bool
) -> list[Tensor]:
    out = fusedce.linear_logprob(hidden, weight, target, bias=bias, with_entropy=with_entropy, **options)
    return [result for result in out if result is not None and result.numel()]


def _loss(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: dict) -> list[Tensor]:
    return [fusedce.linear_cross_entropy(hidden, weight, target, linear_bias=bias, z_loss=1e-3, **options)]


def _words(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: dict) -> list[Tensor]:
    """Three slots, of which two are of one word; and the greedy word."""
    greedy = fusedce.linear_argmax(hidden, weight, bias=bias, target=target, backend=options["backend"])
    ids = torch.stack((target, greedy.where(target != -100, target), target), 1)
    return [fusedce.linear_logprob_of(hidden, weight, ids, bias=bias, **options)]


CALLS: dict[str, Callable[..., list[Tensor]]] = {
    "logprob": partial(_log_probs, with_entropy=False),
    "entropy": partial(_log_probs, with_entropy=True),
    "loss": _loss,
    "words": _words,
}


def cases() -> list[Case]:
    """More than a hundred."""
    backends = ("triton", *(("native",) if hip.unavailable() is None else ()))
    return [
        Case(backend, what, shape, **options)
        for backend, what, options, shape in itertools.product(backends, CALLS, OPTIONS, SHAPES)
    ]


def run_cases() -> None:
    """All cases, one after the other."""
    torch.manual_seed(0)
    found = cases()
    for case in found:
        case.run()
    fusedce.check_flags()
    print(f"ran {len(found)} cases: {dict(Counter(case.backend for case in found))}", flush=True)


def kernels_with_errors(report: str) -> Counter[str]:
    """How often a tool's report names each kernel."""
    return Counter(PLACE.findall(report))


def is_ours(kernel: str) -> bool:
    """C++ kernels lie in a namespace, and Triton's are called as in the source. Others are torch's and cuBLAS's."""
    return kernel.startswith("fusedce::") or kernel in _triton_names()


@functools.cache
def _triton_names() -> frozenset[str]:
    sources = (ROOT / "fusedce" / "triton").rglob("*.py")
    return frozenset(
        name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(), re.M)
    )


def verdict(report: str) -> tuple[bool, str]:
    """Whether a tool's report is good, and in words: all cases ran, and nothing was found in a kernel of ours."""
    found = kernels_with_errors(report)
    ours = {name: count for name, count in found.items() if is_ours(name)}
    ran, summary = re.search(r"^ran .*", report, re.MULTILINE), SUMMARY.findall(report)
    others = sum(found.values()) - sum(ours.values())
    said = [ran[0] if ran else "the cases did not end", f"in our kernels {ours or 'nothing'}", f"in others {others}"]
    said += summary or ["the tool says no summary"]
    return bool(ran and summary) and not ours, "; ".join(said)


def main() -> None:
    """All tools at once: each is a process that waits most of the time for its own instrumentation."""
    if sys.argv[1:] == ["cases"]:
        run_cases()
        return
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        sys.exit("compute-sanitizer is not in PATH; it comes with the CUDA toolkit")
    # One allocation a tensor, or torch's cache would hide what lies beyond it.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sys.executable, "-m", "tests.sanitizer", "cases"]
    subprocess.run(command, env=environment, check=True, timeout=TIMEOUT)  # also fills Triton's cache for the others
    started = [
        subprocess.Popen([sanitizer, "--tool", tool, "--print-limit", "100000", *command], env=environment, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for tool in TOOLS
    ]  # fmt: skip
    bad = 0
    for tool, process in zip(TOOLS, started, strict=True):
        report, _ = process.communicate(timeout=TIMEOUT)
        good, words = verdict(report)
        print(f"{tool}: {words}", *(() if good else (report[-8000:],)), sep="\n", flush=True)
        bad += not good
    sys.exit(bad)


if __name__ == "__main__":
    main()
