"""What a process of a job is."""

from enum import IntEnum


class Role(IntEnum):
    """Holds what a process may be: fluid's numbers."""

    WORKER = 1
    SERVER = 2
