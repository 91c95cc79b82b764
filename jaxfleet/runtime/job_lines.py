"""A trainer's lines to its servers, from the first time that they are needed to the last."""

import atexit
import os
from collections.abc import Callable, Sequence

from jaxfleet.ps.client import Client
from jaxfleet.ps.tables import RemoteTables
from jaxfleet.runtime.pace import Pace
from jaxfleet.tables import TableSpec
from jaxfleet.tables.access import TableAccess


class JobLines:
    """The lines of one trainer, and the tables at their other ends.

    Args:
        connect: makes the lines.
        pace: begins when they are open, and has servers know all before they close.
        specs: what the tables are.

    Attributes:
        found: the step that servers were at when this trainer came; -1 before, or without a state.
    """

    def __init__(
        self, connect: Callable[[], Client], pace: Pace, specs: Sequence[TableSpec]
    ) -> None:
        self._connect, self._pace, self._specs = connect, pace, specs
        self._client: Client | None = None
        self._tables: RemoteTables | None = None
        self._trained: TableAccess | None = None
        self._process = -1  # whose the lines are: a fork has them in name only
        self.found = -1

    @property
    def client(self) -> Client:
        """The lines; opened when they are first needed."""
        if self._client is None:
            self._client = self._connect()
            self._process = os.getpid()
            atexit.register(self.close)  # a script that ends has no more gradients to send
            self.found = self._client.open()
            self._client.step = max(self.found, 0)
            self._pace.open(self._client)
        return self._client

    @property
    def tables(self) -> RemoteTables:
        """The job's tables, which servers have."""
        if self._tables is None:
            self._tables = RemoteTables(self.client, self._specs)
        return self._tables

    @property
    def trained(self) -> TableAccess:
        """What steps look rows up in, and train."""
        if self._trained is None:
            self._trained = self._pace.tables(self.tables, self._specs)
        return self._trained

    def close(self) -> None:
        """Has servers know all that this trainer did, and tells them that it is done."""
        client = self._own()
        if client is not None:
            try:
                self._pace.flush()
            finally:
                client.close()

    def abandon(self) -> None:
        """Goes without a word, as a trainer that failed."""
        client = self._own()
        if client is not None:
            client.abandon()

    def _own(self) -> Client | None:
        """Returns the lines if this process opened them; when it ends, it need not close them."""
        if self._client is None or self._process != os.getpid():
            return None
        atexit.unregister(self.close)
        return self._client
