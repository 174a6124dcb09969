"""Linear cross-entropy: forward alone and forward with backward, against torch and the peers that are installed.

python -m bench.linear_ce [--cases seed,llama,qwen,vocab248k,tokens,smoke] [--providers …] [--out FILE] [--help]

"tokens" is a case for each of 4,096 to 262,144 tokens. bench/linear_ce_providers.py says which releases of the peers it
is written for; one that is not installed is left out with a line.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Provider, arguments, chosen, environment, interleaved, peak_gib, rows_of, usable, write
from bench.linear_ce_providers import log_probs, losses

# Time against tokens: of one head, from a short batch to the longest.
TOKENS = {f"tokens_{thousands}k": (thousands * 1024, 2048, 151936) for thousands in (4, 8, 16, 32, 64, 128, 256)}
CASES = {
    "seed": (65536, 2048, 124160),
    "llama": (8192, 4096, 128256),
    "qwen": (16384, 2048, 151936),
    "vocab248k": (32768, 2048, 248320),
    "smoke": (96, 64, 512),
    **TOKENS,
}
GROUPS = {"tokens": ",".join(TOKENS)}
CHUNK = 8192  # rows of the bare GEMMs, the floor


def inputs(case: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight in bf16 (fp32 on a CPU), target: random, as in nothing is sparse."""
    rows, depth, vocab = CASES[case]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(1)
    hidden = torch.randn(rows, depth, device=device, dtype=dtype, generator=generator)
    weight = torch.randn(vocab, depth, device=device, dtype=dtype, generator=generator) * depth**-0.5
    return hidden, weight, torch.randint(0, vocab, (rows,), device=device, generator=generator)


def floors(hidden: Tensor, weight: Tensor) -> dict[str, Provider]:
    """The bare GEMMs over all tokens, by torch.mm a chunk: "floor1" the logits alone, "floor3" and "floor4" with
    the gradients'."""
    rows = hidden[: min(CHUNK, hidden.shape[0])]
    gradient = (rows @ weight.t()).mul_(0.01)

    def floor(num_logits: int, with_gradients: bool) -> Provider:
        def run() -> Tensor:
            for _ in range(hidden.shape[0] // rows.shape[0]):
                for _ in range(num_logits):
                    out = rows @ weight.t()
                if with_gradients:
                    rows.t() @ gradient
                    out = gradient @ weight
            return out

        return Provider(f"floor{num_logits + 2 * with_gradients}", run)

    return {"fwd": floor(1, False), "scalar": floor(1, True), "per token": floor(2, True)}


def bench(case: str, device: str, rounds: int, commit: str, names: str) -> list:  # type: ignore[type-arg]
    """All rows of one case: the scalar loss, then per-token log-probs under random upstream gradients."""
    num_rows, depth, vocab = CASES[case]
    name, where = f"N{num_rows}_D{depth}_V{vocab}_random", environment(device, commit)
    hidden, weight, target = inputs(case, device)
    floor = floors(hidden, weight)
    head = slice(0, min(256, num_rows))
    upstream = torch.randn(num_rows, device=device, generator=torch.Generator(device).manual_seed(2))
    leaf = hidden[head].double().requires_grad_()
    gold_rows = F.cross_entropy(leaf @ weight.double().t(), target[head], reduction="none")
    gold_scalar = torch.autograd.grad(gold_rows.sum() / num_rows, leaf, retain_graph=True)[0]
    gold_rows_grad = torch.autograd.grad(-gold_rows @ upstream[head].double(), leaf)[0]
    hidden.requires_grad_(), weight.requires_grad_()
    gradient_bytes = sum(t.numel() * t.element_size() for t in (hidden, weight))

    def forward(run):  # type: ignore[no-untyped-def]
        def no_grad() -> Tensor:
            with torch.no_grad():
                return run(hidden, weight, target)

        return no_grad

    def whole(run, grad: Tensor | None):  # type: ignore[no-untyped-def]
        def both() -> Tensor:
            hidden.grad = weight.grad = None
            run(hidden, weight, target).backward(grad)
            return hidden.grad[head]

        return both

    rows = []
    for op, found, grad, gold, least in (
        ("linear_ce", losses(device), None, gold_scalar, floor["scalar"]),
        ("linear_logprob", log_probs(device), upstream, gold_rows_grad, floor["per token"]),
    ):
        found = chosen(found, names)
        providers = usable([Provider(n, whole(run, grad)) for n, run in found.items()], gold, 2e-2)
        peaks = {}
        for provider in providers:
            hidden.grad = weight.grad = None
            peaks[provider.name] = [peak_gib(provider.run, device, gradient_bytes)]
        rows += rows_of(interleaved([least, *providers], device, rounds), where, op, name, "fwd_bwd")
        if device == "cuda":
            rows += rows_of(peaks, where, op, name, "fwd_bwd", "peak", "GiB")
        hidden.grad = weight.grad = None
        passed = {p.name for p in providers}
        forwards = [floor["fwd"], *(Provider(n, forward(run)) for n, run in found.items() if n in passed)]
        rows += rows_of(interleaved(forwards, device, rounds), where, op, name, "fwd")
    return rows


def offered(device: str) -> tuple[list[str], list[str]]:
    """Cases and providers, for `fusedce bench`."""
    return list(CASES), list(losses(device))


def main() -> None:
    options = arguments(__doc__)
    cases = options.cases or ("seed,llama,qwen" if options.device == "cuda" else "smoke")
    for case in ",".join(GROUPS.get(name, name) for name in cases.split(",")).split(","):
        print(case, flush=True)
        rows = bench(case, options.device, options.rounds, options.commit, options.providers)
        if options.out:
            write(rows, options.out)


if __name__ == "__main__":
    main()
