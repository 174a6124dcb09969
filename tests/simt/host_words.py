"""The kernels of single words on CPU tensors, run on the host.

Every function has the arguments of the op of torch.ops.fusedce_native that bears its name.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.simt.host_kernels import DTYPES, KERNELS, compile_for
from tests.simt.host_seeded import pointers


class WordRows(ctypes.Structure):
    """`fusedce::WordRows`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "bias")),
        *((name, ctypes.c_int64) for name in ("num_rows", "row_stride")),
        ("vocab", ctypes.c_int),
    )

    @classmethod
    def of(cls, logits: Tensor, bias: Tensor | None) -> "WordRows":
        """It holds addresses: the tensors must outlive it."""
        address = None if bias is None else bias.data_ptr()
        return cls(logits.data_ptr(), address, logits.shape[0], logits.stride(0), logits.shape[1])


class Slots(ctypes.Structure):
    """`fusedce::Slots`."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("ignore_index", ctypes.c_int64),
        ("num_slots", ctypes.c_int),
        ("softcap", ctypes.c_float),
    )


@dataclass(frozen=True)
class HostWords:
    """One build, for one number of lanes."""

    library: ctypes.CDLL

    def argmax_rows(self, logits: Tensor, bias: Tensor | None, words: Tensor) -> None:
        """Fills words (N,)."""
        self._call("argmax_rows", WordRows.of(logits, bias), pointers(words))

    def selected_logits(self, *arguments: object) -> None:
        """Fills raw (N,K)."""
        logits, bias, ids, ignore_index, softcap, raw = arguments
        slots = Slots(ids.data_ptr(), ignore_index, ids.shape[1], softcap)
        self._call("selected_logits", WordRows.of(logits, bias), slots, pointers(raw))

    def selected_gradient(self, *arguments: object) -> None:
        """Writes the slots' entries into out (N,V)."""
        logits, bias, ids, ignore_index, softcap, *gradients, out = arguments
        slots, given = Slots(ids.data_ptr(), ignore_index, ids.shape[1], softcap), ctypes.byref(pointers(*gradients))
        rest = ctypes.c_void_p(out.data_ptr()), DTYPES.index(out.dtype), ctypes.c_int64(out.stride(0))
        self._call("selected_gradient", WordRows.of(logits, bias), slots, None, (given, *rest))

    def _call(self, name: str, rows: WordRows, *others: object) -> None:
        *structs, last = others
        given = [ctypes.byref(s) for s in (rows, *structs) if s is not None]
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        error = function(*given, *(last if isinstance(last, tuple) else (ctypes.c_void_p(last[0]),)))
        assert error is None, error.decode()


def load(wave_size: int, folder: Path, kernels: Path = KERNELS) -> HostWords:
    """The kernels as functions in this process."""
    library = folder / f"words{wave_size}.so"
    compile_for("linear_ce_words.cpp", wave_size, library, kernels, "-shared", "-fPIC")
    return HostWords(ctypes.CDLL(str(library)))


def slopes_of(logits: Tensor, bias: Tensor | None, softcap: float) -> tuple[Tensor, Tensor]:
    """Raw logits and the softcap's slope, by torch in the logits' dtype."""
    x = logits if bias is None else logits + bias.to(logits.dtype)
    if not softcap:
        return x, torch.ones_like(x)
    bent = torch.tanh(x / softcap)
    return softcap * bent, 1.0 - bent * bent
