"""What this process would run and on what: `facts` are values, `settings` the known traps, `examine` the findings."""

from fusedce.doctor.examine import Line, examine, exit_code

__all__ = ["Line", "examine", "exit_code"]
