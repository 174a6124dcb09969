"""The native row kernels built for the host by g++, one fiber a GPU thread, and called on CPU tensors."""

import ctypes
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests import toolchain

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc" / "kernels"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # in the order of the C++ enum Dtype


class LogitRows(ctypes.Structure):
    """`fusedce::LogitRows`."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inv_temperature", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("ignore_index", ctypes.c_int64),
        ("vocab", ctypes.c_int),
        ("softcap", ctypes.c_float),
    )


@dataclass(frozen=True)
class Rows:
    """What all kernels are given. logits (N,V) fp32, of any row stride and alignment; bias (V,) fp32 or None;
    inv_temperature (N,) fp32."""

    logits: Tensor
    target: Tensor
    bias: Tensor | None
    inv_temperature: Tensor
    ignore_index: int = -100
    softcap: float = 0.0

    def for_c(self) -> LogitRows:
        """The struct that the launchers take. It holds addresses: this object must outlive it."""
        bias = None if self.bias is None else self.bias.data_ptr()
        num_rows, vocab = self.logits.shape
        return LogitRows(
            self.logits.data_ptr(), self.target.data_ptr(), bias, self.inv_temperature.data_ptr(), num_rows,
            self.logits.stride(0), self.ignore_index, vocab, self.softcap,
        )  # fmt: skip


@dataclass(frozen=True)
class HostKernels:
    """One build, for one number of lanes."""

    library: ctypes.CDLL

    def logprob_rows(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """logprob, entropy, lse (N,) and normalizer (N,2)."""
        num_rows = rows.logits.shape[0]
        out = [torch.empty(num_rows), torch.empty(num_rows), torch.empty(num_rows), torch.empty(num_rows, 2)]
        self._call("logprob_rows", ctypes.byref(rows.for_c()), ctypes.byref(_pointers(out)))
        return tuple(out)

    def parts_rows(self, rows: Rows) -> Tensor:
        """(N,4): what a shard knows of each row."""
        parts = torch.empty(rows.logits.shape[0], 4)
        self._call("parts_rows", ctypes.byref(rows.for_c()), ctypes.c_void_p(parts.data_ptr()))
        return parts

    def d_logits_rows(self, rows: Rows, upstream: list[Tensor | None], out: Tensor) -> None:
        """Fills out (N,V). upstream: on_probs, on_surprise or None, on_target, entropy, normalizer."""
        arguments = ctypes.byref(rows.for_c()), ctypes.byref(_pointers(upstream)), ctypes.c_void_p(out.data_ptr())
        self._call("d_logits_rows", *arguments, DTYPES.index(out.dtype), ctypes.c_int64(out.stride(0)))

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        error = function(*arguments)
        assert error is None, error.decode()


def _pointers(tensors: list[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


def compile_for(source: str, wave_size: int, to: Path, kernels: Path, *flags: str) -> Path:
    """Compiles a file of tests/simt, with the kernels of the folder `kernels`, for waves of `wave_size` lanes."""
    simt = ROOT / "tests" / "simt"
    toolchain.output([
        toolchain.require("g++"), "-std=c++20", "-O2", "-Wall", "-Werror", "-Wno-unknown-pragmas",
        # vectors are read through casts, as on a GPU
        "-fno-strict-aliasing", "-DFUSEDCE_SIMT", f"-DSIMT_WAVE={wave_size}", f"-I{simt}", f"-I{kernels}", *flags,
        str(simt / source), "-o", str(to),
    ])  # fmt: skip
    return to


def with_fault(before: str, after: str, folder: Path) -> Path:
    """A copy of the kernels' sources in `folder`, `after` in place of `before`. LookupError, which no test takes for
    a fault that was noticed, where that stands nowhere."""
    kernels = folder / "kernels"
    shutil.copytree(KERNELS, kernels)
    changed = 0
    for path in kernels.iterdir():
        text = path.read_text()
        changed += text.count(before)
        path.write_text(text.replace(before, after))
    if not changed:
        raise LookupError(f"{before!r} is not in the sources")
    return kernels


def load(wave_size: int, folder: Path, kernels: Path = KERNELS) -> HostKernels:
    """The kernels as functions in this process."""
    library = folder / f"wave{wave_size}.so"
    compile_for("linear_ce_rows.cpp", wave_size, library, kernels, "-shared", "-fPIC")
    return HostKernels(ctypes.CDLL(str(library)))
