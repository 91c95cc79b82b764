"""Slices of variables, and the dispatchers that assign them to parameter servers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxfleet.analysis.placement.policies import block_sizes, stable_hash
from jaxfleet.fluid.framework.variable import Variable


class PSDispatcher:
    """Assigns blocks to servers, given the `host:port` of every server."""

    def __init__(self, pserver_endpoints: Sequence[str]) -> None:
        self._eps = list(pserver_endpoints)
        self._step = 0

    @property
    def eps(self) -> list[str]:
        return self._eps

    def reset(self) -> None:
        """Restarts with the first server."""
        self._step = 0

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        """Returns a server for each block, an object with a `name`; subclasses implement it."""
        del varlist
        raise NotImplementedError(f"{type(self).__name__} does not say which server gets a block")


class RoundRobin(PSDispatcher):
    """Cycles through the servers across calls."""

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        found = []
        for _ in varlist:
            found.append(self._eps[self._step])
            self._step = (self._step + 1) % len(self._eps)
        return found


class HashName(PSDispatcher):
    """Assigns by a block's name, independently of other blocks.

    Fluid used Python's own hash, which differs from process to process; this is the CRC-32.
    """

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        return [self._eps[stable_hash(var.name) % len(self._eps)] for var in varlist]


@dataclass(frozen=True)
class VarBlock:
    """A block of a variable."""

    varname: str  # the variable's name
    offset: int  # the block's number among the variable's
    size: int  # the number of elements

    def __str__(self) -> str:
        return f"{self.varname}:{self.offset}:{self.size}"


def slice_variable(
    var_list: Sequence[Variable], slice_count: int, min_block_size: int
) -> list[str]:
    """Returns the blocks of variables, as `name:number:elements`.

    Rows are never cut. A variable has at most `slice_count` blocks, and fewer if these would have
    less than `min_block_size` elements, except for rounding.
    """
    return [
        str(VarBlock(var.name, index, size))
        for var in var_list
        for index, size in enumerate(block_sizes(var.shape, slice_count, min_block_size))
    ]


def same_or_split_var(p_name: str, var_name: str) -> bool:
    """Whether a name is that of a variable or of one of its blocks."""
    return p_name == var_name or p_name.startswith(var_name + ".block")
