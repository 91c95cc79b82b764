"""Administration of whole tables on servers: shrink, refill, export and statistics."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxfleet.errors import ProgramError
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.pending_requests import PendingRequest
from jaxfleet.tables import RowBatch
from jaxfleet.tables.buckets import buckets_of
from jaxfleet.transport.messages import Kind, Plain

_OF_ONE = "longest_pause_s"  # maximum over servers; all others are summed


def shrink(client: Client, table: str, *, step: int | None = None) -> int:
    """Removes the rows that a table's evictions select, on all servers; returns their number.

    The request is repeated to a server that restarts, and executed once.

    Args:
        client: sends requests to the servers.
        table: name of the table.
        step: executed once this trainer's gradients up to this step are applied; the current step
            by default.

    Raises:
        PeerLostError: a server, or a trainer that it waits for, left or timed out.
    """
    body: dict[str, Plain] = {"table": table, "token": secrets.token_hex(8)}
    servers = _servers(client)
    asked = [client.request(server, Kind.SHRINK, step=step, body=body) for server in servers]
    client.wait(asked)
    return sum(_number(client, request, "rows") for request in asked)


def refill(client: Client, table: str, folder: str, *, step: int) -> int:
    """Replaces a table's rows on all servers by those of a checkpoint; returns the number removed.

    Args:
        client: sends requests to the servers.
        table: name of the table.
        folder: the checkpoint's, accessible to all servers; empty for no rows.
        step: executed once this trainer's gradients up to this step are applied.

    Raises:
        ProgramError: a server cannot read it; other servers may have its rows already.
        PeerLostError: a server, or a trainer that it waits for, left or timed out.
    """
    token = secrets.token_hex(8)
    body: dict[str, Plain] = {"table": table, "token": token, "refill": folder}
    servers = _servers(client)
    asked = [client.request(server, Kind.SHRINK, step=step, body=body) for server in servers]
    client.wait(asked)
    return sum(_number(client, request, "rows") for request in asked)


def table_batches(client: Client, table: str) -> Iterator[RowBatch]:
    """Yields the keys and rows of a table by bucket and key, some buckets of a server at a time."""
    for server in _servers(client):
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


def _servers(client: Client) -> range:
    return range(len(client.me.endpoints))


def _number(client: Client, request: PendingRequest, name: str) -> int:
    assert request.answer is not None
    value = request.answer.body.get(name)
    if isinstance(value, int):
        return value
    where, what = client.me.server_name(request.server), request.message.kind.value
    raise ProgramError(f"{where} answered a {what} without '{name}'")
