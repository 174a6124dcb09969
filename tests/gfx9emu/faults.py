"""What the emulator refuses to go on after."""


class FaultError(Exception):
    """A wrong access, a race, a barrier that not all waves reach, or an instruction that the tables do not know."""
