"""The merge of tile sums on CPU tensors, run on the host, and the matrix products before and after it by torch.

Every function has the arguments of the op of torch.ops.fusedce_native that bears its name.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.simt.host_kernels import KERNELS, compile_for
from tests.simt.host_seeded import VOCAB_TILE, pointers


class TileSums(ctypes.Structure):
    """`fusedce::TileSums`."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("max", "exp", "gap")), ("num_tiles", ctypes.c_int))


class SummedRows(ctypes.Structure):
    """`fusedce::SummedRows`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("target", "inv_temperature", "raw_target")),
        *((name, ctypes.c_int64) for name in ("num_rows", "ignore_index")),
    )


@dataclass(frozen=True)
class HostSums:
    """One build of the merge, for one number of lanes."""

    library: ctypes.CDLL

    def merged_sums(self, *arguments: object) -> None:
        """Fills logprob, entropy unless None, lse and normalizer."""
        target, slopes, ignore_index, maxima, exps, gaps, raw_target, *out = arguments
        tiles = TileSums(*(None if t is None else t.data_ptr() for t in (maxima, exps, gaps)), maxima.shape[0])
        rows = SummedRows(*(t.data_ptr() for t in (target, slopes, raw_target)), maxima.shape[1], ignore_index)
        function = self.library.merged_sums
        function.restype = ctypes.c_char_p
        error = function(ctypes.byref(tiles), ctypes.byref(rows), ctypes.byref(pointers(*out)))
        assert error is None, error.decode()


def load(wave_size: int, folder: Path, kernels: Path = KERNELS) -> HostSums:
    """The kernel as a function in this process."""
    library = folder / f"sums{wave_size}.so"
    compile_for("linear_ce_sums.cpp", wave_size, library, kernels, "-shared", "-fPIC")
    return HostSums(ctypes.CDLL(str(library)))


def raw_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float) -> tuple[Tensor, Tensor | float]:
    """Raw logits in fp32, and the softcap's slope."""
    x = hidden.float() @ weight.float().t()
    x = x if bias is None else x + bias
    if not softcap:
        return x, 1.0
    bent = torch.tanh(x / softcap)
    return softcap * bent, 1.0 - bent * bent


def logit_sums(*arguments: object) -> None:
    """What `launch_logit_sums` says, in fp32."""
    hidden, weight, bias, target, slopes, _, softcap, maxima, exps, gaps, raw_target = arguments
    raw, _ = raw_logits(hidden, weight, bias, softcap)
    is_target = torch.arange(weight.shape[0]) == target[:, None]
    raw_target.copy_(torch.where(is_target.any(1), torch.where(is_target, raw, 0.0).sum(1), raw_target))
    others = raw.masked_fill(is_target, -torch.inf)
    padding = maxima.shape[0] * VOCAB_TILE - raw.shape[1]
    tiles = torch.nn.functional.pad(others, (0, padding), value=-torch.inf).view(len(raw), -1, VOCAB_TILE)
    largest = tiles.amax(2, keepdim=True)
    gap = (tiles - torch.where(largest == -torch.inf, 0.0, largest)) * slopes[:, None, None]
    maxima.copy_(largest[:, :, 0].t())
    exps.copy_(gap.exp().sum(2).t())
    if gaps is not None:
        gaps.copy_((gap.exp() * gap.clamp(min=-200.0)).sum(2).t())


def logit_gradient(*arguments: object) -> None:
    """What `launch_logit_gradient` says, in fp32."""
    hidden, weight, bias, target, _, _, softcap, numbers, with_entropy, out = arguments
    raw, slope = raw_logits(hidden, weight, bias, softcap)
    slope2, shift, log_sum, on_probs, on_target, on_surprise, entropy, _ = numbers[:, :, None].unbind(1)
    log_p = (raw - shift) * slope2 - log_sum
    on_p = on_probs - on_surprise * (log_p.clamp(min=-200.0) + entropy) if with_entropy else on_probs
    is_target = torch.arange(weight.shape[0]) == target[:, None]
    out.copy_(torch.where(is_target, on_target, log_p.exp2() * on_p) * slope)
