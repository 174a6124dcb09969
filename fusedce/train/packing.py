"""Sequences back to back in a row: where each begins, positions that start anew, and attention that stays within.

What a packed sequence is given is what it would get alone, token by token.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Packing:
    """Rows (B, S) of sequences. positions: (B, S) int64, from 0 in each. offsets: (n + 1,) int32, where each of the n
    sequences begins among the B · S tokens, and B · S. longest: tokens of the longest one.
    """

    positions: Tensor
    offsets: Tensor
    longest: int

    @classmethod
    def of(cls, begins: Tensor) -> "Packing":
        """From begins (B, S) bool on the CPU, True where a sequence begins; one always does with a row."""
        begins = begins.clone()
        begins[:, :1] = True
        index = torch.arange(begins.shape[1]).expand(begins.shape)
        positions = index - torch.where(begins, index, 0).cummax(1).values
        starts = begins.flatten().nonzero()[:, 0]
        offsets = torch.cat((starts, torch.tensor([begins.numel()])))
        longest = int(offsets.diff().max()) if len(starts) else 0
        return cls(positions, offsets.int(), longest)

    def to(self, device: torch.device) -> "Packing":
        """The same on another device."""
        return Packing(self.positions.to(device), self.offsets.to(device), self.longest)

    @functools.cached_property
    def mask(self) -> Tensor:
        """(B, 1, S, S) bool: what each token sees, its own sequence up to itself."""
        sequence = (self.positions == 0).cumsum(1)
        same = sequence[:, None, :, None] == sequence[:, None, None, :]
        return same & torch.ones(same.shape[-2:], dtype=torch.bool, device=same.device).tril()


def _torch_varlen() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "enable_gqa" in inspect.signature(varlen_attn).parameters else None


def varlen(query: Tensor) -> Callable[..., Any] | None:
    """torch's attention over offsets where it can run, an NVIDIA GPU in 16 bits; linear in memory. None elsewhere."""
    on_gpu = query.device.type == "cuda" and torch.version.hip is None
    fits = on_gpu and query.dtype in (torch.bfloat16, torch.float16)
    return _torch_varlen() if fits else None


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
    """Causal attention within each sequence. query (B, H, S, d), key and value (B, H_kv, S, d) -> (B, H, S, d)."""
    attend = varlen(query)
    if attend is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=packing.mask, enable_gqa=True)
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    lengths = (packing.offsets, packing.offsets, packing.longest, packing.longest)
    out: Tensor = attend(q, k, v, *lengths, window_size=(-1, 0), enable_gqa=True)
    return out.unflatten(0, (query.shape[0], -1)).transpose(1, 2)
