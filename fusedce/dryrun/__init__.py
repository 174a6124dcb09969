"""Rank 0 of a plan on this machine, with fake tensors: nothing is computed or sent, and every byte is counted.

FSDP2 and recompute are torch's own, the model is that of `fusedce.train`, the ranks of the world are fakes, and torch's
memory tracker says what is alive. `measure` sets it beside what `fusedce.plan` predicts.
"""

from fusedce.dryrun.compare import measure
from fusedce.dryrun.tracked import Tracked, track

__all__ = ["Tracked", "measure", "track"]
