"""linear_logprob with a backward over what counts: rows without a gradient, words without probability.

python -m bench.linear_sparse [--cases random_100,random_30,policy_100,peaked_100,smoke] [--rounds …] [--out FILE]

A case is a kind of data and the share of rows with a gradient, in per cent:
random  every word equally likely beforehand: nothing is sparse.
peaked  one word far above a flat tail that holds up to half of the mass: to be refused.
policy  a trained policy's rows: a handful of words hold all but about 1e-4, seven rows of ten are confident, ids follow
        Zipf, the target is sampled from the row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedce
from bench.harness import Provider, arguments, chosen, environment, interleaved, peak_gib, rows_of, usable, write
from bench.linear_ce import floors

SHAPE, SMOKE = (65536, 2048, 124160), (96, 64, 1100)
CASES = ("random_100", "random_30", "policy_100", "policy_30", "peaked_100")
BUDGETS = {"fusedce-dense": None, "fusedce-rows": 0.0, "fusedce-sparse": 2.0**-10}
SIGNIFICANT = 16


def inputs(kind: str, shape: tuple[int, int, int], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight (bf16, fp32 on a CPU) and target of a kind of data."""
    rows, depth, vocab = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(1)
    hidden = torch.randn(rows, depth, device=device, dtype=dtype, generator=generator)
    weight = torch.randn(vocab, depth, device=device, dtype=dtype, generator=generator) * depth**-0.5
    if kind == "random":
        return hidden, weight, torch.randint(0, vocab, (rows,), device=device, generator=generator)
    zipf = 1.0 / torch.arange(1, vocab + 1, device=device)
    if kind == "peaked":
        target = torch.multinomial(zipf, rows, replacement=True, generator=generator)
        heights = torch.empty(rows, 1, device=device).uniform_(8, 16, generator=generator)
        return hidden + heights.to(dtype) * weight[target], weight, target
    target = torch.empty(rows, dtype=torch.int64, device=device)
    for part in torch.arange(rows, device=device).split(8192):
        hidden[part], target[part] = _policy(len(part), weight, zipf, generator)
    return hidden, weight, target


def _policy(rows: int, weight: Tensor, zipf: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    device = weight.device
    words = torch.multinomial(zipf, rows * SIGNIFICANT, replacement=True, generator=generator).view(rows, SIGNIFICANT)
    gaps = torch.empty(rows, SIGNIFICANT, device=device).exponential_(1 / 0.6, generator=generator)
    confident = torch.rand(rows, device=device, generator=generator) < 0.7
    gaps[:, 0] = 0
    gaps[:, 1] += torch.where(confident, torch.empty_like(gaps[:, 1]).uniform_(3, 10, generator=generator), 0.0)
    heights = 22.0 - gaps.cumsum(1)
    hidden = torch.zeros(rows, weight.shape[1], device=device)
    for word, height in zip(words.t(), heights.t(), strict=True):
        hidden += height[:, None] * weight[word]
    pick = torch.multinomial(heights.softmax(1), 1, generator=generator)
    return hidden.to(weight.dtype), words.gather(1, pick)[:, 0]


def bench(case: str, shape: tuple[int, int, int], device: str, rounds: int, commit: str, names: str) -> list:  # type: ignore[type-arg]
    """Forward and backward of every provider, its memory, and how many of its backwards were sparse."""
    kind, share = case.rsplit("_", 1)
    num_rows, depth, vocab = shape
    name, where = f"N{num_rows}_D{depth}_V{vocab}_{case}", environment(device, commit)
    hidden, weight, target = inputs(kind, shape, device)
    floor = floors(hidden, weight)["per token"]
    generator = torch.Generator(device).manual_seed(2)
    upstream = torch.randn(num_rows, device=device, generator=generator)
    live = torch.rand(num_rows, device=device, generator=generator) < int(share) / 100
    upstream = torch.where(live, upstream, 0.0)
    head = slice(0, min(256, num_rows))
    leaf = hidden[head].double().requires_grad_()
    log_probs = -F.cross_entropy(leaf @ weight.double().t(), target[head], reduction="none")
    gold = torch.autograd.grad(log_probs @ upstream[head].double(), leaf)[0]
    hidden.requires_grad_(), weight.requires_grad_()
    certificates = {provider: torch.zeros(4, device=device, requires_grad=True) for provider in BUDGETS}

    def provider(which: str) -> Provider:
        def run() -> Tensor:
            hidden.grad = weight.grad = None
            options = {"with_entropy": False, "gradient_budget": BUDGETS[which]}
            if BUDGETS[which] is not None:
                options["certificate"] = certificates[which]
            fusedce.linear_logprob(hidden, weight, target, **options).logprob.backward(upstream)
            return hidden.grad[head]

        return Provider(which, run)

    providers = usable(list(chosen({n: provider(n) for n in BUDGETS}, names).values()), gold, 2e-2)
    rows = rows_of(interleaved([floor, *providers], device, rounds), where, "linear_sparse", name, "fwd_bwd")
    gradient_bytes = sum(t.numel() * t.element_size() for t in (hidden, weight))
    for one in providers:
        hidden.grad = weight.grad = None
        if device == "cuda":
            peak = {one.name: [peak_gib(one.run, device, gradient_bytes)]}
            rows += rows_of(peak, where, "linear_sparse", name, "fwd_bwd", "peak", "GiB")
        grad = certificates[one.name].grad
        if grad is not None:
            skipped, total, sparse, passes = grad.tolist()
            print(f"  {one.name}: skipped {skipped / max(total, 1e-30):.2e}, {sparse:.0f} of {passes:.0f} sparse")
    return rows


def offered(device: str) -> tuple[list[str], list[str]]:
    """Cases and providers, for `fusedce bench`."""
    return [*CASES, "smoke"], list(BUDGETS)


def main() -> None:
    options = arguments(__doc__)
    on_gpu = options.device == "cuda"
    cases = options.cases or ",".join(CASES if on_gpu else ("smoke",))
    for case in cases.split(","):
        print(case, flush=True)
        kind, shape = ("policy_30", SMOKE) if case == "smoke" else (case, SHAPE)
        rows = bench(kind, shape, options.device, options.rounds, options.commit, options.providers)
        if options.out:
            write(rows, options.out)


if __name__ == "__main__":
    main()
