"""Bad values found on the device, reported without a sync.

A kernel cannot raise. So what it must not accept (a label outside the vocabulary, an expert id outside the experts) is
searched on the device, and the first bad row and value are copied into pinned host memory, asynchronously. The host
looks there, without waiting, at the start of every later call, and `check_flags()` waits and looks. Meanwhile the row's
results are NaN, so nothing plausible comes out of it. On the CPU the error is raised at once.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_NOTHING = -1  # the row number while no bad value was seen
Search = Callable[[Tensor, int, int | None, Tensor], None]


@dataclass(frozen=True)
class _Mailbox:
    """Two int64 words, row and value, on the device (the first report stays) and their copy in pinned host memory."""

    device: Tensor
    host: Tensor

    def clear(self) -> None:
        # Waits, so that no copy that is still under way brings the old report back. Only on the way to an exception.
        torch.cuda.synchronize(self.device.device)
        self.device.fill_(_NOTHING)
        self.host.fill_(_NOTHING)


_mailboxes: dict[tuple[str, str, int, torch.device], _Mailbox] = {}
_lock = threading.Lock()


def _mailbox(op: str, argument: str, size: int, device: torch.device) -> _Mailbox:
    with _lock:
        key = (op, argument, size, device)
        if key not in _mailboxes:
            _mailboxes[key] = _Mailbox(
                torch.full((2,), _NOTHING, dtype=torch.int64, device=device),
                torch.full((2,), _NOTHING, dtype=torch.int64, pin_memory=True),
            )
        return _mailboxes[key]


def _error(op: str, argument: str, size: int, row: int, value: int) -> ValueError:
    return ValueError(f"fusedce.{op}: argument '{argument}' has the value {value} at row {row}; expected [0, {size})")


def raise_pending() -> None:
    """ValueError for a bad value that an earlier call on a GPU has reported by now. Never waits for the GPU."""
    with _lock:
        mailboxes = list(_mailboxes.items())
    for (op, argument, size, _), box in mailboxes:
        if int(box.host[0]) != _NOTHING:
            row, value = box.host.tolist()
            box.clear()
            raise _error(op, argument, size, row, value)


def check_flags() -> None:
    """Wait for the GPU, then raise ValueError if any call so far was given a label or expert id out of range.

    The host sync is the point of it: call it where you sync anyway, for example after `loss.item()`. RuntimeError while
    a CUDA graph is captured, before anything that would spoil the capture.
    """
    if torch.cuda.is_initialized():
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "fusedce.check_flags, as check='sync', waits for the GPU, which cannot be captured in a CUDA graph"
            )
        torch.cuda.synchronize()
    raise_pending()


def report_outside(
    search: Search, op: str, argument: str, values: Tensor, size: int, ignore: int | None = None
) -> None:
    """Report the first row of `values` (N,) int64 that is neither in [0, size) nor `ignore`.

    search: a backend's `first_outside`. CPU: raises ValueError. GPU: no sync; a report for `raise_pending`.
    """
    if values.shape[0] == 0:
        return
    if values.device.type == "cpu":
        seen = torch.full((2,), _NOTHING)
        search(values, size, ignore, seen)
        row, value = seen.tolist()
        if row != _NOTHING:
            raise _error(op, argument, size, row, value)
        return
    box = _mailbox(op, argument, size, values.device)
    search(values, size, ignore, box.device)
    box.host.copy_(box.device, non_blocking=True)
