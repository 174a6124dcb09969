"""What the grouped GEMMs from rows to rows share: how an expert's weight is read, and the loop over the depth."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedce.configs import GemmTile
from fusedce.triton.common import describable, dot


@triton.jit
def expert_product(
    left,
    weight,
    tile_r,
    tile_n,
    expert,
    offs_w,
    mask_w,
    depth,
    left_stride,
    stride_e,
    stride,
    K_CONTIGUOUS: tl.constexpr,
    HALVES: tl.constexpr,
    EVEN_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Σ_k left[r, k] · weight[expert, offs_w, k] in fp32, for the padded rows of tile tile_r.

    left, weight: tensor descriptors (DESCRIPTORS), which read 0 past any end, or pointers. A descriptor finds the
    columns by tile_n: BLOCK_N side by side, or (HALVES) half of them in each half of the weight. By pointer they are
    offs_w (BLOCK_N,), of which mask_w are inside; row, expert and weight offsets are int64; EVEN_K (the depth is a
    multiple of BLOCK_K) does without a mask along it.
    """
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    if DESCRIPTORS:
        for begin in range(0, depth, BLOCK_K):
            a = left.load([tile_r * BLOCK_R, begin])
            if HALVES:
                b = weight.load([expert, 0, tile_n * (BLOCK_N // 2), begin]).reshape(BLOCK_N, BLOCK_K).T
            elif K_CONTIGUOUS:
                b = weight.load([expert, tile_n * BLOCK_N, begin]).reshape(BLOCK_N, BLOCK_K).T
            else:
                b = weight.load([expert, begin, tile_n * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
            acc = dot(a, b, acc)
    else:
        offs_r = tile_r.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        offs_k = tl.arange(0, BLOCK_K)
        left_ptrs = left + offs_r[:, None] * left_stride + offs_k[None, :]
        corner = weight + expert.to(tl.int64) * stride_e
        if K_CONTIGUOUS:
            # Another word instead of a mask, which every step would have to carry.
            rows_w = tl.where(mask_w, offs_w, 0).to(tl.int64)
            weight_ptrs = corner + rows_w[None, :] * stride + offs_k[:, None]
            step = BLOCK_K
        else:
            # A mask, because only columns that are seen to lie side by side are read 16 bytes at a time.
            weight_ptrs = corner + offs_k.to(tl.int64)[:, None] * stride + offs_w[None, :]
            step = tl.cast(stride, tl.int64) * BLOCK_K
        for begin in range(0, depth, BLOCK_K):
            mask_k = offs_k < depth - begin
            a = tl.load(left_ptrs) if EVEN_K else tl.load(left_ptrs, mask=mask_k[None, :], other=0.0)
            if K_CONTIGUOUS and EVEN_K:
                b = tl.load(weight_ptrs)
            elif K_CONTIGUOUS:
                b = tl.load(weight_ptrs, mask=mask_k[:, None], other=0.0)
            elif EVEN_K:
                b = tl.load(weight_ptrs, mask=mask_w[None, :], other=0.0)
            else:
                b = tl.load(weight_ptrs, mask=mask_k[:, None] & mask_w[None, :], other=0.0)
            acc = dot(a, b, acc)
            left_ptrs += BLOCK_K
            weight_ptrs += step
    return acc


@dataclass(frozen=True)
class ExpertWeight:
    """weight (E,X,K) as the grouped GEMMs read it: where it lies, also as a view with gaps or stored as (E,K,X).

    tensor: `weight`, or a copy where neither X nor K has its elements side by side. halves: whether a tile of columns
    is half of the first and half of the last X/2 rows (gate and up).
    """

    tensor: Tensor
    halves: bool = False

    @staticmethod
    def of(weight: Tensor, halves: bool = False) -> "ExpertWeight":
        """With one of the last two dimensions dense."""
        dense = weight.stride(2) == 1 or weight.stride(1) == 1
        return ExpertWeight(weight if dense else weight.contiguous(), halves)

    @property
    def k_contiguous(self) -> bool:
        return self.tensor.stride(2) == 1

    @property
    def strides(self) -> tuple[int, int]:
        """Of an expert, and of the dimension that is not dense."""
        return self.tensor.stride(0), self.tensor.stride(1 if self.k_contiguous else 2)

    def _blocks(self) -> Tensor:
        """The view that a descriptor describes: its last dimension is the dense one."""
        weight = self.tensor
        if self.halves:
            return weight.unflatten(1, (2, weight.shape[1] // 2))
        return weight if self.k_contiguous else weight.mT

    def describable(self) -> bool:
        """Whether descriptors reach it. Halves that are dense along X would be two loads a step."""
        return describable(self._blocks()) if self.k_contiguous or not self.halves else False

    def operand(self, tile: GemmTile) -> Tensor | TensorDescriptor:
        """The tensor, or where the tile says so the descriptor of its blocks."""
        if not tile.tma:
            return self.tensor
        return TensorDescriptor.from_tensor(self._blocks(), self.block(tile, self.k_contiguous, self.halves))

    @staticmethod
    def block(tile: GemmTile, k_contiguous: bool, halves: bool) -> list[int]:
        """The descriptor's block."""
        if halves:
            return [1, 2, tile.block_n // 2, tile.block_k]
        return [1, tile.block_n, tile.block_k] if k_contiguous else [1, tile.block_k, tile.block_n]


def weight_type(dtype: str, tile: GemmTile, k_contiguous: bool, halves: bool = False) -> str:
    """Triton's type of the weight argument."""
    block = ", ".join(map(str, ExpertWeight.block(tile, k_contiguous, halves)))
    return f"tensordesc<{dtype}[{block}]>" if tile.tma else f"*{dtype}"


def rows_type(dtype: str, tile: GemmTile, columns: int) -> str:
    """Triton's type of a matrix of padded rows, read or written `columns` at a time."""
    return f"tensordesc<{dtype}[{tile.block_m}, {columns}]>" if tile.tma else f"*{dtype}"
