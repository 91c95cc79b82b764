"""Which server gets which block: RoundRobin, HashName, and scripts' own dispatchers."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.analysis.placing import stable_hash


class PSDispatcher:
    """Chooses servers for blocks.

    Args:
        pserver_endpoints: `host:port` of every server.
    """

    def __init__(self, pserver_endpoints: Sequence[str]) -> None:
        self._eps = list(pserver_endpoints)
        self._step = 0

    @property
    def eps(self) -> list[str]:
        """The servers."""
        return self._eps

    def reset(self) -> None:
        """Begins anew, with the first server."""
        self._step = 0

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        """Returns a server for each of some blocks.

        Args:
            varlist: each has a `name`.

        Raises:
            NotImplementedError: a subclass says how.
        """
        del varlist
        raise NotImplementedError(f"{type(self).__name__} does not say which server gets a block")


class RoundRobin(PSDispatcher):
    """Takes the servers in turn, and goes on where it stopped."""

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        found = []
        for _ in varlist:
            found.append(self._eps[self._step])
            self._step = (self._step + 1) % len(self._eps)
        return found


class HashName(PSDispatcher):
    """Goes by a block's name, so that it stays where it is whatever else there is.

    Fluid took Python's own hash, which differs from process to process; this is the CRC-32.
    """

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        return [self._eps[stable_hash(var.name) % len(self._eps)] for var in varlist]
