"""The tables of a trainer's program: rows before its segments run, gradients when they are made."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxfleet.ir import Program
from jaxfleet.tables.access import TableAccess
from jaxfleet.tables.host import HostTables, Joined


class TrainerTables:
    """Does what a trainer's host has to do for tables.

    Args:
        program: as `sparse_table` wrote it.
        access: the tables.
    """

    def __init__(self, program: Program, access: TableAccess) -> None:
        self._host, self._access = HostTables.of(program), access
        self._tables = {each.gradient: each for each in self._host.lookups if each.gradient}
        self._joined = Joined({})

    def bring(self, data: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """Returns rows and indices by their variables, and a number for each letter of theirs."""
        arrays, sizes, self._joined = self._host.bring(self._access, data)
        self._host.hand_over_nothing(self._access)
        return arrays, sizes

    def push(self, name: str, gradient: np.ndarray) -> None:
        """Sends a gradient, by its variable."""
        self._host.hand_over(self._access, self._tables[name], self._joined, gradient)
