"""Tables on servers, as a trainer sees them: rows come from the servers that have their keys."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ps.buffers import Buffers
from jaxfleet.ps.client import Client
from jaxfleet.ps.messages import Kind, Plain, Tensor
from jaxfleet.ps.requests import Request
from jaxfleet.ps.whole_tables import figures, live_batches, shrink
from jaxfleet.tables import TableSpec
from jaxfleet.tables.access import unknown_table
from jaxfleet.tables.buckets import server_of
from jaxfleet.tables.eviction import no_scores
from jaxfleet.tables.live import LiveTable


@dataclass(frozen=True, eq=False)
class Shares:
    """How keys are divided among servers.

    Attributes:
        keys: as they were given.
        parts: by server, its keys in the order of all; maybe none.
        places: by server, where those stand among all keys; None where one server has them all.
    """

    keys: np.ndarray
    parts: tuple[np.ndarray, ...]
    places: tuple[np.ndarray, ...] | None

    @classmethod
    def of(cls, keys: np.ndarray, servers: int) -> "Shares":
        """Divides keys."""
        if servers == 1:
            return cls(keys, (keys,), None)
        owners = server_of(keys, servers).astype(np.uint16)  # whose sort is by digits
        order = np.argsort(owners, kind="stable")
        ends = np.cumsum(np.bincount(owners, minlength=servers))[:-1]
        places = tuple(np.split(order, ends))
        return cls(keys, tuple(keys[place] for place in places), places)

    def cut(self, rows: np.ndarray) -> list[np.ndarray]:
        """Returns each server's share of rows that stand as the keys do."""
        return [rows] if self.places is None else [rows[place] for place in self.places]


class RemoteTables:
    """The tables of a job, which servers have.

    It is `TableAccess` over a trainer's lines: look-ups are numbered, answered once the step before
    is applied, and asked again of a server that started again; pushes are kept for it.

    Args:
        client: the lines to the servers.
        specs: what the tables are.
    """

    def __init__(self, client: Client, specs: Iterable[TableSpec]) -> None:
        self._client = client
        self._specs = {spec.name: spec for spec in specs}
        self._dims = {name: spec.dim for name, spec in self._specs.items()}
        self._shares: dict[str, Shares] = {}  # of the last look-up
        self._pushed: dict[str, tuple[int, int]] = {}  # when, as `_now` says
        self._buffers = Buffers()

    @property
    def trainers(self) -> int:
        """How many trainers push."""
        return self._client.me.trainers

    def look_up(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns rows as the step before left them.

        Args:
            table: its name.
            keys: int64[n].

        Returns:
            float32[n, dim], in the order of the keys; maybe read-only.

        Raises:
            ProgramError: there is no such table, or these are no keys.
            PeerLostError: a server, or a trainer that it waits for, went or takes too long.
        """
        return self.look_up_all({table: keys})[table]

    def look_up_all(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns rows of several tables, asked for at once; otherwise as `look_up`.

        Args:
            keys: by table.
        """
        asked = {table: self._ask(table, of_table) for table, of_table in keys.items()}
        self._client.wait([request for requests in asked.values() for request in requests])
        return {table: self._joined(table, requests) for table, requests in asked.items()}

    def push(
        self,
        table: str,
        keys: np.ndarray,
        grads: np.ndarray,
        *,
        learning_rate: float | None = None,
        shows: np.ndarray | None = None,
        clicks: np.ndarray | None = None,
    ) -> None:
        """Sends gradients of the present step; each table gets one push a step, maybe an empty one.

        Args:
            table: its name.
            keys: int64[n], each once.
            grads: float32[n, dim]; neither may change afterwards.
            learning_rate: in the place of the optimizer's own; the first trainer's counts.
            shows: float32[n], how often each key was shown; for tables with `ByScore`.
            clicks: float32[n], how often it was clicked.

        Raises:
            ProgramError: there is no such table, the arrays are none of its, or it had its push.
        """
        body: dict[str, Plain] = {"table": table}
        if learning_rate is not None:
            body["learning_rate"] = float(learning_rate)
        self._send(body, table, keys, {"grads": grads} | _given(shows, clicks))

    def add(
        self,
        table: str,
        keys: np.ndarray,
        deltas: np.ndarray,
        *,
        shows: np.ndarray | None = None,
        clicks: np.ndarray | None = None,
    ) -> None:
        """Sends changes of rows, which are added whatever the optimizer; otherwise as `push`."""
        body: dict[str, Plain] = {"table": table, "deltas": True}
        self._send(body, table, keys, {"grads": deltas} | _given(shows, clicks))

    def shrink(self, table: str) -> int:
        """Takes out the rows that a table's evictions say, on all servers; returns how many.

        One trainer asks for it, while no other goes on; of `step.shrink` it is the first.

        Raises:
            ProgramError: there is no such table.
            PeerLostError: a server, or a trainer that it waits for, went or takes too long.
        """
        self._spec(table)
        return shrink(self._client, table)

    def live(self, table: str) -> LiveTable:
        """Returns a table as it is now, to be exported; servers give it some rows at a time.

        One trainer reads it, while no other goes on; of `step.export` it is the first.

        Raises:
            ProgramError: there is no such table.
        """
        return LiveTable(self._spec(table), lambda: live_batches(self._client, table))

    def stats(self) -> dict[str, dict[str, Any]]:
        """Returns what servers counted of each table, together."""
        servers = range(len(self._client.me.endpoints))
        asked = [self._client.request(server, Kind.STATS) for server in servers]
        self._client.wait(asked)
        return figures([request.answer.body for request in asked if request.answer is not None])

    def _spec(self, table: str) -> TableSpec:
        if (spec := self._specs.get(table)) is None:
            raise unknown_table(table, self._specs)
        return spec

    def _send(
        self,
        body: Mapping[str, Plain],
        table: str,
        keys: np.ndarray,
        arrays: Mapping[str, np.ndarray],
    ) -> None:
        self._check_push(table, keys, arrays)
        shares = self._shares.get(table)
        if shares is None or shares.keys is not keys:
            shares = self._divide(table, keys)
        cut = {name: shares.cut(array) for name, array in arrays.items()}
        for server, part in enumerate(shares.parts):
            tensors = [Tensor(name, parts[server]) for name, parts in cut.items()]
            self._client.push_rows(server, body, [Tensor("keys", part), *tensors])
        self._pushed[table] = self._now

    @property
    def _now(self) -> tuple[int, int]:
        """The present step, told from one of that number before a checkpoint was restored."""
        return self._client.rewinds, self._client.step

    def _ask(self, table: str, keys: np.ndarray) -> list[Request]:
        """Asks all servers that have some of the keys; returns a request for each server."""
        shares = self._shares[table] = self._divide(table, keys)
        step = self._client.step
        if self._pushed.get(table) == self._now:
            step += 1  # it sees what this step pushes, then
        return [
            self._client.request(
                server,
                Kind.LOOK_UP,
                step=step,
                body={"table": table},
                tensors=(Tensor("keys", part),),
            )
            for server, part in enumerate(shares.parts)
        ]

    def _joined(self, table: str, requests: Iterable[Request]) -> np.ndarray:
        """Returns what servers answered, in the order of the keys."""
        shares = self._shares[table]
        found = [self._rows(table, request) for request in requests]
        if shares.places is None:
            return found[0]
        joined = self._buffers.take((len(shares.keys), self._dims[table]), np.dtype(np.float32))
        for place, rows in zip(shares.places, found, strict=True):
            joined[place] = rows
        return joined

    def _rows(self, table: str, request: Request) -> np.ndarray:
        assert request.answer is not None
        tensors, asked = request.answer.tensors, request.message.tensors[0].array
        wanted = (len(asked), self._dims[table])
        if len(tensors) == 1 and tensors[0].array.dtype == np.float32:
            rows = tensors[0].array
            if rows.shape == wanted:
                return rows
        server = self._client.me.server_name(request.server)
        raise ProgramError(
            f"table '{table}': {server} answered by no rows of float32{list(wanted)}"
        )

    def _divide(self, table: str, keys: np.ndarray) -> Shares:
        self._spec(table)
        if keys.dtype != np.int64 or keys.ndim != 1:
            what = f"table '{table}': keys are {keys.dtype}{list(keys.shape)}, not int64[n]"
            raise ProgramError(what, hint="np.unique(ids) of int64 ids gives keys")
        return Shares.of(np.ascontiguousarray(keys), len(self._client.me.endpoints))

    def _check_push(self, table: str, keys: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        wanted, grads = (len(keys), self._dims.get(table, 0)), arrays["grads"]
        if table in self._dims and (grads.dtype != np.float32 or grads.shape != wanted):
            found = f"{grads.dtype}{list(grads.shape)}"
            raise ProgramError(f"table '{table}': gradients are {found}, not float32{list(wanted)}")
        for name in arrays.keys() - {"grads"}:
            if not self._spec(table).has_scores:
                raise no_scores(table)
            if arrays[name].shape != keys.shape:
                found = f"{name} are {list(arrays[name].shape)} for {len(keys)} keys"
                raise ProgramError(f"table '{table}': {found}")
        if self._pushed.get(table) == self._now:
            what = f"table '{table}' was pushed to at step {self._client.step} already"
            raise ProgramError(what, hint="push the keys of all its look-ups in a step at once")


def _given(shows: np.ndarray | None, clicks: np.ndarray | None) -> dict[str, np.ndarray]:
    """Returns the scores that there are, by the names that they travel under."""
    given = {"shows": shows, "clicks": clicks}
    return {name: np.asarray(x, np.float32) for name, x in given.items() if x is not None}
