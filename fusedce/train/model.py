"""A decoder in the shape of Qwen3-MoE: RMSNorm, RoPE, GQA with q/k norm, fused expert layers, fused head.

`LM.forward` gives hidden states. The head is a module that turns them into per-token results without the logits of all
tokens; only generation makes logits, of the last position. Letters: B rows, S tokens, D hidden, H heads, d head_dim.
"""

import functools
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusedce.distributed import keep_plans
from fusedce.functional import LogProb, Routing, linear_cross_entropy, linear_logprob
from fusedce.nn import Router
from fusedce.train.config import ModelConfig
from fusedce.train.experts import expert_layer
from fusedce.train.mesh import World
from fusedce.train.packing import Packing, packed_attention

Rope = tuple[Tensor, Tensor]


class KVCache:
    """Keys and values of one layer for the tokens seen so far, in a buffer of (B, H_kv, capacity, d) each."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.buffers: tuple[Tensor, Tensor] | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add (B, H_kv, S, d) and return everything so far."""
        rows, heads, num_new, dim = key.shape
        if self.buffers is None:
            shape = (rows, heads, self.capacity, dim)
            self.buffers = key.new_empty(shape), value.new_empty(shape)
        if self.length and num_new > 1:
            raise RuntimeError("fusedce.train: the cache takes a prompt once, then one token at a time")
        stop = self.length + num_new
        for buffer, new in zip(self.buffers, (key, value), strict=True):
            buffer[:, :, self.length : stop] = new
        self.length = stop
        return self.buffers[0][:, :, :stop], self.buffers[1][:, :, :stop]


def rope_table(length: int, config: ModelConfig, device: torch.device) -> Rope:
    """cos and sin (S, d) of position · theta^(−2i/d), fp32, halves side by side (Qwen's layout)."""
    exponent = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * config.rope_theta**-exponent
    angle = torch.cat((angle, angle), 1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x (B, H, S, d), by cos and sin (S, d) or (B, 1, S, d)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Causal attention with fewer key and value heads than query heads, and RMSNorm on queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def forward(self, x: Tensor, rope: Rope, packing: Packing | None, cache: KVCache | None) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        # Norm and rotation run in fp32 under autocast; attention wants one dtype.
        query = rotate(self.q_norm(query), *rope).to(value.dtype)
        key = rotate(self.k_norm(key), *rope).to(value.dtype)
        if cache is not None:
            key, value = cache.append(key, value)
        if packing is None:
            # A single new token sees everything before it, and needs no mask.
            causal = query.shape[2] > 1
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
        else:
            mixed = packed_attention(query, key, value, packing)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x)).

    recompute: keep the block's input and the experts that its tokens chose, and compute the rest again in the backward.
    """

    def __init__(self, config: ModelConfig, group: dist.ProcessGroup | None, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = Attention(config)
        self.moe_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.moe = expert_layer(config, group)

    def forward(self, x: Tensor, rope: Rope, packing: Packing | None = None, cache: KVCache | None = None) -> Tensor:
        if not (self.recompute and torch.is_grad_enabled()):
            return self._run(x, rope, packing, cache)
        # Inside the module, so that FSDP's hooks run once a forward. Nothing in a block draws random numbers.
        out: Tensor = checkpoint(
            self._run, x, rope, packing, cache, use_reentrant=False, preserve_rng_state=False, context_fn=keep_plans
        )
        return out

    def _run(self, x: Tensor, rope: Rope, packing: Packing | None, cache: KVCache | None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), rope, packing, cache)
        return x + self.moe(self.moe_norm(x))


class Head(nn.Module):
    """The language-model head: a weight (V, D) and the fused ops on it. Called as a module, so that FSDP sees it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.backend = config.backend
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(self, hidden: Tensor, target: Tensor, temperature: float = 1.0) -> LogProb:
        """Log-prob of `target` (...), entropy and lse of each of the hidden states (..., D)."""
        result = linear_logprob(hidden, self.weight, target, temperature=temperature, backend=self.backend)
        # Not as views: FSDP hangs the backward's gathering on what a module returns, and warns of those.
        logprob, entropy, lse = (values.clone() for values in result if values is not None)
        return LogProb(logprob, entropy, lse)

    def cross_entropy(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The sum of the cross-entropy over all tokens, (), fp32."""
        return linear_cross_entropy(hidden, self.weight, target, reduction="sum", backend=self.backend)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, D) -> (B, V) fp32: for sampling, where B is a handful of rows."""
        return F.linear(hidden, self.weight).float()


class ExpertLoad:
    """Counts how often each layer's router chose each expert, (layers, E), on the device and without a sync."""

    def __init__(self, model: "LM") -> None:
        self.counts = torch.zeros(model.config.num_layers, model.config.num_experts, dtype=torch.int64)
        self.paused = False
        routers = [module for module in model.modules() if isinstance(module, Router)]
        for row, router in enumerate(routers):
            router.register_forward_hook(functools.partial(self._count, row))

    def _count(self, row: int, module: nn.Module, args: tuple[Tensor], routing: Routing) -> None:
        if self.paused:
            return
        chosen = routing.top_k_index.flatten()
        self.counts = self.counts.to(chosen.device)
        self.counts[row].scatter_add_(0, chosen, torch.ones_like(chosen))

    def reset(self) -> None:
        """Forget the counts."""
        self.counts.zero_()

    def imbalance(self, world: World) -> float:
        """The busiest expert's load over the mean load, averaged over layers: 1 is even, num_experts / top_k the worst.

        Of all ranks' tokens, a collective call. A recomputed layer counts twice, which leaves the quotient as it is.
        """
        counts = world.sum(self.counts.to(world.device)).float()
        return (counts.amax(1) / counts.mean(1).clamp(min=1e-9)).mean().item()


class LM(nn.Module):
    """Embedding, blocks, norm, head. The weights are whatever the memory held: `weights.init_weights` fills them.

    group: the ranks that share the experts; None where all are here.
    """

    def __init__(self, config: ModelConfig, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = (
            nn.Embedding(config.learned_positions, config.hidden_size) if config.learned_positions else None
        )
        num_recomputed = round(config.recompute * config.num_layers)
        self.layers = nn.ModuleList(Block(config, group, i < num_recomputed) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = Head(config)
        self.tie()

    def tie(self) -> None:
        """Make the head the embedding, if the config says so; again after what gave them memory of their own."""
        if self.config.tied:
            self.head.weight = cast(nn.Parameter, self.embed.weight)

    def forward(self, ids: Tensor, caches: list[KVCache] | None = None, packing: Packing | None = None) -> Tensor:
        """ids (B, S) int64 -> hidden states (B, S, D) after the last norm.

        caches: one a layer, from `new_caches`; the ids then follow the tokens in them. packing: where sequences begin,
        None for one a row.
        """
        seen = caches[0].length if caches else 0
        positions = torch.arange(seen, seen + ids.shape[1], device=ids.device)
        rope = rope_table(seen + ids.shape[1], self.config, ids.device)
        if packing is not None:
            positions = packing.positions
        cos, sin = (table[positions] if packing is None else table[positions][:, None] for table in rope)
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(positions)
        for index, block in enumerate(self.layers):
            x = block(x, (cos, sin), packing, None if caches is None else caches[index])
        return self.norm(x)

    def new_caches(self, capacity: int) -> list[KVCache]:
        """Empty caches for `capacity` tokens a row."""
        return [KVCache(capacity) for _ in self.layers]


@torch.no_grad()
def generate(
    model: LM, prompts: Tensor, num_new: int, temperature: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Continue each prompt (B, P) by `num_new` tokens -> (B, num_new) int64.

    temperature: 0 takes the likeliest token, otherwise tokens are drawn with `generator`, on the prompts' device.
    """
    caches = model.new_caches(prompts.shape[1] + num_new)
    tokens, step_input = [], prompts
    for _ in range(num_new):
        logits = model.head.logits(model(step_input, caches)[:, -1])
        if temperature == 0:
            step_input = logits.argmax(-1, keepdim=True)
        else:
            step_input = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens.append(step_input)
    return torch.cat(tokens, 1)
