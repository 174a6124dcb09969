"""Every Triton kernel compiles for every GPU, within its budget and as the golden table says; and the budgets bite."""

import dataclasses
import importlib

import pytest

from fusedce.arch import ARCHS
from fusedce.configs import table_tile
from tests.compile import amd, golden, nvidia
from tests.compile.matrix import TARGETS, Case, cases, compile_case, kernel_modules, kernels_in, measure, signature_of
from tests.compile.resources import MATRIX_16BIT, over_budget
from tests.compile.toy import compile_toy

pytestmark = pytest.mark.compile
CASES = cases()
GOLDEN = golden.read()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case.key))
def test_kernel_keeps_its_budget(case: Case) -> None:
    used = measure(compile_case(case), case.arch)
    assert not over_budget(used, case.arch, golden.is_gemm_16bit(case))
    assert case.key in GOLDEN, "new kernel: `make golden` writes its row"
    assert not golden.differences(golden.row_of(used), GOLDEN[case.key]), (
        "`make golden` rewrites the table, if this is meant"
    )


@pytest.mark.parametrize("name", kernel_modules())
def test_file_has_one_kernel_and_says_how_to_compile_it(name: str) -> None:
    module = importlib.import_module(f"fusedce.triton.{name}")
    (kernel,) = kernels_in(module)
    assert module.KERNEL is vars(module)[kernel]
    tile = table_tile(module.STAGE, ARCHS["sm_80"], 2) if module.STAGE else None
    assert set(signature_of(module, "bf16", tile)) == set(module.KERNEL.arg_names)


def test_table_has_no_row_too_many() -> None:
    assert set(GOLDEN) == {case.key for case in CASES}


@pytest.mark.parametrize("target", TARGETS)
def test_plain_gemm_is_good(target: str) -> None:
    """What the readers of AMD's and NVIDIA's objects say of a kernel that is known to be good."""
    arch = ARCHS[target]
    used = measure(compile_toy(arch, "bf16", (128, 128, 32), num_warps=8), arch)
    assert not over_budget(used, arch, gemm_16bit=True)
    assert used.threads == 8 * arch.wave_size
    assert 64 * 128 * 128 // (64 * used.threads) <= used.registers <= 512


@pytest.mark.parametrize(
    ("target", "dtype", "tile", "num_warps", "precision", "complaint"),
    [
        ("gfx942", "bf16", (256, 256, 32), 2, "ieee", "spilled"),
        ("sm_80", "bf16", (256, 128, 32), 2, "ieee", "spilled"),
        ("gfx942", "bf16", (64, 64, 32), 32, "ieee", "threads"),
        ("sm_90", "bf16", (256, 256, 128), 8, "ieee", "shared memory"),
        ("sm_90", "fp32", (64, 64, 32), 4, "ieee", "no wgmma.m64"),
        ("sm_80", "fp32", (64, 64, 32), 4, "tf32", "lose bits"),
    ],
)
def test_budget_bites(target: str, dtype: str, tile: tuple, num_warps: int, precision: str, complaint: str) -> None:
    arch = ARCHS[target]
    used = measure(compile_toy(arch, dtype, tile, num_warps, precision), arch)
    assert any(complaint in text for text in over_budget(used, arch, gemm_16bit=True))


@pytest.mark.parametrize("target", TARGETS)
def test_other_matrix_instruction_is_refused(target: str) -> None:
    """16-bit products on another unit than the one the tiles are made for."""
    arch = ARCHS[target]
    used = measure(compile_toy(arch, "bf16", (128, 128, 32), num_warps=8), arch)
    other = dataclasses.replace(used, matrix=("mfma.4x4x4.bf16", "mma.sync.m16n8k8.bf16"))
    assert over_budget(other, arch, gemm_16bit=True) == [
        f"no {MATRIX_16BIT[target]} among the matrix instructions (mfma.4x4x4.bf16, mma.sync.m16n8k8.bf16)"
    ]


def test_spills_are_told_apart_by_where_they_are() -> None:
    """A loop from 0x20 to 0x50 with a product, spills before and in it; and the same without a product."""
    code = [(0x10, "STL [R1], R2"), (0x20, "LDG.E R4, [R2]"), (0x30, "HGMMA.64x256x16.F32 R24"), (0x40, "LDL R3, [R1]")]
    loop = (0x50, "@P0 BRA 0x20")
    assert nvidia.spills_in_loop([*code, loop]) == 1
    assert nvidia.spills_in_loop([*code[:3], loop]) == 0
    assert nvidia.spills_in_loop([*code[:2], *code[3:], loop]) == 2
    arch = ARCHS["sm_90"]
    used = measure(compile_toy(arch, "bf16", (128, 128, 32), num_warps=8), arch)
    assert not over_budget(dataclasses.replace(used, spills=128), arch, gemm_16bit=True)
    assert over_budget(dataclasses.replace(used, spills=129), arch, gemm_16bit=True)
    assert over_budget(dataclasses.replace(used, spills=8, loop_spills=1), arch, gemm_16bit=True)


def test_amd_s_scalar_spills_are_told_apart_by_where_they_are() -> None:
    """A loop with a product, a scalar moved to a lane before and in it; and the same without a product."""
    before, inside = "v_writelane_b32 v1, s2, 0", "v_readlane_b32 s2, v1, 0"
    loop = [".LBB0_1:  ; loop", "v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]", "s_cbranch_scc1 .LBB0_1"]
    assert amd.lane_moves_in_loop("\n".join([before, *loop])) == 0
    assert amd.lane_moves_in_loop("\n".join([before, *loop[:2], inside, *loop[2:]])) == 1
    assert amd.lane_moves_in_loop("\n".join([before, loop[0], inside, loop[2]])) == 2


def test_loads_of_one_element_are_seen() -> None:
    """What a clamped index makes of a row that lies side by side: slow, and the same numbers."""
    product, loop = (0x30, "HGMMA.64x256x16.F32 R24"), (0x50, "@P0 BRA 0x20")
    wide, narrow = "LDG.E.128 R4, desc[UR4][R2.64]", "LDG.E.U16 R4, desc[UR4][R2.64]"
    assert nvidia.in_loop([(0x10, narrow), (0x20, wide), product, loop], nvidia.NARROW) == 0
    assert nvidia.in_loop([(0x10, wide), (0x20, narrow), product, loop], nvidia.NARROW) == 1
    text = ".LBB0_1:\n{}\nv_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]\ns_cbranch_scc1 .LBB0_1"
    assert amd.in_loop(text.format("global_load_dwordx4 v[0:3], v[4:5], off"), amd.NARROW) == 0
    assert amd.in_loop(text.format("buffer_load_ushort v0, v1, s[0:3], 0 offen"), amd.NARROW) == 1
    arch = ARCHS["sm_90"]
    used = measure(compile_toy(arch, "bf16", (128, 128, 32), num_warps=8), arch)
    assert over_budget(dataclasses.replace(used, narrow_loads=9), arch, gemm_16bit=True)


def test_golden_numbers_belong_to_one_triton() -> None:
    then = golden.Row("3.9.0", registers=100, shared=1024, spills=0, matrix="wgmma.m64n256k16.bf16")
    same = dataclasses.replace
    assert not golden.differences(then, then)
    assert golden.differences(same(then, registers=99), then)
    assert golden.differences(same(then, shared=1025), then)
    other = same(then, triton="3.8.0")
    assert not golden.differences(same(other, registers=999, shared=2048), then)
    assert golden.differences(same(then, spills=1), then)
    assert not golden.differences(same(other, spills=1), then)
    assert golden.differences(same(other, matrix="mma.sync.m16n8k16.bf16"), then)
