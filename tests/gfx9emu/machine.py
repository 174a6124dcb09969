"""What instructions reach beside their own registers: the memories of one launch."""

from dataclasses import dataclass

import numpy as np

from tests.gfx9emu.front import Front
from tests.gfx9emu.memory import LDS, MOST_AGENTS, Memory


@dataclass
class Machine:
    """One launch's surroundings. Instructions are bound to it once, and it is filled anew for each launch.

    memory: of the launch; lds: of the workgroups that run side by side; first_group: the number of the first of them.
    """

    memory: Memory
    lds: LDS
    first_group: int = 0

    def agents(self, w: Front) -> np.ndarray:
        """What `Conflicts` calls the workgroup of each wave. Two that are 254 apart bear the same name."""
        return (w.group + self.first_group) % MOST_AGENTS + 1
