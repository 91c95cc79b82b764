"""What a trainer asks of whole tables on servers: that rows go, figures, all rows."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxfleet.errors import ProgramError
from jaxfleet.ps.client import Client
from jaxfleet.ps.messages import Kind, Plain
from jaxfleet.ps.requests import Request
from jaxfleet.tables import RowBatch
from jaxfleet.tables.buckets import buckets_of

_OF_ONE = "longest_pause_s"  # of the server that had it; all else is added up


def shrink(client: Client, table: str, *, step: int | None = None) -> int:
    """Has all servers take out the rows that a table's evictions say; returns how many.

    A server that starts again meanwhile is asked again, and does it once.

    Args:
        client: the lines to the servers.
        table: its name.
        step: done once this trainer's gradients up to this step are applied; the present one,
            unless given.

    Raises:
        PeerLostError: a server, or a trainer that it waits for, went or takes too long.
    """
    body: dict[str, Plain] = {"table": table, "token": secrets.token_hex(8)}
    servers = _servers(client)
    asked = [client.request(server, Kind.SHRINK, step=step, body=body) for server in servers]
    client.wait(asked)
    return sum(_number(client, request, "rows") for request in asked)


def refill(client: Client, table: str, folder: str, *, step: int) -> int:
    """Has all servers take a checkpoint's rows in the place of a table's; returns how many went.

    Args:
        client: the lines to the servers.
        table: its name.
        folder: the checkpoint's, which all servers see; empty for no rows.
        step: done once this trainer's gradients up to this step are applied.

    Raises:
        ProgramError: a server cannot read it; those that could have its rows.
        PeerLostError: a server, or a trainer that it waits for, went or takes too long.
    """
    token = secrets.token_hex(8)
    body: dict[str, Plain] = {"table": table, "token": token, "refill": folder}
    servers = _servers(client)
    asked = [client.request(server, Kind.SHRINK, step=step, body=body) for server in servers]
    client.wait(asked)
    return sum(_number(client, request, "rows") for request in asked)


def live_batches(client: Client, table: str) -> Iterator[RowBatch]:
    """Yields the keys and rows of a table by bucket and key, some buckets of a server at a time.

    Raises:
        PeerLostError: a server, or a trainer that it waits for, went or takes too long.
    """
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


def figures(bodies: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns what servers counted of each table, together.

    Args:
        bodies: what each answered to a request for its figures.
    """
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


def _number(client: Client, request: Request, name: str) -> int:
    assert request.answer is not None
    value = request.answer.body.get(name)
    if isinstance(value, int):
        return value
    where, what = client.me.server_name(request.server), request.message.kind.value
    raise ProgramError(f"{where} answered a {what} without '{name}'")
