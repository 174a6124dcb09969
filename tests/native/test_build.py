"""The wheel with and without the extension, as pip builds it, and what the built module says and refuses."""

import json
from pathlib import Path

import pytest
import torch

from tests.native.wheels import Build, build, pip_wheel

# One worker: the build takes minutes, and is made once a process.
pytestmark = [pytest.mark.native, pytest.mark.xdist_group("native_build")]

CALL = """
import torch, fusedce._C
rows, one = torch.zeros(2, 3), torch.ones(2)
try:
    torch.ops.fusedce_native.logprob_rows(rows, one.long(), None, one, -100, 0.0, one, one, one, rows[:, 1:])
except NotImplementedError as error:
    print(error)
"""

# op -> the arguments that it writes
WRITES = {
    "logprob_rows": "logprob entropy lse normalizer",
    "parts_rows": "parts",
    "d_logits_rows": "d_logits",
    "argmax_rows": "words",
    "selected_logits": "raw",
    "selected_gradient": "d_logits",
    "target_logits": "raw_target seed",
    "seeded_exponentials": "exponentials partial",
    "seeded_statistics": "seed exponentials rest logprob lse",
    "seeded_scale": "hidden exponentials factor",
    "logit_sums": "max exp gap raw_target",
    "merged_sums": "logprob entropy lse normalizer",
    "logit_gradient": "d_logits",
    "d_hidden": "out",
    "d_weight": "out",
    "scaled": "out",
}


def test_the_wheel_holds_the_extension(native_build: Build) -> None:
    assert "none-any" not in native_build.wheel.name
    assert len(list((native_build.unpacked / "fusedce").glob("_C.*.so"))) == 1
    assert not list(native_build.unpacked.rglob("*.cu")), "sources belong into the source archive"


def test_max_jobs_and_ninja_are_used(native_build: Build) -> None:
    assert "-gencode=arch=compute_90a,code=compute_90a" in native_build.printed
    assert "[1/5]" in native_build.printed


def test_build_info_tells_what_was_built(native_build: Build) -> None:
    info = json.loads(native_build.python("import json; from fusedce import hip; print(json.dumps(hip.build_info()))"))
    assert info["vendor"] == "nvidia" and info["compiler"].startswith("nvcc ")
    assert info["archs"] == ["sm_80", "sm_90a", "compute_90a"]
    assert info["torch"] == torch.__version__
    assert info["wave_size"] == 32


def test_tile_table_holds_the_constants_of_the_sources(native_build: Build) -> None:
    table = json.loads(
        native_build.python("import json, torch; from fusedce import _C; print(json.dumps(_C.tile_table()))")
    )
    assert set(table) == {"linear_ce_rows", "linear_ce_hopper"}
    source = Path("csrc/kernels/linear_ce_rows.cu").read_text()
    assert f"kThreads = {table['linear_ce_rows']['threads']};" in source
    assert f"kUnroll = {table['linear_ce_rows']['unroll']};" in source
    assert table["linear_ce_rows"]["vector_width"] * 4 == 16, "one access moves 16 bytes"
    assert f"kTileN = {table['linear_ce_hopper']['vocab']};" in Path("csrc/kernels/hopper_gemm.cuh").read_text()


def test_the_ops_are_registered_for_cuda_alone(native_build: Build) -> None:
    code = """
import torch, fusedce._C
has = torch._C._dispatch_has_kernel_for_dispatch_key
for op in sys.argv[1:]:
    print(op, *(has(f"fusedce_native::{op}", key) for key in ("CUDA", "CPU")))
"""
    assert native_build.python(f"import sys; sys.argv[1:] = {list(WRITES)}" + code).splitlines() == [
        f"{op} True False" for op in WRITES
    ]


def test_outputs_are_declared_as_written(native_build: Build) -> None:
    code = """
import torch, fusedce._C
for op in sys.argv[1:]:
    print(*(a.name for a in getattr(torch.ops.fusedce_native, op).default._schema.arguments if a.is_write))
"""
    assert native_build.python(f"import sys; sys.argv[1:] = {list(WRITES)}" + code).splitlines() == list(
        WRITES.values()
    )


def test_cpu_tensors_are_refused_by_name(native_build: Build) -> None:
    message = native_build.python(CALL)
    assert "fusedce_native::logprob_rows" in message and "'CPU' backend" in message


def test_the_runtime_inside_is_hidden(native_build: Build) -> None:
    code = """
import ctypes, torch, fusedce._C
module = ctypes.CDLL(fusedce._C.__file__)
print(hasattr(module, "PyInit__C"), hasattr(module, "cudaLaunchKernel"))
"""
    assert native_build.python(code) == "True False"


def test_without_a_gpu_the_backend_says_so(native_build: Build) -> None:
    code = "import torch; torch.cuda.is_available = lambda: False; from fusedce import hip; print(hip.unavailable())"
    assert native_build.python(code) == "torch sees no GPU"


def test_an_extension_of_another_torch_is_not_used(native_build: Build) -> None:
    code = "import torch; torch.__version__ = '2.99'; from fusedce import hip; print(hip.unavailable())"
    reason = native_build.python(code)
    assert "was built with torch" in reason and "not 2.99" in reason and "FUSEDCE_BUILD_EXT=1" in reason


def test_0_builds_pure_python(tmp_path: Path) -> None:
    made = build(tmp_path, FUSEDCE_BUILD_EXT="0")
    assert made.wheel.name.endswith("-py3-none-any.whl")
    assert (made.unpacked / "fusedce" / "py.typed").is_file()
    reason = made.python("from fusedce import hip; print(hip.unavailable())")
    assert "is not built" in reason and "FUSEDCE_BUILD_EXT=1 pip install --no-build-isolation" in reason


def test_auto_without_a_compiler_installs_and_says_why(tmp_path: Path) -> None:
    made = build(tmp_path, CUDA_HOME="", CUDA_PATH="", PATH=path_without_compilers(tmp_path))
    assert made.wheel.name.endswith("-py3-none-any.whl")
    assert "fusedce: no native extension: " in made.printed


def test_1_without_a_compiler_fails_and_says_why(tmp_path: Path) -> None:
    variables = {"CUDA_HOME": "", "CUDA_PATH": "", "PATH": path_without_compilers(tmp_path)}
    done = pip_wheel(tmp_path, FUSEDCE_BUILD_EXT="1", **variables)
    assert done.returncode != 0
    assert "the native extension cannot be built: there is no nvcc in CUDA_HOME, CUDA_PATH or PATH" in done.stdout


def test_another_word_is_refused(tmp_path: Path) -> None:
    done = pip_wheel(tmp_path, FUSEDCE_BUILD_EXT="yes")
    assert done.returncode != 0
    assert "FUSEDCE_BUILD_EXT is 'yes'; expected auto, 0 or 1" in done.stdout


def path_without_compilers(folder: Path) -> str:
    empty = folder / "bin"
    empty.mkdir()
    return str(empty)
