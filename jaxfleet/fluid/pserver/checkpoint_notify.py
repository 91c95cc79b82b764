"""Operators that make servers save: `checkpoint_notify` and `recv_save`.

`checkpoint_notify` makes servers write their rows of a distributed table to `<dir>/<table>`, a
checkpoint that becomes visible once every server has written its part. Servers on other machines
must see the same folder. `recv_save` receives the slices of a variable, and writes it whole.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from jaxfleet.checkpoint import PartReceipt, commit, discard
from jaxfleet.errors import ProgramError, SavedError
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.npz_files import arrays_writer, file_of, write_files
from jaxfleet.fluid.pserver.connections import Connection, Connections
from jaxfleet.fluid.pserver.trainer import pull_whole
from jaxfleet.ps.client.pending_request import PendingRequest
from jaxfleet.transport.messages import Kind, Plain

NOTIFY, RECEIVE_AND_SAVE = "checkpoint_notify", "recv_save"
CHECKPOINT_OPS = frozenset({NOTIFY, RECEIVE_AND_SAVE})
TABLES = "__lookup_table__"  # fluid's folder of tables inside a checkpoint


def is_checkpoint_op(program: Program) -> bool:
    """Whether a program contains only save operators."""
    ops = program.global_block().ops
    return bool(ops) and all(op.type in CHECKPOINT_OPS for op in ops)


def run_checkpoint_ops(program: Program, mine: Connections) -> None:
    """Runs a program of save operators.

    Raises:
        ProgramError: this process has no connection to the servers, or they lack the table.
        CheckpointError: a file cannot be written; an older save is unchanged.
        PeerLostError: a server left or timed out.
    """
    for op in program.global_block().ops:
        endpoints = op.attr("epmap" if op.type == NOTIFY else "endpoints")
        if not endpoints:
            continue  # as in fluid, whose loop over servers is empty
        connection = mine.find(endpoints)
        if connection is None:
            what = f"'{op.type}' names {', '.join(endpoints)}, but no program here connected to it"
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
    """Makes servers write a distributed table in its state after this trainer's last step.

    `folder` is the parent of the table's folder, and `step` this trainer's last step, by default
    the current one.

    Raises:
        ProgramError: servers have no such table.
        CheckpointError: a part cannot be written; an older save is unchanged.
        PeerLostError: a server left or timed out.
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
    """Refuses to save a table from only some of its servers, which could not be restored."""
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
        what = f"'{name}' is {list(whole.shape)} on servers, recv_save has {op.attr('shape')}"
        raise ProgramError(what, source=op.source)
    kept = whole.astype(np.float16) if op.attr("save_as_fp16") else whole
    write_files([(path, arrays_writer([(name, kept)]))])


def _receipts(asked: Iterable[PendingRequest]) -> list[PartReceipt]:
    """Returns the reports of written parts from the servers that have answered."""
    said = [one.answer.body.get("receipt") for one in asked if one.answer is not None]
    return [PartReceipt.from_plain(plain) for plain in said if isinstance(plain, dict)]
