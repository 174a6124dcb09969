"""What each pair of a row and a tile of words holds of the gradient at most."""

import triton
import triton.language as tl


@triton.jit
def row_weights(row_ptr, offs_n, mask, HAS_ENTROPY: tl.constexpr):
    """What the bounds of rows offs_n need: |on_probs|, and with the entropy |on_surprise| and H, both in base 2;
    without it, the first thrice. row_ptr: (N, 8) fp32.

    Loaded by the caller once, since the compiler would load them again for every tile of words.
    """
    weight = tl.abs(tl.load(row_ptr + 8 * offs_n + 3, mask=mask, other=0.0))
    surprise = weight
    entropy = weight
    if HAS_ENTROPY:
        surprise = tl.abs(tl.load(row_ptr + 8 * offs_n + 5, mask=mask, other=0.0))
        entropy = tl.load(row_ptr + 8 * offs_n + 6, mask=mask, other=0.0)
    return weight, surprise, entropy


@triton.jit
def pair_bounds(
    mass_ptr,
    weight,
    surprise,
    entropy,
    tile,
    offs_n,
    mask,
    mass_stride,
    HAS_ENTROPY: tl.constexpr,
    WORD_TILE: tl.constexpr,
):
    """The bound of pairs (tile, row), fp32: see `fusedce.budget.pair_bound`. tile and offs_n: of shapes that broadcast,
    as do the rows' numbers, which are those of `row_weights`."""
    # tiles × rows may pass 2³¹.
    offs = (offs_n * 0 + tile).to(tl.int64) * mass_stride + offs_n
    mass = tl.load(mass_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_ENTROPY:
        weight += surprise * (tl.log2(WORD_TILE / tl.where(mass == 0.0, 1.0, mass)) + entropy)
    return mass * weight
