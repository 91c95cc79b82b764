"""Row tables on servers, as a trainer accesses and administers them."""

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.pending_request import PendingRequest
from jaxfleet.tables import RowBatch, TableSpec
from jaxfleet.tables.access import LiveTable, RowReader, TableAccess, unknown_table
from jaxfleet.tables.buckets import buckets_of, server_of
from jaxfleet.tables.eviction import no_scores
from jaxfleet.transport.buffers import BufferPool
from jaxfleet.transport.messages import Kind, Plain, Tensor

_OF_ONE = "longest_pause_s"  # maximum over servers; all others are summed


@dataclass(frozen=True, eq=False)
class KeyPartition:
    """A partition of keys among servers.

    Attributes:
        parts: by server, its keys in the given order, possibly none.
        places: by server, the indices of its keys; None if one server has them all.
    """

    keys: np.ndarray
    parts: tuple[np.ndarray, ...]
    places: tuple[np.ndarray, ...] | None

    @classmethod
    def of(cls, keys: np.ndarray, servers: int) -> "KeyPartition":
        if servers == 1:
            return cls(keys, (keys,), None)
        owners = server_of(keys, servers).astype(np.uint16)  # uint16 is sorted by radix
        order = np.argsort(owners, kind="stable")
        ends = np.cumsum(np.bincount(owners, minlength=servers))[:-1]
        places = tuple(np.split(order, ends))
        return cls(keys, tuple(keys[place] for place in places), places)

    def cut(self, rows: np.ndarray) -> list[np.ndarray]:
        """Splits rows in the order of the keys by server."""
        return [rows] if self.places is None else [rows[place] for place in self.places]


class RemoteTables(TableAccess, RowReader):
    """The tables of a job, stored on servers.

    Look-ups are numbered, answered once the previous step is applied, and repeated to a restarted
    server; pushes are kept for replay.
    """

    def __init__(self, client: Client, specs: Iterable[TableSpec]) -> None:
        self._client = client
        self._specs = {spec.name: spec for spec in specs}
        self._dims = {name: spec.dim for name, spec in self._specs.items()}
        self._shares: dict[str, KeyPartition] = {}  # of the last look-up
        self._pushed: dict[str, tuple[int, int]] = {}  # at which `_now`
        self._buffers = BufferPool()

    @property
    def trainers(self) -> int:
        return self._client.me.trainers

    def repeats_a_message(self) -> bool:
        """Whether a message of a former process, with several steps, ended with this step."""
        return self._client.repeats_a_message()

    def look_up_all(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns rows of several tables as of the previous step, requested together.

        Raises:
            ProgramError: there is no such table, or the keys are invalid.
            PeerLostError: a server, or a trainer that it waits for, left or timed out.
        """
        asked = {}
        for table, of_table in keys.items():
            shares = self._shares[table] = self._divide(table, of_table)
            asked[table] = self._ask({"table": table}, shares)
        self._client.wait([request for requests in asked.values() for request in requests])
        return {table: self._joined(table, self._shares[table], x) for table, x in asked.items()}

    def peek(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns rows, and leaves the servers' tables as they are; raises as `look_up_all`."""
        shares = self._divide(table, keys)
        asked = self._ask({"table": table, "peek": True}, shares)
        self._client.wait(asked)
        return self._joined(table, shares, asked)

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
        """Sends gradients of the current step; each table gets one push per step, possibly empty.

        Otherwise as `TableAccess.push`. No array may change afterwards. A `learning_rate` overrides
        the optimizer's; the first trainer's applies.

        Raises:
            ProgramError: there is no such table, the arrays do not fit it, or it had its push.
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
        """Sends changes of rows, which are added without the optimizer; otherwise as `push`."""
        body: dict[str, Plain] = {"table": table, "deltas": True}
        self._send(body, table, keys, {"grads": deltas} | _given(shows, clicks))

    def shrink(self, table: str, token: str | None = None) -> int:
        """Removes the rows that a table's evictions select, on all servers; returns their number.

        A `token` identifies the operation: it is not executed a second time. One trainer requests
        it while the others wait; in `step.shrink` it is the first.
        """
        self._spec(table)
        return shrink(self._client, table, token=token)

    def live(self, table: str) -> LiveTable:
        """Returns the current table for export; servers return some rows at a time.

        One trainer reads it while the others wait; in `step.export` it is the first.
        """
        return LiveTable(self._spec(table), lambda: table_batches(self._client, table))

    def stats(self) -> dict[str, dict[str, Any]]:
        asked = _ask_all(self._client, Kind.STATS)
        return table_stats([request.answer.body for request in asked if request.answer is not None])

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
        """The current step, distinct from the same step before a checkpoint was restored."""
        return self._client.rewinds, self._client.step

    def _ask(self, body: Mapping[str, Plain], shares: KeyPartition) -> list[PendingRequest]:
        client, step = self._client, self._client.step
        if client.me.is_sync and (client.may_repeat() or self._may_be_interrupted):
            body = {**body, "again": True}
        if self._pushed.get(str(body["table"])) == self._now or self._was_made_before:
            step += 1  # after its own push, a look-up sees this step
        return [
            self._client.request(
                server,
                Kind.LOOK_UP,
                step=step,
                body=body,
                tensors=(Tensor("keys", part),),
            )
            for server, part in enumerate(shares.parts)
        ]

    @property
    def _may_be_interrupted(self) -> bool:
        """Whether servers may have updates of a step that a change of the members interrupted."""
        client = self._client
        return client.entered is not None and client.step <= client.entered + 1

    @property
    def _was_made_before(self) -> bool:
        """Whether this step was made, and pushed to all tables, before this client began."""
        client = self._client
        if client.step == client.entered:
            return True
        if client.former is None or client.rewinds:
            return False
        return client.former.has_not_begun_after(client.step)

    def _joined(
        self, table: str, shares: KeyPartition, requests: Iterable[PendingRequest]
    ) -> np.ndarray:
        found = [self._rows(table, request) for request in requests]
        if shares.places is None:
            return found[0]
        joined = self._buffers.take((len(shares.keys), self._dims[table]), np.dtype(np.float32))
        for place, rows in zip(shares.places, found, strict=True):
            joined[place] = rows
        return joined

    def _rows(self, table: str, request: PendingRequest) -> np.ndarray:
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

    def _divide(self, table: str, keys: np.ndarray) -> KeyPartition:
        self._spec(table)
        if keys.dtype != np.int64 or keys.ndim != 1:
            what = f"table '{table}': keys are {keys.dtype}{list(keys.shape)}, not int64[n]"
            raise ProgramError(what, hint="np.unique(ids) of int64 ids gives keys")
        return KeyPartition.of(np.ascontiguousarray(keys), len(self._client.me.endpoints))

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
    given = {"shows": shows, "clicks": clicks}
    return {name: np.asarray(x, np.float32) for name, x in given.items() if x is not None}


def shrink(client: Client, table: str, *, step: int | None = None, token: str | None = None) -> int:
    """Removes the rows that a table's evictions select, on all servers; returns their number.

    The request is repeated to a server that restarts, and executed once.

    Args:
        client: sends requests to the servers.
        table: name of the table.
        step: executed once this trainer's gradients up to this step are applied; the current step
            by default.
        token: identifies the operation, which servers do not repeat; a new one by default.

    Raises:
        PeerLostError: a server, or a trainer that it waits for, left or timed out.
    """
    return _shrink(client, {"table": table}, step, token)


def refill(client: Client, table: str, folder: str, *, step: int) -> int:
    """Replaces a table's rows on all servers by those of a checkpoint; otherwise as `shrink`.

    Args:
        client: sends the requests.
        table: name of the table.
        folder: the checkpoint's, accessible to all servers; empty for no rows.
        step: as `shrink`.

    Raises:
        ProgramError: a server cannot read it; other servers may have its rows already.
    """
    return _shrink(client, {"table": table, "refill": folder}, step)


def _shrink(
    client: Client, what: Mapping[str, Plain], step: int | None, token: str | None = None
) -> int:
    asked = _ask_all(client, Kind.SHRINK, {**what, "token": token or secrets.token_hex(8)}, step)
    return sum(_number(client, request, "rows") for request in asked)


def _ask_all(
    client: Client, kind: Kind, body: Mapping[str, Plain] | None = None, step: int | None = None
) -> list[PendingRequest]:
    servers = range(len(client.me.endpoints))
    asked = [client.request(server, kind, step=step, body=body) for server in servers]
    client.wait(asked)
    return asked


def table_batches(client: Client, table: str) -> Iterator[RowBatch]:
    """Yields the keys and rows of a table by bucket and key, some buckets of a server at a time."""
    for server in range(len(client.me.endpoints)):
        first = buckets_of(server, len(client.me.endpoints)).start
        while True:
            body: dict[str, Plain] = {"table": table, "first": first}
            request = client.request(server, Kind.EXPORT, body=body)
            client.wait([request])
            assert request.answer is not None
            if request.answer.body.get("next") is None:
                break
            keys, rows = (tensor.array for tensor in request.answer.tensors)
            yield RowBatch(keys, rows)
            first = _number(client, request, "next")


def table_stats(bodies: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Combines the servers' statistics of each table."""
    found: dict[str, dict[str, Any]] = {}
    for body in bodies:
        for table, counted in body.get("tables", {}).items():
            total = found.setdefault(table, {})
            for name, value in counted.items():
                before = total.get(name, 0)
                total[name] = max(before, value) if name == _OF_ONE else before + value
    return found


def _number(client: Client, request: PendingRequest, name: str) -> int:
    assert request.answer is not None
    value = request.answer.body.get(name)
    if isinstance(value, int):
        return value
    where, what = client.me.server_name(request.server), request.message.kind.value
    raise ProgramError(f"{where} answered a {what} without '{name}'")
