"""Whole-table operations of trainers: trainer 0 sends requests to servers, the others wait."""

from collections.abc import Callable
from pathlib import Path

from jaxfleet.checkpoint.tables.saved_tables import exported
from jaxfleet.errors import JaxfleetError
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.remote_tables import RemoteTables
from jaxfleet.runtime.pserver_checkpoint import agree


def shrink_table(client: Client, tables: RemoteTables, table: str, what: str) -> int:
    """Lets servers evict rows by a table's rules; returns their number.

    `what` names the operation, uniquely at this step.

    Raises:
        ProgramError: there is no such table.
        PeerLostError: a server, or another trainer, is gone or late.
    """
    tables.live(table)  # fails on all trainers alike if there is no such table
    return _together(client, what, lambda: tables.shrink(table))


def export_table(
    client: Client, tables: RemoteTables, table: str, folder: str | Path, what: str, *, text: bool
) -> int:
    """Exports a table into a new folder, as `exported`; returns the number of rows.

    `what` names the operation, uniquely at this step.

    Raises:
        CheckpointError: the folder exists already, or cannot be written.
        ProgramError: there is no such table.
        PeerLostError: a server, or another trainer, is gone or late.
    """
    live = tables.live(table)
    return _together(client, what, lambda: exported(live, folder, text=text))


def _together(client: Client, what: str, work: Callable[[], int]) -> int:
    client.doing(what)
    error: JaxfleetError | None = None
    count = 0
    if client.me.trainer == 0:
        try:
            count = work()
        except JaxfleetError as found:
            error = found
    return agree(client, what, error, count)
