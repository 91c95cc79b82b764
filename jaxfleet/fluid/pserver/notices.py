"""Operators by which a trainer has saved what servers hold: `checkpoint_notify` and `recv_save`.

`checkpoint_notify` tells servers to write their rows of a distributed table, each its part, into
`<dir>/<table>`: a checkpoint, which is there once every server has written its part, not before.
Servers of other machines must see the same folder. `recv_save` brings the slices of a variable,
and writes it whole.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from jaxfleet.checkpoint import PartReceipt, commit, discard
from jaxfleet.errors import ProgramError, SavedError
from jaxfleet.fluid.array_files import arrays_writer, file_of, write_files
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.pserver.connections import Connection, Connections
from jaxfleet.fluid.pserver.served_values import pull_whole
from jaxfleet.ps.messages import Kind, Plain
from jaxfleet.ps.requests import Request

NOTIFY, RECEIVE_AND_SAVE = "checkpoint_notify", "recv_save"
NOTICES = frozenset({NOTIFY, RECEIVE_AND_SAVE})
TABLES = "__lookup_table__"  # fluid's folder of tables, in that of everything else


def is_notice(program: Program) -> bool:
    """Tells whether a program does nothing but have things saved."""
    ops = program.global_block().ops
    return bool(ops) and all(op.type in NOTICES for op in ops)


def run_notices(program: Program, mine: Connections) -> None:
    """Runs such a program.

    Raises:
        ProgramError: this process has not spoken with the servers, or they have no such table.
        CheckpointError: something cannot be written; what was there before is as it was.
        PeerLostError: a server went, or takes too long.
    """
    for op in program.global_block().ops:
        endpoints = op.attr("epmap" if op.type == NOTIFY else "endpoints")
        if not endpoints:
            continue  # as in fluid, whose loop over servers has none
        connection = mine.find(endpoints)
        if connection is None:
            what = (
                f"'{op.type}' is about {', '.join(endpoints)}, and nobody here has spoken with it"
            )
            hint = "run the trainer's startup program first, and this before exe.close()"
            raise ProgramError(what, hint=hint)
        if op.type == NOTIFY:
            _check_all(op, connection, endpoints)
            save_table(connection, op.attr("lookup_table"), Path(op.attr("dir")))
        else:
            _receive_and_save(op, connection)


def save_table(
    connection: Connection, table: str, folder: Path, *, step: int | None = None
) -> None:
    """Has servers write a distributed table, as it is after this trainer's last step.

    Args:
        connection: the trainer's lines.
        table: its name.
        folder: the table gets one in it.
        step: this trainer's last; the present one, unless given.

    Raises:
        ProgramError: servers have no such table.
        CheckpointError: a part cannot be written; an older save is as it was.
        PeerLostError: a server went, or takes too long.
    """
    connection.check()
    client, path = connection.client, file_of(folder, table).absolute()
    client.doing("saving")
    body: dict[str, Plain] = {"path": str(path), "tables": [table]}
    servers = range(len(client.me.endpoints))
    asked = [client.request(server, Kind.SAVE, step=step, body=body) for server in servers]
    try:
        client.wait(asked)
        commit(path, _receipts(asked), step=client.step if step is None else step)
    except BaseException:
        discard(path, _receipts(asked))
        raise


def _check_all(op: Operator, connection: Connection, endpoints: Sequence[str]) -> None:
    """Refuses to save what some servers have of a table alone: it could not be restored."""
    missing = [one for one in connection.client.me.endpoints if one not in endpoints]
    if missing:
        what = f"'{NOTIFY}' leaves out {', '.join(missing)}, which has rows of the table too"
        raise ProgramError(what, source=op.source, hint="give epmap all servers of the job")


def _receive_and_save(op: Operator, connection: Connection) -> None:
    path = Path(op.attr("file_path"))
    if path.exists() and not op.attr("overwrite"):
        raise SavedError(f"{path} is there, and recv_save shall not overwrite it")
    name, parts = (
        unquote(path.name),
        zip(op.attr("remote_varnames"), op.attr("endpoints"), strict=True),
    )
    whole = pull_whole(connection, {name: list(parts)})[name]
    if tuple(op.attr("shape")) not in {(), whole.shape}:
        what = f"'{name}' is {list(whole.shape)} on servers, and recv_save says {op.attr('shape')}"
        raise ProgramError(what, source=op.source)
    kept = whole.astype(np.float16) if op.attr("save_as_fp16") else whole
    write_files([(path, arrays_writer([(name, kept)]))])


def _receipts(asked: Iterable[Request]) -> list[PartReceipt]:
    """Returns what servers say that they wrote, of those that have answered."""
    said = [one.answer.body.get("receipt") for one in asked if one.answer is not None]
    return [PartReceipt.from_plain(plain) for plain in said if isinstance(plain, dict)]
