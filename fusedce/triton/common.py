"""What every Triton kernel and its launcher share: the dot product, the order of tiles, launch options, strides."""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedce import env
from fusedce.arch import Arch
from fusedce.configs import GemmTile

# A constexpr, so that compiled kernels carry nothing of it.
INTERPRETED = tl.constexpr(env.triton_interpreted())


@triton.jit
def dot(a, b, acc):
    """acc + a·b in fp32. Upcasts in the interpreter, which multiplies raw bf16 bits as integers (Triton 3.6 to 3.9).

    "ieee": fp32 operands keep their 24 bits; gfx942 would take xf32 by default, NVIDIA tf32.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if a.dtype == tl.float32:
        # A block is summed on its own, then joined: one long chain of fp32 multiply-adds rounds further off.
        # Subtracted, because Triton makes the chain of a sum again.
        acc -= tl.dot(-a, b, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def round_to(values, dtype: tl.constexpr):
    """fp32 `values` in `dtype`, to nearest even. The interpreter would cut off what bf16 cannot hold (Triton 3.6 to
    3.9)."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        values = tl.where(values == values, nearest, values)
    return values.to(dtype)


@triton.jit
def grouped_order(pid, num_m, num_n, GROUP_M: tl.constexpr):
    """(m, n) of tile `pid`: GROUP_M row blocks share one sweep over the columns, so that both operands stay in L2."""
    per_group = GROUP_M * num_n
    first_m = pid // per_group * GROUP_M
    group_m = min(num_m - first_m, GROUP_M)
    return first_m + pid % per_group % group_m, pid % per_group // group_m


@triton.jit
def log1p(x):
    """log(1 + x) for x ≥ 0, to rounding also where x is small: there by the series of 2·artanh(x / (2 + x))."""
    t = tl.where(x <= 1.0, x, 0.0)
    s = tl.math.div_rn(t, 2.0 + t)
    q = s * s
    tail = 1.0 / 3 + q * (1.0 / 5 + q * (1.0 / 7 + q * (1.0 / 9 + q * (1.0 / 11 + q * (1.0 / 13 + q * (1.0 / 15))))))
    near = 2.0 * s + 2.0 * s * q * tail
    # Not `x <= 1`: NaN must come out as NaN.
    return tl.where(x > 1.0, tl.log(1.0 + x), tl.where(x <= 1.0, near, x))


@triton.jit
def sigmoid(x):
    """1 / (1 + e^−x). Divided as IEEE has it: the fast division's error is what an fp32 layer would be made of."""
    return tl.math.div_rn(1.0, 1.0 + tl.exp(-x))


# Said outright, because Triton 3.10 turns the default of fused multiply-add around, and with it the last bits.
FP_FUSION = {"enable_fp_fusion": True}
ROW_LAUNCH = {"num_warps": 4, **FP_FUSION}  # of the kernels that have no tile


def launch_options(tile: GemmTile, arch: Arch) -> dict[str, int]:
    """Keyword arguments of a launch (or of triton.compile) for this tile on this machine."""
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **FP_FUSION}
    if arch.vendor == "amd" and tile.matrix_instr:
        options["matrix_instr_nonkdim"] = tile.matrix_instr
    return options


def num_programs(num_tiles: int, tile: GemmTile, arch: Arch) -> int:
    """The grid: one program a tile, or, where programs go from tile to tile and load the next during the epilogue, one
    a unit."""
    return min(num_tiles, arch.num_units) if tile.tma else num_tiles


def describable(tensor: Tensor) -> bool:
    """Whether the tensor memory accelerator can read and write it: dense rows that start at multiples of 16 bytes."""
    *outer, inner = tensor.stride()
    apart = all(stride > 0 and stride * tensor.element_size() % 16 == 0 for stride in outer)
    return inner == 1 and apart and tensor.data_ptr() % 16 == 0 and 0 not in tensor.shape


def operand(matrix: Tensor, tile: GemmTile, block: tuple[int, ...]) -> Tensor | TensorDescriptor:
    """`matrix` as a kernel takes it: a descriptor of its blocks where the tile says so, else the tensor."""
    return TensorDescriptor.from_tensor(matrix, list(block)) if tile.tma else matrix


def unit_rows(matrix: Tensor) -> Tensor:
    """`matrix` with its rows' elements side by side: itself, or a copy where the last dimension is strided."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()
