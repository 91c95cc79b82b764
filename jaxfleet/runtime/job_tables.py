"""What all trainers do together with whole tables: trainer 0 asks the servers, the others wait."""

from collections.abc import Callable
from pathlib import Path

from jaxfleet.checkpoint.tables import export_arrays, export_text
from jaxfleet.errors import JaxfleetError
from jaxfleet.ps.client import Client
from jaxfleet.ps.tables import RemoteTables
from jaxfleet.runtime.job_saving import agree
from jaxfleet.tables.live import LiveTable


def shrink_table(client: Client, tables: RemoteTables, table: str, what: str) -> int:
    """Has servers take out the rows that a table's evictions say; returns how many.

    Args:
        client: the lines to the servers.
        tables: theirs.
        table: which.
        what: all do, in words that no other time has at this step.

    Raises:
        ProgramError: there is no such table.
        PeerLostError: a server, or another trainer, went or takes too long.
    """
    tables.live(table)  # there is one, or else all trainers say that there is none
    return _together(client, what, lambda: tables.shrink(table))


def export_table(
    client: Client, tables: RemoteTables, table: str, folder: str | Path, what: str, *, text: bool
) -> int:
    """Writes a table into a new folder, as `exported`; returns how many rows.

    Args:
        client: the lines to the servers.
        tables: theirs.
        table: which.
        folder: where to.
        what: all do, in words that no other time has at this step.
        text: in lines.

    Raises:
        CheckpointError: the folder is there already, or cannot be written.
        ProgramError: there is no such table.
        PeerLostError: a server, or another trainer, went or takes too long.
    """
    live = tables.live(table)
    return _together(client, what, lambda: exported(live, folder, text=text))


def exported(table: LiveTable, folder: str | Path, *, text: bool) -> int:
    """Writes a table into a new folder: `keys.npy` and `rows.npy`, or lines of text."""
    path = Path(folder).absolute()
    return export_text(table, path) if text else export_arrays(table, path)


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
