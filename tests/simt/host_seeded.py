"""The row kernels of the seeded exponentials on CPU tensors, run on the host, and Hopper's matrix products by torch.

Every function has the arguments of the op of torch.ops.fusedce_native that bears its name.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.simt.host_kernels import KERNELS, compile_for

VOCAB_TILE = 256
Chunk = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, int, float]


class SeededChunk(ctypes.Structure):
    """`fusedce::SeededChunk`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "weight", "bias", "target", "inv_temperature")),
        *((name, ctypes.c_int64) for name in ("num_rows", "hidden_stride", "weight_stride", "ignore_index")),
        *((name, ctypes.c_int) for name in ("vocab", "depth")),
        ("softcap", ctypes.c_float),
    )


class Exponentials(ctypes.Structure):
    """`fusedce::Exponentials`."""

    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


def chunk_for_c(chunk: Chunk) -> SeededChunk:
    """The struct that the launchers take. It holds addresses: the tensors must outlive it."""
    hidden, weight, bias, target, inv_temperature, ignore_index, softcap = chunk
    return SeededChunk(
        *(None if t is None else t.data_ptr() for t in (hidden, weight, bias, target, inv_temperature)),
        hidden.shape[0], hidden.stride(0), weight.stride(0), ignore_index, *weight.shape, softcap,
    )  # fmt: skip


def pointers(*tensors: Tensor | None) -> ctypes.Array[ctypes.c_void_p]:
    """A struct of pointers; nullptr for None."""
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


@dataclass(frozen=True)
class HostRows:
    """One build of the row kernels, for one number of lanes."""

    library: ctypes.CDLL

    def target_logits(self, *arguments: object) -> None:
        """Fills raw_target and seed."""
        *chunk, raw_target, seed = arguments
        self._call("target_logits", chunk, pointers(raw_target, seed, None, None, None))

    def seeded_statistics(self, *arguments: object) -> None:
        """Fills rest, logprob and lse; seed and exponentials of rows to rescue."""
        *chunk, partial, raw_target, seed, exps, rest, logprob, lse = arguments
        rows = pointers(raw_target, seed, rest, logprob, lse)
        out = Exponentials(exps.data_ptr(), exps.stride(0))
        sums = ctypes.c_void_p(partial.data_ptr())
        self._call("seeded_statistics", chunk, rows, sums, partial.shape[0], ctypes.byref(out))

    def seeded_scale(self, *arguments: object) -> None:
        """Fills factor and the targets' exponentials; scales hidden."""
        *chunk, raw_target, seed, rest, d_logprob, d_lse, exps, factor = arguments
        rows = pointers(raw_target, seed, rest, None, None)
        out = Exponentials(exps.data_ptr(), exps.stride(0))
        upstream = pointers(d_logprob, d_lse, factor)
        self._call("seeded_scale", chunk, rows, ctypes.byref(upstream), ctypes.byref(out))

    def scaled(self, given: Tensor, scale: Tensor, out: Tensor) -> None:
        """Fills out."""
        function = self.library.scaled
        function.restype = ctypes.c_char_p
        given_at, scale_at, out_at = (ctypes.c_void_p(t.data_ptr()) for t in (given, scale, out))
        assert function(given_at, scale_at, out_at, ctypes.c_int64(given.numel())) is None

    def _call(self, name: str, chunk: list[object], rows: ctypes.Array[ctypes.c_void_p], *arguments: object) -> None:
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        error = function(ctypes.byref(chunk_for_c(tuple(chunk))), ctypes.byref(rows), *arguments)
        assert error is None, error.decode()


def load(wave_size: int, folder: Path, kernels: Path = KERNELS) -> HostRows:
    """The kernels as functions in this process."""
    library = folder / f"seeded{wave_size}.so"
    compile_for("linear_ce_seeded.cpp", wave_size, library, kernels, "-shared", "-fPIC")
    return HostRows(ctypes.CDLL(str(library)))


def seeded_exponentials(*arguments: object) -> None:
    """What `launch_seeded_exponentials` says, in fp32."""
    hidden, weight, bias, target, inv_temperature, _, softcap, seed, exps, partial = arguments
    x = hidden.float() @ weight.float().t()
    x = x if bias is None else x + bias
    bent = torch.tanh(x / softcap) if softcap else torch.zeros_like(x)
    e = (((softcap * bent if softcap else x) - seed[:, None]) * inv_temperature[:, None]).exp()
    e[torch.arange(weight.shape[0]) == target[:, None]] = 0.0
    tiles = torch.nn.functional.pad(e, (0, partial.shape[0] * VOCAB_TILE - e.shape[1]))
    partial.copy_(tiles.view(len(e), -1, VOCAB_TILE).sum(2).t())
    exps.copy_(e * (1.0 - bent * bent))


def d_hidden(d_logits: Tensor, weight: Tensor, factor: Tensor | None, out: Tensor) -> None:
    """What `launch_d_hidden` says, in fp32."""
    product = d_logits.float() @ weight.float()
    out.copy_(product if factor is None else product * factor[:, None])


def d_weight(d_logits: Tensor, hidden: Tensor, out: Tensor, accumulate: bool) -> None:
    """What `launch_d_weight` says, in fp32."""
    product = d_logits.float().t() @ hidden.float()
    out.copy_(out + product if accumulate else product)
