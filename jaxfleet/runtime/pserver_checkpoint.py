"""Operations of all trainers of a job together: checkpoints, and those on whole tables.

Of a checkpoint the servers write their parts, trainer 0 the rest and the manifest. What concerns
a whole table trainer 0 requests from the servers, while the others wait.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from jaxfleet.checkpoint import PartReceipt, Piece, commit, discard, position_facts, write_part
from jaxfleet.errors import CheckpointError, JaxfleetError
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.pending_request import PendingRequest
from jaxfleet.ps.client.remote_tables import RemoteTables
from jaxfleet.runtime.checkpointing import open_for, read_leaves
from jaxfleet.runtime.remote_state import RemoteState
from jaxfleet.transport.messages import Kind, Plain, Tensor

_TRAINED = "trained"  # the steps of a checkpoint whose own number counts exchanges


def save_job(
    client: Client,
    served: RemoteState,
    path: Path,
    leaves: Sequence[Any],
    data: Mapping[str, int] | None,
    *,
    trained: int | None = None,
) -> None:
    """Writes a checkpoint of the current step; on failure the previous one stays.

    A process that returns writes none again that all trainers have completed: where trainers do not
    wait for each other, the others may be far beyond it, and would not come.

    `data` is the position of trainer 0's loader; that of the servers' ledger by default. `trained`
    is the number of steps that the state includes, where the current step is an exchange.
    """
    if client.is_past():
        return
    client.doing("saving")
    what, error = client.unique(f"save {path}"), None
    if client.me.trainer == 0 and not _is_agreed(client, what):
        try:
            _save(client, served, path, leaves, data, trained=trained)
        except (JaxfleetError, OSError) as found:
            error = found
    agree(client, what, error)


def restore_job(client: Client, served: RemoteState, path: str | Path) -> tuple[list[Any], int]:
    """Loads a checkpoint into the servers.

    Returns the leaves for the trainers, and the number of steps that they include.
    """
    client.doing("restoring")
    checkpoint = open_for(path, served.captured)
    client.rewind(checkpoint.step)
    what, error = client.unique(f"restore {path}"), None
    if client.me.trainer == 0 and not _is_agreed(client, what):
        body: dict[str, Any] = {"path": str(Path(path).absolute())}
        try:
            _wait_for_all(client, [client.request(s, Kind.LOAD, body=body)
                                   for s in _servers(client)])  # fmt: skip
        except JaxfleetError as found:
            error = found
    agree(client, what, error, rewinds=True)
    client.restart(checkpoint.step)
    values = {**read_leaves(checkpoint, served.mine), **served.pull(client, served.params)}
    trained = checkpoint.facts.get(_TRAINED)
    return served.leaves(values), trained if isinstance(trained, int) else checkpoint.step


def meet(client: Client, what: str, *, rewinds: bool = False) -> None:
    """Waits at a barrier of all trainers before the operation `what`, which `rewinds` or not."""
    agree(client, f"begin to {what}", None, rewinds=rewinds)


def _save(
    client: Client,
    served: RemoteState,
    path: Path,
    leaves: Sequence[Any],
    data: Mapping[str, Plain] | None,
    *,
    trained: int | None,
) -> None:
    step, receipts = client.step, list[PartReceipt]()
    asked = [client.request(s, Kind.SAVE, body={"path": str(path)}) for s in _servers(client)]
    try:
        pieces = [Piece.whole(name, array) for name, array in served.own(leaves).items()]
        receipts.append(write_part(path, "trainers", pieces, step=step))
        _wait_for_all(client, asked)
        for request in asked:
            assert request.answer is not None
            receipts.append(_receipt(request.answer.body.get("receipt")))
        leased = asked[0].answer.body.get("data") if asked[0].answer is not None else None
        if data is None and isinstance(leased, dict):
            data = leased  # the position of the job's ledger
        facts = position_facts(data)
        if trained is not None:
            facts = {**facts, _TRAINED: trained}
        commit(path, receipts, step=step, facts=facts)
    except BaseException as error:
        if isinstance(error, CheckpointError | OSError):
            with suppress(CheckpointError):
                _wait_for_all(client, asked)
        discard(path, receipts)
        raise


def _wait_for_all(client: Client, asked: Sequence[PendingRequest]) -> None:
    """Waits until all servers have answered, then raises the first error of a checkpoint.

    An error that came later would be raised by whatever the trainer does then.
    """
    first: CheckpointError | None = None
    while left := [each for each in asked if client.awaits(each)]:
        try:
            client.wait(left)
        except CheckpointError as error:
            first = first or error
    if first is not None:
        raise first


def _receipt(plain: object) -> PartReceipt:
    if not isinstance(plain, dict):
        raise CheckpointError("a server does not say what it wrote")
    return PartReceipt.from_plain(plain)


def _is_agreed(client: Client, what: str) -> bool:
    """Whether a former process of trainer 0 did what this one is about to do again."""
    if not client.may_repeat():
        return False
    body: dict[str, Any] = {"key": what, "how": "max", "peek": True}
    request = client.request(0, Kind.REDUCE, body=body)
    client.wait([request])
    return request.answer is not None and request.answer.body.get("answered") is True


def agree(
    client: Client, what: str, error: Exception | None, found: int = 0, *, rewinds: bool = False
) -> int:
    """Waits for all trainers; returns trainer 0's result `found`, from 0 on, or raises an error.

    With `rewinds` they go on from another state, and servers forget at which step they were.
    """
    told = np.asarray([error is not None, found], np.int64)
    came: list[int] = []

    def take(answer: Sequence[Tensor]) -> None:
        came.extend(int(value) for tensor in answer for value in tensor.array)

    body: dict[str, Any] = {"key": what, "how": "max"}
    if rewinds:
        body["rewinds"] = True
    tensors = [Tensor("told", told)]
    request = client.request(0, Kind.REDUCE, body=body, tensors=tensors, wants=["told"], sink=take)
    client.wait([request])
    if error is not None:
        raise error
    if came[0]:
        raise CheckpointError(f"trainer 0 could not {what}", hint="its own error has the reason")
    return came[1]


def _servers(client: Client) -> range:
    return range(len(client.me.endpoints))


def shrink_table(client: Client, tables: RemoteTables, table: str, what: str) -> int:
    """Lets servers evict rows by a table's rules; returns their number.

    `what` names the operation, uniquely at this step.

    Raises:
        ProgramError: there is no such table.
        PeerLostError: a server, or another trainer, is gone or late.
    """
    tables.live(table)  # fails on all trainers alike if there is no such table
    # A process that returns in trainer 0's place may do it again.
    token = f"{what} after step {client.step}"
    return _together(client, what, lambda: tables.shrink(table, token))


def export_table(
    client: Client, tables: RemoteTables, table: str, what: str, write: Callable[[], int]
) -> int:
    """Exports a table on trainer 0, by `write`, as `exported`; returns the number of rows.

    `what` names the operation, uniquely at this step.

    Raises:
        CheckpointError: the folder exists already, or cannot be written.
        ProgramError: there is no such table.
        PeerLostError: a server, or another trainer, is gone or late.
    """
    tables.live(table)  # fails on all trainers alike if there is no such table
    return _together(client, what, write)


def _together(client: Client, what: str, work: Callable[[], int]) -> int:
    client.doing(what)
    error: JaxfleetError | None = None
    count = 0
    if client.me.trainer == 0 and not _is_agreed(client, what):
        try:
            count = work()
        except JaxfleetError as found:
            error = found
    return agree(client, what, error, count)
