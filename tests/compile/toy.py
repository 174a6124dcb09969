"""A small GEMM whose compiled forms are known: the matrix's own test object."""

import triton
import triton.language as tl
from triton.compiler import CompiledKernel

from fusedce.arch import Arch
from tests.compile.matrix import compile_kernel


@triton.jit
def gemm_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    m,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out (m,n) = a (m,k) · b (n,k)ᵀ; one program owns a tile of out. Sizes are multiples of the tile."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        a = tl.load(a_ptr + offs_m[:, None] * k + (start + offs_k)[None, :])
        b = tl.load(b_ptr + offs_n[None, :] * k + (start + offs_k)[:, None])
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(out_ptr + offs_m[:, None] * n + offs_n[None, :], acc)


def compile_toy(
    arch: Arch, dtype: str, tile: tuple[int, int, int], num_warps: int, precision: str = "ieee"
) -> CompiledKernel:
    """The GEMM for an architecture and a tile of (rows, columns, depth)."""
    signature = {"a_ptr": f"*{dtype}", "b_ptr": f"*{dtype}", "out_ptr": "*fp32", "m": "i32", "n": "i32", "k": "i32"}
    constants = {"BLOCK_M": tile[0], "BLOCK_N": tile[1], "BLOCK_K": tile[2], "PRECISION": precision}
    signature |= dict.fromkeys(constants, "constexpr")
    launch = {"num_warps": num_warps, "num_stages": 2, "enable_fp_fusion": True}
    if arch.vendor == "amd":
        launch["matrix_instr_nonkdim"] = 16
    return compile_kernel(gemm_kernel, signature, constants, launch, arch)
