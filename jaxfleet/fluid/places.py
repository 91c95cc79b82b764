"""Places: what scripts name devices by."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CPUPlace:
    """The processor."""


@dataclass(frozen=True)
class CUDAPlace:
    """A GPU.

    Attributes:
        id: its number.
    """

    id: int = 0
