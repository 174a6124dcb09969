"""What every op does about labels and expert ids that are none."""

from torch import Tensor

from fusedce import flags
from fusedce.ops import registry
from fusedce.ops.registry import Choice


def report_outside(
    choice: Choice, argument: str, values: Tensor, size: int, ignore: int | None = None, op: str = ""
) -> None:
    """Report the first row of `values` (N,) int64 that is neither in [0, size) nor `ignore`, found by the chosen
    backend. On a CPU that raises ValueError.

    op: its name in the message, where that is not the choice's.
    """
    search = registry.function(choice, "first_outside")
    flags.report_outside(search, op or choice.op, argument, values, size, ignore)
