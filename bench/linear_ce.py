"""Linear cross-entropy: forward alone and forward with backward, against torch and the peers that are installed.

python -m bench.linear_ce [--cases seed,llama,qwen,smoke] [--providers …] [--out FILE] [--help]
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedce
from bench.harness import Provider, arguments, chosen, environment, interleaved, peak_gib, rows_of, usable, write

CASES = {
    "seed": (65536, 2048, 124160),
    "llama": (8192, 4096, 128256),
    "qwen": (16384, 2048, 151936),
    "smoke": (96, 64, 512),
}
CHUNK = 8192  # rows of the bare GEMMs, the floor


def inputs(case: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight in bf16 (fp32 on a CPU), target: random, as in nothing is sparse."""
    rows, depth, vocab = CASES[case]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(1)
    hidden = torch.randn(rows, depth, device=device, dtype=dtype, generator=generator)
    weight = torch.randn(vocab, depth, device=device, dtype=dtype, generator=generator) * depth**-0.5
    return hidden, weight, torch.randint(0, vocab, (rows,), device=device, generator=generator)


def losses(device: str) -> dict:  # type: ignore[type-arg]
    """Provider name -> loss(hidden, weight, target)."""

    def eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), target)

    found = {"torch-eager": eager}
    if device == "cuda":
        found["torch-compile"] = torch.compile(eager)
    for backend in ("triton", "native", "eager"):
        choices = fusedce.explain("linear_logprob", device)
        if f"{backend}: could run" in choices or f": {backend} (" in choices:
            if backend == "eager" and device == "cuda":
                continue  # fp32 GEMMs, hours at these sizes
            found[f"fusedce-{backend}"] = lambda h, w, t, b=backend: fusedce.linear_cross_entropy(h, w, t, backend=b)
    try:
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

        liger, liger32 = LigerFusedLinearCrossEntropyLoss(), LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
        found["liger"] = lambda h, w, t: liger(w, h, t)
        found["liger-fp32"] = lambda h, w, t: liger32(w, h, t)
    except ImportError:
        print("  liger-kernel is not installed: no row for it")
    return found


def floors(hidden: Tensor, weight: Tensor) -> list[Provider]:
    """The bare GEMMs a chunk, by torch.mm: "floor1" the logits alone, "floor3" and "floor4" with the gradients'."""
    rows = hidden[: min(CHUNK, hidden.shape[0])]
    gradient = (rows @ weight.t()).mul_(0.01)

    def logits() -> Tensor:
        return rows @ weight.t()

    def gradients() -> Tensor:
        rows.t() @ gradient
        return gradient @ weight

    def three() -> Tensor:
        logits()
        return gradients()

    def four() -> Tensor:
        logits()
        return three()

    return [Provider("floor1", logits), Provider("floor3", three), Provider("floor4", four)]


def bench(case: str, device: str, rounds: int, commit: str, names: str) -> list:  # type: ignore[type-arg]
    """All rows of one case."""
    num_rows, depth, vocab = CASES[case]
    name = f"N{num_rows}_D{depth}_V{vocab}_random"
    where = environment(device, commit)
    hidden, weight, target = inputs(case, device)
    scale = num_rows / min(CHUNK, num_rows)
    floor_times = interleaved(floors(hidden, weight), device, rounds)
    rows = []
    for floor, values in floor_times.items():
        mode = "fwd" if floor == "floor1" else "fwd_bwd"
        rows += rows_of({floor: [v * scale for v in values]}, where, "linear_ce", name, mode)
    head = slice(0, min(256, num_rows))
    part = hidden[head].double()
    gold_loss = F.cross_entropy(part @ weight.double().t(), target[head])
    hidden.requires_grad_(), weight.requires_grad_()
    gradient_bytes = sum(t.numel() * t.element_size() for t in (hidden, weight))

    def forward(loss):  # type: ignore[no-untyped-def]
        def run() -> Tensor:
            with torch.no_grad():
                return loss(hidden, weight, target)

        return run

    def whole(loss):  # type: ignore[no-untyped-def]
        def run() -> Tensor:
            hidden.grad = weight.grad = None
            loss(hidden, weight, target).backward()
            return hidden.grad[head] * num_rows

        return run

    found = chosen(losses(device), names)
    for provider, loss in found.items():
        with torch.no_grad():
            off = loss(hidden[head], weight, target[head]) - gold_loss
            print(f"  {provider}: loss of {head.stop} rows off by {off.item():.1e}")
    leaf = part.requires_grad_()
    F.cross_entropy(leaf @ weight.detach().double().t(), target[head], reduction="sum").backward()
    providers = usable([Provider(n, whole(loss)) for n, loss in found.items()], leaf.grad, 2e-2)
    peaks = {}
    for provider in providers:
        hidden.grad = weight.grad = None
        peaks[provider.name] = [peak_gib(provider.run, device, gradient_bytes)]
    rows += rows_of(interleaved(providers, device, rounds), where, "linear_ce", name, "fwd_bwd")
    if device == "cuda":
        rows += rows_of(peaks, where, "linear_ce", name, "fwd_bwd", "peak", "GiB")
    passed = {p.name for p in providers}
    forwards = [Provider(n, forward(loss)) for n, loss in found.items() if n in passed]
    return rows + rows_of(interleaved(forwards, device, rounds), where, "linear_ce", name, "fwd")


def main() -> None:
    options = arguments(__doc__)
    cases = options.cases or ("seed,llama,qwen" if options.device == "cuda" else "smoke")
    for case in cases.split(","):
        print(case, flush=True)
        rows = bench(case, options.device, options.rounds, options.commit, options.providers)
        if options.out:
            write(rows, options.out)


if __name__ == "__main__":
    main()
