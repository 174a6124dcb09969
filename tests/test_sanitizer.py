"""What tests/sanitizer.py makes of the sanitizer's reports."""

import pytest

from tests import sanitizer

RAN = "ran 108 cases: {'triton': 54, 'native': 54}\n"
CLEAN = RAN + "========= ERROR SUMMARY: 0 errors\n"
MEMORY = """========= Invalid __global__ write of size 4 bytes
=========     at {}(fusedce::TileSums, float *)+0x120 in linear_ce_sums.cu:40
=========     by thread (3,0,0) in block (0,0,0)
"""
RACE = """========= Error: Race reported between Write access at void {}(float *)+0xb0 in wave.cuh:55
=========     and Read access at void {}(float *)+0x140 in wave.cuh:56 [1984 hazards]
"""
NATIVE, TRITON = "fusedce::(anonymous namespace)::merged_sums_kernel<(bool)1>", "logprob_fwd_kernel"
OTHERS = ("at::native::reduce_kernel<(int)512>", "gemmSN_NN_kernel<float>", "cublasLt::splitKreduce_kernel<(int)32>")


def test_there_are_more_than_a_hundred_cases_with_both_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer.hip, "unavailable", lambda: None)
    assert len(sanitizer.cases()) > 100
    assert len(set(sanitizer.cases())) == len(sanitizer.cases())


def test_a_clean_report_is_good() -> None:
    assert sanitizer.verdict(CLEAN)[0]
    assert sanitizer.verdict(RAN + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n")[0]


@pytest.mark.parametrize("kernel", [NATIVE, TRITON])
@pytest.mark.parametrize("report", [MEMORY, RACE])
def test_an_error_in_a_kernel_of_ours_is_bad(kernel: str, report: str) -> None:
    good, words = sanitizer.verdict(report.replace("{}", kernel) + CLEAN)
    assert not good and kernel.partition("<")[0] in words


@pytest.mark.parametrize("kernel", OTHERS)
def test_other_kernels_are_counted_apart(kernel: str) -> None:
    good, words = sanitizer.verdict(MEMORY.replace("{}", kernel) + CLEAN)
    assert good and "in others 1" in words


@pytest.mark.parametrize("report", ["", RAN, CLEAN.replace(RAN, "")])
def test_cases_that_did_not_end_are_bad(report: str) -> None:
    """Neither a tool that found no GPU, nor a process that died, has shown anything."""
    assert not sanitizer.verdict(report)[0]
