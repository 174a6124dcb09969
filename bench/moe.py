"""The experts of one MoE layer, routing given: forward alone and with backward, against torch and the peers installed.

python -m bench.moe [--cases A_16384,A_65536,B_16384,smoke_64] [--providers …] [--out FILE] [--help]

A case is SHAPE_TOKENS, with a router that prefers some experts, or SHAPE_TOKENS_even, with one that does not.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedce
from bench.harness import Provider, arguments, chosen, environment, interleaved, peak_gib, rows_of, usable, write

SHAPES = {"A": (2048, 768, 128, 8), "B": (2048, 512, 256, 8), "C": (4096, 14336, 8, 2), "smoke": (32, 16, 4, 2)}
Layer = Callable[..., Tensor]


def inputs(shape: str, num_tokens: int, device: str, preference: float = 0.5) -> tuple[Tensor, ...]:
    """hidden, gate_up_proj, down_proj in bf16 (fp32 on a CPU); top_k_weights, top_k_index of a router whose logits
    differ by `preference` from expert to expert and by 1 from token to token."""
    depth, ffn, num_experts, top_k = SHAPES[shape]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, generator=generator)

    logits = normal(num_tokens, num_experts) + preference * normal(num_experts)
    weights, index = torch.topk(logits.softmax(-1), top_k)
    gate_up, down = normal(num_experts, 2 * ffn, depth) * depth**-0.5, normal(num_experts, depth, ffn) * ffn**-0.5
    hidden = normal(num_tokens, depth)
    return hidden.to(dtype), gate_up.to(dtype), down.to(dtype), weights / weights.sum(-1, keepdim=True), index


def fused(backend: str) -> Layer:
    """Our plan, experts and combine."""

    def layer(hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        plan = fusedce.moe_plan(index, gate_up.shape[0], backend=backend)
        return fusedce.moe_experts(hidden, gate_up, down, weights, plan, combine=True, backend=backend)

    return layer


def torch_grouped(hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """Sort, torch's grouped_mm, index_add."""
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)
    offsets = torch.bincount(flat, minlength=gate_up.shape[0]).cumsum(0).to(torch.int32)
    token = order // index.shape[1]
    gate, up = F.grouped_mm(hidden[token], gate_up.transpose(1, 2), offs=offsets).chunk(2, -1)
    rows = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=offsets)
    rows = rows * weights.reshape(-1)[order, None].to(rows.dtype)
    return torch.zeros_like(hidden).index_add(0, token, rows)


def torch_eager(hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """A loop over the experts, as most model code has it."""
    out = torch.zeros_like(hidden)
    for expert in range(gate_up.shape[0]):
        token, slot = torch.where(index == expert)
        gate, up = F.linear(hidden[token], gate_up[expert]).chunk(2, -1)
        rows = F.linear(F.silu(gate) * up, down[expert]) * weights[token, slot, None].to(hidden.dtype)
        out = out.index_add(0, token, rows)
    return out


def layers(device: str) -> dict[str, Layer]:
    """Provider name -> layer."""
    found: dict[str, Layer] = {"torch-eager": torch_eager}
    if device != "cuda":
        return {**found, "fusedce-eager": fused("eager")}
    found |= {
        "torch-grouped": torch_grouped,
        "torch-compile": torch.compile(torch_grouped),
        "fusedce-triton": fused("triton"),
    }
    try:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

        found["liger"] = lambda h, g, d, w, i: LigerFusedMoEFunction.apply(h, g, d, i.to(torch.int32), w)
    except ImportError:
        print("  liger-kernel is not installed: no row for it")
    return found


def floors(shape: str, num_tokens: int, device: str) -> list[Provider]:
    """cuBLAS bmm of equal groups, the ceiling of any grouped GEMM: the two of the forward, and all six."""
    depth, ffn, num_experts, top_k = SHAPES[shape]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = max(num_tokens * top_k // num_experts, 1)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(num_experts, *sizes, device=device, dtype=dtype)

    x, pre_act, act = normal(rows, depth), normal(rows, 2 * ffn), normal(rows, ffn)
    gate_up, down = normal(2 * ffn, depth), normal(depth, ffn)

    def forward() -> Tensor:
        torch.bmm(x, gate_up.mT)
        return torch.bmm(act, down.mT)

    def whole() -> Tensor:
        forward()
        torch.bmm(x, down), torch.bmm(pre_act, gate_up), torch.bmm(pre_act.mT, x)
        return torch.bmm(x.mT, act)

    return [Provider("floor-fwd", forward), Provider("floor-fwd_bwd", whole)]


def bench(case: str, device: str, rounds: int, commit: str, names: str) -> list:  # type: ignore[type-arg]
    """All rows of one case, "SHAPE_TOKENS" or "SHAPE_TOKENS_even"."""
    shape, tokens, *routing = case.split("_")
    num_tokens, is_even = int(tokens), routing == ["even"]
    name, where = f"{shape}_N{num_tokens}_{'even' if is_even else 'skewed'}", environment(device, commit)
    rows = []
    for floor, times in interleaved(floors(shape, num_tokens, device), device, rounds).items():
        rows += rows_of({"floor": times}, where, "moe_experts", name, floor.removeprefix("floor-"))
    tensors = inputs(shape, num_tokens, device, 0.0 if is_even else 0.5)
    leaves = [t.requires_grad_() for t in tensors[:4]]
    upstream = torch.randn(tensors[0].shape, device=device, dtype=tensors[0].dtype)
    gradient_bytes = sum(t.numel() * t.element_size() for t in leaves)

    def forward(layer: Layer) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.no_grad():
                return layer(*tensors)

        return run

    def whole(layer: Layer) -> Callable[[], Tensor]:
        def run() -> Tensor:
            for leaf in leaves:
                leaf.grad = None
            layer(*tensors).backward(upstream)
            return leaves[0].grad

        return run

    found = chosen(layers(device), names)
    gold_layer = torch_grouped if device == "cuda" else torch_eager
    gold, gold_grad = forward(gold_layer)().clone(), whole(gold_layer)().clone()
    forwards = usable([Provider(n, forward(layer)) for n, layer in found.items()], gold, 1e-2)
    wholes = usable([Provider(p.name, whole(found[p.name])) for p in forwards], gold_grad, 1e-2)
    rows += rows_of(interleaved(forwards, device, rounds), where, "moe_experts", name, "fwd")
    rows += rows_of(interleaved(wholes, device, rounds), where, "moe_experts", name, "fwd_bwd")
    if device == "cuda":
        peaks = {}
        for provider in wholes:
            for leaf in leaves:
                leaf.grad = None
            peaks[provider.name] = [peak_gib(provider.run, device, gradient_bytes)]
        rows += rows_of(peaks, where, "moe_experts", name, "fwd_bwd", "peak", "GiB")
    return rows


def offered(device: str) -> tuple[list[str], list[str]]:
    """Cases, SHAPE_TOKENS with any number and with _even behind it or not, and providers, for `fusedce bench`."""
    return [f"{shape}_{64 if shape == 'smoke' else 16384}" for shape in SHAPES], list(layers(device))


def main() -> None:
    options = arguments(__doc__)
    cases = options.cases or ("A_16384,A_65536,B_16384" if options.device == "cuda" else "smoke_64")
    for case in cases.split(","):
        print(case, flush=True)
        rows = bench(case, options.device, options.rounds, options.commit, options.providers)
        floor = {row.mode: row.p50 for row in rows if row.provider == "floor"}
        for row in rows:
            if row.metric == "time" and floor[row.mode]:
                print(f"  {row.provider} {row.mode}: {row.p50 / floor[row.mode]:.2f} times the bmm ceiling", flush=True)
        if options.out:
            write(rows, options.out)


if __name__ == "__main__":
    main()
