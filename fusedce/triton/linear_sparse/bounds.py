"""What each pair of a row and a tile of words holds of the gradient at most, and whether it is worked."""

import triton
import triton.language as tl


@triton.jit
def pair_bounds(
    mass_ptr,
    row_ptr,
    tile,
    offs_n,
    mask,
    mass_stride,
    HAS_ENTROPY: tl.constexpr,
    WORD_TILE: tl.constexpr,
):
    """The bound of pairs (tile, row), fp32: see `fusedce.budget.pair_bound`. tile and offs_n: of shapes that broadcast.

    row_ptr: (N, 8) fp32, of which on_probs, and with the entropy on_surprise and H, both in base 2, are read.
    """
    # tiles × rows may pass 2³¹.
    offs = (offs_n * 0 + tile).to(tl.int64) * mass_stride + offs_n
    mass = tl.load(mass_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    weight = tl.abs(tl.load(row_ptr + 8 * offs_n + 3, mask=mask, other=0.0))
    if HAS_ENTROPY:
        surprise = tl.abs(tl.load(row_ptr + 8 * offs_n + 5, mask=mask, other=0.0))
        entropy = tl.load(row_ptr + 8 * offs_n + 6, mask=mask, other=0.0)
        weight += surprise * (tl.log2(WORD_TILE / tl.where(mass == 0.0, 1.0, mass)) + entropy)
    return mass * weight


@triton.jit
def is_worked(
    mass_ptr,
    row_ptr,
    own_tile,
    threshold,
    tile,
    offs_n,
    mask,
    mass_stride,
    HAS_ENTROPY: tl.constexpr,
    WORD_TILE: tl.constexpr,
):
    """Which pairs of tile and rows offs_n are worked: those from the threshold on, and each target's (own_tile; −1 for
    a row without a gradient)."""
    bound = pair_bounds(mass_ptr, row_ptr, tile, offs_n, mask, mass_stride, HAS_ENTROPY, WORD_TILE)
    return mask & ((bound >= threshold) | (own_tile == tile))
