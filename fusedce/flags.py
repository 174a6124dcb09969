"""Bad values found on the device, reported without a sync.

A kernel cannot raise. So what it must not accept (a label outside the vocabulary, an expert id outside the experts) is
searched on the device, and the first bad row and value are copied into pinned host memory, asynchronously. The host
looks there, without waiting, at the start of every later call, and `check_flags()` waits and looks. Meanwhile the row's
results are NaN, so nothing plausible comes out of it. On the CPU the error is raised at once.
"""

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

_NOTHING = -1  # the row number while no bad value was seen


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


def report_outside(op: str, argument: str, values: Tensor, size: int, ignore: int | None = None) -> None:
    """Report the first row of `values` (N,) int64 that is neither in [0, size) nor `ignore`.

    CPU: raises ValueError. GPU: no sync; a report for `raise_pending`. About ten launches on vectors of N.
    """
    bad = (values < 0) | (values >= size)
    if ignore is not None:
        bad &= values != ignore
    num_rows = values.shape[0]
    if values.device.type == "cpu":
        if bad.any():
            row = int(bad.to(torch.uint8).argmax())
            raise _error(op, argument, size, row, int(values[row]))
        return
    if num_rows == 0:
        return
    rows = torch.arange(num_rows, device=values.device)
    first = torch.where(bad, rows, num_rows).min()
    # gather, not values[first]: indexing by a tensor of no dimension reads it on the host
    value = values.gather(0, first.clamp(max=num_rows - 1).reshape(1))
    seen = torch.cat((torch.where(first == num_rows, _NOTHING, first).reshape(1), value))
    box = _mailbox(op, argument, size, values.device)
    box.device.copy_(torch.where(box.device[0] == _NOTHING, seen, box.device))
    box.host.copy_(box.device, non_blocking=True)
