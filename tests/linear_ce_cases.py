"""Inputs, plain-torch references and upstream gradients for the tests of linear cross-entropy."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedce

IGNORE = -100


@dataclass(frozen=True)
class Case:
    """One problem: sizes, dtype and options."""

    num_rows: int
    vocab: int
    depth: int
    dtype: torch.dtype = torch.float32
    has_bias: bool = False
    temperature: float = 1.0
    softcap: float | None = None
    every_ignored: int = 5  # every so many rows one is ignored; 0 for none

    def __str__(self) -> str:
        options = ("-bias" if self.has_bias else "") + (f"-T{self.temperature}" if self.temperature != 1 else "")
        cap = f"-cap{self.softcap}" if self.softcap else ""
        kind = str(self.dtype).removeprefix("torch.")
        return f"N{self.num_rows}-V{self.vocab}-D{self.depth}-{kind}{options}{cap}"

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """hidden, weight, target, bias: the logits spread by about 2, as a trained head's do."""
        generator = torch.Generator().manual_seed(self.num_rows * 31 + self.vocab)
        hidden = torch.randn(self.num_rows, self.depth, generator=generator)
        weight = 2 * torch.randn(self.vocab, self.depth, generator=generator) * self.depth**-0.5
        bias = torch.randn(self.vocab, generator=generator) if self.has_bias else None
        target = torch.randint(0, self.vocab, (self.num_rows,), generator=generator)
        if self.every_ignored:
            target[:: self.every_ignored] = IGNORE
        moved = [t if t is None else t.to(device, self.dtype) for t in (hidden, weight, bias)]
        return moved[0], moved[1], target.to(device), moved[2]


def upstream(num_rows: int, kind: str, device: str) -> Tensor:
    """An upstream gradient (N,) fp32: "ones", "random", "expanded" (stride 0) or "strided" (every other element)."""
    if kind == "ones":
        return torch.ones(num_rows, device=device)
    if kind == "expanded":
        return torch.tensor(0.7, device=device).expand(num_rows)
    random = torch.randn(2 * num_rows, generator=torch.Generator().manual_seed(7)).to(device)
    return random[::2] if kind == "strided" else random[:num_rows].contiguous()


def plain(case: Case, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, shift: int = 0):  # type: ignore[no-untyped-def]
    """(logprob, entropy, lse) by plain torch in the inputs' dtype: the logits are rounded to it, the rest is at least
    fp32.

    shift: added to every target, for the bite of a target that is off by one.
    """
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if case.softcap:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    logits = logits / case.temperature
    log_probs = logits.log_softmax(1)
    kept = target != IGNORE
    column = (torch.where(kept, target, 0) + shift) % weight.shape[0]
    logprob = log_probs.gather(1, column[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(1)
    return tuple(torch.where(kept, x, 0.0) for x in (logprob, entropy, logits.logsumexp(1)))


def ours(case: Case, backend: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None):  # type: ignore[no-untyped-def]
    """(logprob, entropy, lse) by the op."""
    return fusedce.linear_logprob(
        hidden, weight, target, bias=bias, temperature=case.temperature, softcap=case.softcap, backend=backend
    )


def with_gradients(run, tensors, grads) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """What `run(*leaves)` returns, then the gradient of every floating tensor of `tensors`."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) if t is not None else None for t in tensors]
    results = run(*leaves)
    pairs = [(r, g.to(r.dtype)) for r, g in zip(results, grads, strict=True) if g is not None]
    torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
    return [r.detach() for r in results] + [t.grad for t in leaves if t is not None and t.is_floating_point()]


def in_fp64(tensors):  # type: ignore[no-untyped-def]
    """The same rounded inputs in fp64, on the CPU."""
    return [
        t.cpu().double() if t is not None and t.is_floating_point() else t if t is None else t.cpu() for t in tensors
    ]
