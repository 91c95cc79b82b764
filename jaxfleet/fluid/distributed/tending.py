"""What all workers of a Downpour job do together with its tables, between two batches.

All call the same; they meet, the first does it, and all go on when it is done, or all raise.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxfleet.errors import CheckpointError, JaxfleetError
from jaxfleet.fluid.array_files import file_of
from jaxfleet.fluid.distributed.remote import ServedTables
from jaxfleet.fluid.pserver.connections import Connection
from jaxfleet.fluid.pserver.notices import save_table
from jaxfleet.ps.messages import Kind, Plain, Tensor
from jaxfleet.ps.whole_tables import refill, shrink


class Tending:
    """Saves, loads, empties and shrinks the tables of a job, from a worker.

    Args:
        connection: the worker's lines.
        tables: what it sees of the servers' tables.
    """

    def __init__(self, connection: Connection, tables: ServedTables) -> None:
        self._connection, self.tables = connection, tables
        self._times = 0

    def save(self, folder: Path, names: Iterable[str] | None = None) -> None:
        """Has servers write tables, a checkpoint each; all of them, unless names are given.

        Raises:
            CheckpointError: one cannot be written; what was there before is as it was.
        """
        wanted = self._wanted(names)

        def work(_: int) -> int:
            for name in wanted:
                save_table(self._connection, name, folder, step=self._done)
            return len(wanted)

        self._together(f"save {folder}", work)

    def load(self, folder: Path, names: Iterable[str] | None = None) -> None:
        """Has servers take tables from what was saved, in the place of their own rows.

        Raises:
            CheckpointError: one is not there, is damaged, or is another kind of table.
        """
        places = {name: str(file_of(folder, name).absolute()) for name in self._wanted(names)}
        self._refill(f"load {folder}", places)

    def clear(self, names: Iterable[str] | None = None) -> int:
        """Takes all rows out of tables; returns how many."""
        return self._refill("clear tables", dict.fromkeys(self._wanted(names), ""))

    def shrink(self, names: Iterable[str]) -> int:
        """Takes the rows out that evictions say; returns how many."""
        wanted, client = self._wanted(names), self._connection.client

        def work(step: int) -> int:
            return sum(shrink(client, name, step=step) for name in wanted)

        return self._together("shrink tables", work)

    def meet(self, what: str) -> None:
        """Waits until all workers are here."""
        self._together(what, lambda _: 0)

    def _refill(self, what: str, places: dict[str, str]) -> int:
        client = self._connection.client

        def work(step: int) -> int:
            for place in filter(None, places.values()):
                if not Path(place).is_dir():
                    raise CheckpointError(f"{place} is not there", hint="save the model first")
            return sum(refill(client, name, at, step=step) for name, at in places.items())

        count = self._together(what, work)
        self.tables.forget()
        return count

    def _wanted(self, names: Iterable[str] | None) -> Sequence[str]:
        self._connection.check()
        self.tables.begin()
        return self.tables.names if names is None else tuple(names)

    @property
    def _done(self) -> int:
        """The last of this worker's steps."""
        return self._connection.client.step - 1

    def _together(self, what: str, work: Callable[[int], int]) -> int:
        """Has the first worker do something while all wait; returns what it returns, to all.

        Args:
            what: it is.
            work: it; is given the step that all workers have done.
        """
        client = self._connection.client
        client.doing(what)
        self.tables.begin()
        self.tables.settle()
        self._times += 1
        slowest = -self._greatest(f"begin to {what}", [-self._done])[0]
        error: JaxfleetError | None = None
        count = 0
        if client.me.trainer == 0:
            try:
                count = work(slowest)
            except JaxfleetError as found:
                error = found
        failed, found_of_first = self._greatest(what, [int(error is not None), count])
        if error is not None:
            raise error
        if failed:
            raise CheckpointError(f"trainer 0 could not {what}", hint="its own error says why")
        return found_of_first

    def _greatest(self, what: str, told: Sequence[int]) -> list[int]:
        """Returns the greatest of each number that any worker tells."""
        came: list[int] = []

        def take(answer: Sequence[Tensor]) -> None:
            came.extend(int(value) for tensor in answer for value in tensor.array)

        client = self._connection.client
        body: dict[str, Plain] = {"key": f"{self._times}: {what}", "how": "max"}
        tensors = [Tensor("told", np.asarray(told, np.int64))]
        more: dict[str, Any] = {"tensors": tensors, "wants": ["told"], "sink": take}
        # Workers may be at different steps; they meet for the same time.
        client.wait([client.request(0, Kind.REDUCE, step=self._times, body=body, **more)])
        return came
