"""One tile of logits in registers: the GEMM's inner loop, bias and softcap. Shared by every kernel of the op.

A logit here is "raw": after bias and softcap, before the temperature. Kernels look at (raw − reference) · slope2, with
slope2 = log₂e / temperature of the row: subtracted first, logits with a common offset of 10⁸ keep their digits, and
exponentials to base 2 are one instruction. What a row is told is natural: slope = 1 / temperature.
"""

from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor

from fusedce import arch
from fusedce.arch import Arch
from fusedce.configs import GemmTile, tile_for
from fusedce.options import LogitOptions
from fusedce.triton.common import describable, dot, launch_options, num_programs, operand

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Above it a row's exponentials are made again about its log-sum-exp: their products with weight could pass fp32's 2¹²⁷.
LARGEST_SUM = tl.constexpr(2.0**64)


@triton.jit
def raw_logits_tile(
    hidden,
    weight,
    bias_ptr,
    block_n,
    block_v,
    num_rows,
    vocab,
    depth,
    hidden_stride,
    weight_stride,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EVEN_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The raw logits of row block block_n and word block block_v, fp32. Words past the vocabulary hold anything.

    hidden, weight: tensor descriptors (DESCRIPTORS), which read 0 past the end, or pointers. By pointer, row and word
    offsets are int64: rows × D and words × D may pass 2³¹; rows and words past the end read the last one, which costs
    less than a mask in the inner loop; EVEN_D (D is a multiple of BLOCK_D) does without the last mask.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    if DESCRIPTORS:
        for start in range(0, depth, BLOCK_D):
            acc = dot(hidden.load([block_n * BLOCK_N, start]), weight.load([block_v * BLOCK_V, start]).T, acc)
    else:
        offs_n = tl.minimum(block_n * BLOCK_N + tl.arange(0, BLOCK_N), num_rows - 1)
        offs_v = tl.minimum(block_v * BLOCK_V + tl.arange(0, BLOCK_V), vocab - 1)
        offs_d = tl.arange(0, BLOCK_D)
        hidden_ptrs = hidden + offs_n.to(tl.int64)[:, None] * hidden_stride + offs_d[None, :]
        weight_ptrs = weight + offs_v.to(tl.int64)[None, :] * weight_stride + offs_d[:, None]
        for start in range(0, depth, BLOCK_D):
            if EVEN_D:
                a = tl.load(hidden_ptrs)
                b = tl.load(weight_ptrs)
            else:
                mask_d = offs_d < depth - start
                a = tl.load(hidden_ptrs, mask=mask_d[None, :], other=0.0)
                b = tl.load(weight_ptrs, mask=mask_d[:, None], other=0.0)
            acc = dot(a, b, acc)
            hidden_ptrs += BLOCK_D
            weight_ptrs += BLOCK_D
    if HAS_BIAS:
        words = block_v * BLOCK_V + tl.arange(0, BLOCK_V)
        acc += tl.load(bias_ptr + words, mask=words < vocab, other=0.0).to(tl.float32)[None, :]
    if HAS_SOFTCAP:
        acc = capped(acc, softcap)
    return acc


@triton.jit
def capped(x, softcap):
    """softcap · tanh(x / softcap), by tanh|y| = 1 − 2e/(1 + e) with e = e^−2|y|, at most 1: so a word near ±softcap,
    whose slope 1 − tanh² is small, keeps its digits on both sides. Below |y| = 0.625 the difference loses some, and it
    is Cephes's polynomial."""
    y = x / softcap
    q = y * y
    tail = 1.33314422036e-1 + q * (-5.37397155531e-2 + q * (2.06390887954e-2 - q * 5.70498872745e-3))
    near = y + y * q * (q * tail - 3.33332819422e-1)
    small = tl.exp(-2.0 * tl.abs(y))
    far = 1.0 - 2.0 * small / (1.0 + small)
    return softcap * tl.where(q < 0.390625, near, tl.where(y < 0.0, -far, far))


@triton.jit
def cap_slope(raw, softcap):
    """The derivative of the softcap, from its result: a second tile kept beside it would not fit the registers."""
    bent = raw / softcap
    return 1.0 - bent * bent


@triton.jit
def words_but_target(block_v, target, vocab, BLOCK_V: tl.constexpr):
    """(BLOCK_N, BLOCK_V) mask: words of the vocabulary that are not the row's target.

    Compared in 32 bits, to spare registers, after a test in 64: 2³² is not word 0.
    """
    offs_v = block_v * BLOCK_V + tl.arange(0, BLOCK_V)
    column = tl.where((target >= 0) & (target < vocab), target, -1).to(tl.int32)
    return (offs_v < vocab)[None, :] & (offs_v[None, :] != column[:, None])


@dataclass(frozen=True)
class Head:
    """The operands of a logits kernel and how it is launched: what all launchers of this folder have in common."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    options: LogitOptions
    machine: Arch
    tile: GemmTile

    @property
    def vocab(self) -> int:
        return self.weight.shape[0]

    @property
    def num_splits(self) -> int:
        """How many word blocks there are."""
        return triton.cdiv(self.vocab, self.tile.block_n)

    def arguments(self) -> tuple[object, object, Tensor]:
        """hidden, weight and bias as the kernels take them."""
        tile = self.tile
        return (
            operand(self.hidden, tile, (tile.block_m, tile.block_k)),
            operand(self.weight, tile, (tile.block_n, tile.block_k)),
            self.weight if self.bias is None else self.bias,
        )

    def sizes(self) -> tuple[int, int, int, int, int, float]:
        """num_rows, vocab, depth, the two strides and softcap."""
        hidden, weight = self.hidden, self.weight
        return (*hidden.shape[:1], *weight.shape, hidden.stride(0), weight.stride(0), self.options.softcap)

    def grid(self) -> tuple[int]:
        """One program a tile, or as many as run at once."""
        tiles = triton.cdiv(self.hidden.shape[0], self.tile.block_m) * triton.cdiv(self.vocab, self.tile.block_n)
        return (num_programs(tiles, self.tile, self.machine),)

    def constants(self) -> dict[str, int]:
        """The switches and sizes that all these kernels have."""
        return constants(self.tile, self.hidden.shape[1], self.bias is not None, self.options.softcap != 0.0)

    def launch(self) -> dict[str, int]:
        """Launch options."""
        return launch_options(self.tile, self.machine)


def head(
    stages: tuple[str, str], hidden: Tensor, weight: Tensor, bias: Tensor | None, options: LogitOptions, *more: Tensor
) -> Head:
    """Operands with dense rows, and the tile for them. stages: without, and with a bias or a softcap; more: further
    matrices that the kernel reaches as it does hidden and weight."""
    machine = arch.of_device(hidden.device)
    tile = tile_for(stages[bias is not None or options.softcap != 0.0], machine, hidden.element_size())
    tile = replace(tile, tma=tile.tma and all(map(describable, (hidden, weight, *more))))
    return Head(hidden, weight, None if bias is None else bias.contiguous(), options, machine, tile)


def constants(tile: GemmTile, depth: int = 0, has_bias: bool = True, has_softcap: bool = True) -> dict[str, int]:
    """The constexprs that every kernel with a logits tile has."""
    return {
        "HAS_BIAS": has_bias,
        "HAS_SOFTCAP": has_softcap,
        "EVEN_D": depth % tile.block_k == 0,
        "DESCRIPTORS": tile.tma,
        "BLOCK_N": tile.block_m,
        "BLOCK_V": tile.block_n,
        "BLOCK_D": tile.block_k,
        "GROUP_N": tile.group_m,
    }


def operand_types(dtype: str, tile: GemmTile) -> dict[str, str]:
    """Triton's types of the arguments that `Head.arguments` and `Head.sizes` give."""
    by_tma = {
        "hidden": f"tensordesc<{dtype}[{tile.block_m}, {tile.block_k}]>",
        "weight": f"tensordesc<{dtype}[{tile.block_n}, {tile.block_k}]>",
    }
    return {
        **(by_tma if tile.tma else dict.fromkeys(("hidden", "weight"), f"*{dtype}")),
        "bias_ptr": f"*{dtype}",
        **dict.fromkeys(("num_rows", "vocab", "depth", "hidden_stride", "weight_stride"), "i32"),
        "softcap": "fp32",
    }
