"""Every op against its twin here: `check` compares, `tolerance` is the one bar, `primitives` the problems."""

from fusedce.verify.check import Result, check_all

__all__ = ["Result", "check_all"]
