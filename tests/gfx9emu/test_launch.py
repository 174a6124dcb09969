"""Whole kernels: Triton's own code for both chips, calibrated by products whose layouts its code generator assumes of
the silicon; and launches that must be refused."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from tests.compile.toy import gemm_kernel
from tests.gfx9emu import launch
from tests.gfx9emu.driver import emulated
from tests.gfx9emu.faults import FaultError

pytestmark = pytest.mark.amd
CHIPS = ("gfx942", "gfx950")


@triton.jit
def scale_kernel(x_ptr, out_ptr, n, factor, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (offs < n) | (not MASKED)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=mask) * factor, mask=mask)


@triton.jit
def count_kernel(times_ptr, out_ptr, BLOCK: tl.constexpr):
    """Each program goes round as often as its number says; so does each block of lanes, as often as its own."""
    pid = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in range(tl.load(times_ptr + pid)):
        total += i + tl.arange(0, BLOCK) // 64
    tl.store(out_ptr + pid * BLOCK + tl.arange(0, BLOCK), total)
    tl.store(out_ptr + pid * BLOCK, tl.num_programs(0))


@triton.jit
def endless_kernel(x_ptr):
    while tl.load(x_ptr) == 0:
        tl.store(x_ptr + 1, 1)


@pytest.mark.parametrize("edge", [16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("chip", CHIPS)
def test_products(chip: str, dtype: torch.dtype, edge: int) -> None:
    """Small whole numbers: every sum is exact, so every element has one right value."""
    a, b = (torch.randint(-8, 9, size).to(dtype) for size in ((64, 96), (128, 96)))
    out = torch.full((64, 128), torch.nan)
    with emulated(chip):
        gemm_kernel[(1, 2)](a, b, out, 64, 128, 96, 64, 64, 32, "ieee", num_warps=4, matrix_instr_nonkdim=edge)
    assert torch.equal(out.double(), a.double() @ b.double().t())


def test_xf32_rounds_its_operands() -> None:
    """What fp32 products are without input_precision="ieee"; gfx950 has no such instruction."""
    a, b, out = torch.randn(64, 64), torch.randn(64, 64), torch.empty(64, 64)
    with emulated("gfx942"):
        gemm_kernel[(1, 1)](a, b, out, 64, 64, 64, 64, 64, 32, "tf32", num_warps=4)
    assert 1e-3 < (out.double() - a.double() @ b.double().t()).abs().max() < 0.1


@pytest.mark.parametrize("chip", CHIPS)
def test_workgroups_part_and_meet(chip: str) -> None:
    times, out = torch.tensor([3, 0, 7, 1, 5], dtype=torch.int32), torch.empty(5, 256, dtype=torch.int32)
    with emulated(chip):
        count_kernel[(5,)](times, out, BLOCK=256)
    expected = torch.stack([n * (n - 1) // 2 + n * (torch.arange(256) // 64) for n in times.tolist()]).int()
    expected[:, 0] = 5
    assert torch.equal(out, expected)


@pytest.mark.parametrize("chip", CHIPS)
def test_more_workgroups_than_run_side_by_side(chip: str) -> None:
    x = torch.randn(40_000)
    out = torch.empty_like(x)
    with emulated(chip):
        scale_kernel[(triton.cdiv(40_000, 256),)](x, out, 40_000, 0.5, True, BLOCK=256)
    assert torch.equal(out, 0.5 * x)


def test_a_missing_mask_is_a_fault_with_its_source_line() -> None:
    x = torch.randn(1000)
    with (
        emulated("gfx942"),
        pytest.raises(FaultError, match=r"global load out of bounds: byte 4000 of storage") as caught,
    ):
        scale_kernel[(4,)](x, torch.empty(1000), 1000, 0.5, False, BLOCK=256)
    assert "in scale_kernel at" in str(caught.value) and "test_launch.py:" in str(caught.value)


def test_arguments_that_are_views_and_none() -> None:
    whole = torch.arange(100.0)
    with emulated("gfx942"):
        scale_kernel[(1,)](whole[10:], whole[60:], 40, 2.0, True, BLOCK=64)
    assert torch.equal(whole[60:], 2 * torch.arange(10.0, 50.0)) and torch.equal(whole[:60], torch.arange(60.0))


def test_more_threads_than_a_workgroup_has_are_refused() -> None:
    x = torch.randn(4096)
    with emulated("gfx942"), pytest.raises((OutOfResources, FaultError), match="threads"):
        scale_kernel[(1,)](x, torch.empty(4096), 4096, 0.5, True, BLOCK=4096, num_warps=32)


@pytest.mark.parametrize("chip", CHIPS)
def test_more_lds_than_there_is_is_refused(chip: str) -> None:
    """One buffer of operands of 96 KiB: gfx950 has them."""
    a, b, out = torch.ones(128, 128).half(), torch.ones(256, 128).half(), torch.empty(128, 256)
    options = {"num_warps": 8, "num_stages": 2 if chip == "gfx942" else 1, "matrix_instr_nonkdim": 16}
    arguments = (a, b, out, 128, 256, 128, 128, 256, 128, "ieee")
    with emulated(chip):
        if chip == "gfx942":
            with pytest.raises(OutOfResources, match="shared memory"):
                gemm_kernel[(1, 1)](*arguments, **options)
        else:
            gemm_kernel[(1, 1)](*arguments, **options)
            assert (out == 128).all()


def test_a_kernel_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_INSTRUCTIONS", 10_000)
    with emulated("gfx942"), pytest.raises(FaultError, match="endless_kernel does not end"):
        endless_kernel[(1,)](torch.zeros(2, dtype=torch.int32))


def test_autotuning_counts_instructions() -> None:
    configs = [triton.Config({"BLOCK": 256}, num_warps=w) for w in (1, 4)]
    tuned = triton.autotune(configs, key=["n"])(scale_kernel)
    x = torch.randn(1000)
    out = torch.empty_like(x)
    with emulated("gfx942"):
        tuned[(4,)](x, out, 1000, 0.5, True)
    assert torch.equal(out, 0.5 * x) and tuned.best_config.num_warps in (1, 4)
