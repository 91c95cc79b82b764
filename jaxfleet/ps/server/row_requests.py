"""Requests for rows of tables: validation, look-ups and pushes.

A push is applied once all trainers have sent theirs for the step. Their gradients are summed in the
order of the trainers and applied once, so neither the order of arrival nor the number of servers
changes a bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ps.server.outbox import (
    DeviceTask,
    Outbox,
    Request,
    RequestError,
    is_new,
    missing_push_error,
    previous_push,
    request_error,
    string_field,
    tensors_bytes,
)
from jaxfleet.ps.server.scheduler import RowPush
from jaxfleet.ps.server.server_table import ServerTable
from jaxfleet.ps.server.state import ServerState
from jaxfleet.tables.buckets import server_of
from jaxfleet.tables.eviction import no_scores
from jaxfleet.tables.validation import FINITE, checked
from jaxfleet.transport.messages import Kind, Message, Tensor


def requested_table(message: Message, held: ServerState) -> ServerTable:
    """Returns the table that a message names."""
    name = string_field(message, "table")
    table = held.tables.get(name)
    if table is None:
        known = ", ".join(held.tables) or "none"
        what = f"there is no table '{name}' on server {held.plan.server}, which has {known}"
        raise RequestError("bad_message", what)
    return table


def read_keys(message: Message, held: ServerState) -> np.ndarray:
    """Returns a message's keys, all of which must belong to this server."""
    keys, servers = _array(message, "keys"), len(held.plan.endpoints)
    if keys.dtype != np.int64 or keys.ndim != 1:
        what = f"{_about(message)}: keys are {keys.dtype}{list(keys.shape)}, not int64[n]"
        raise RequestError("bad_message", what)
    if servers > 1:
        foreign = np.flatnonzero(server_of(keys, servers) != held.plan.server)
        if len(foreign):
            what = f"{_about(message)}: {len(foreign)} of {len(keys)} keys are other servers', "
            what += f"the first is {keys[foreign[0]]}"
            raise RequestError("bad_message", what)
    return keys


def read_gradients(message: Message, table: ServerTable, keys: np.ndarray) -> np.ndarray:
    """Returns a message's gradients, a row per key; rejects nonfinite ones if the table does."""
    grads, wanted = _array(message, "grads"), (len(keys), table.spec.dim)
    if grads.dtype != np.float32 or grads.shape != wanted:
        found = f"{grads.dtype}{list(grads.shape)}"
        what = f"{_about(message)}: gradients are {found}, not float32{list(wanted)}"
        raise RequestError("bad_message", what)
    if table.spec.on_nan == "refuse":
        _check_finite(message, keys, grads)
    return grads


def _check_finite(message: Message, keys: np.ndarray, grads: np.ndarray) -> None:
    finite = np.isfinite(grads)
    if finite.all():
        return
    bad = np.flatnonzero(~finite.all(axis=1))
    what = f"{_about(message)}: the gradients of {len(bad)} of {len(keys)} keys are not finite, "
    what += f"the first is that of {keys[bad[0]]}; nothing was applied"
    hint = "look for a division by zero or a rate that is too high; on_nan='skip' leaves them out"
    raise RequestError("refused", what, hint=hint)


def read_learning_rate(message: Message) -> float | None:
    """Returns the learning rate of a push, None if it has none."""
    rate = message.body.get("learning_rate")
    if rate is None:
        return None
    try:
        return checked(f"{_about(message)}: the learning rate", rate, FINITE)
    except ProgramError as error:
        raise RequestError("bad_message", str(error)) from error


def read_scores(message: Message, table: ServerTable, keys: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the shows and clicks of a push by these names, one for each key."""
    found = {x.name: x.array for x in message.tensors if x.name in {"shows", "clicks"}}
    if found and not table.spec.has_scores:
        error = no_scores(table.spec.name)
        raise RequestError("bad_message", str(error), hint="; ".join(error.__notes__))
    for name, counts in found.items():
        if counts.dtype != np.float32 or counts.shape != keys.shape:
            what = f"{name} are {counts.dtype}{list(counts.shape)}, not float32{list(keys.shape)}"
            raise RequestError("bad_message", f"{_about(message)}: {what}")
        if not np.isfinite(counts).all():
            raise RequestError("refused", f"{_about(message)}: some {name} are not finite")
    return found


def _array(message: Message, name: str) -> np.ndarray:
    for tensor in message.tensors:
        if tensor.name == name:
            return tensor.array
    raise RequestError("bad_message", f"{_about(message)}: there are no {name}")


def _about(message: Message) -> str:
    what = message.kind.value.replace("_", " ")
    return f"{what} of step {message.step}, table '{message.body.get('table')}'"


@dataclass
class RowLookupHandler:
    """Pending look-ups, some of them from before the server had a program."""

    outbox: Outbox
    waiting: list[Request] = field(default_factory=list)

    def add(self, request: Request, held: ServerState | None) -> None:
        """Queues a look-up for `serve`."""
        if held is not None:
            requested_table(request.message, held)
            read_keys(request.message, held)
        if is_new(request, self.waiting):
            self.waiting.append(request)

    def drop(self, request: Request) -> None:
        self.waiting = [other for other in self.waiting if other is not request]

    def serve(self, held: ServerState) -> None:
        """Starts the look-ups whose step is applied."""
        if held.step >= 0 and self.waiting:
            self.waiting = [request for request in self.waiting if not self._began(request, held)]

    def _began(self, request: Request, held: ServerState) -> bool:
        """Starts a look-up if its step is applied; returns whether it was started or rejected."""
        try:
            table = requested_table(request.message, held)
            keys = read_keys(request.message, held)
        except RequestError as refusal:  # it arrived before there was a program
            self.outbox.refuse(request, refusal)
            return True
        if not held.scheduler.may_look_up(table.spec.name, request.step):
            return False
        self._start(request, table, keys, held)
        return True

    def _start(
        self, request: Request, table: ServerTable, keys: np.ndarray, held: ServerState
    ) -> None:
        # An evaluation trains none of its keys, so they get no rows, and the scheduler need not
        # remember which values the trainer has.
        is_peek, name = bool(request.message.body.get("peek")), table.spec.name
        is_late = held.scheduler.has_updated(name, request.step)
        is_again = bool(request.message.body.get("again")) and is_late

        def run() -> np.ndarray:
            if is_again:
                return table.look_up_again(keys, request.step)
            return table.peek(keys) if is_peek else table.look_up(keys, request.step)

        def then(rows: np.ndarray) -> None:
            if not is_peek:
                held.scheduler.gave_rows(name, request.trainer, keys, rows)
            self.outbox.reply(request, Kind.ROWS, {}, (Tensor("rows", rows),))

        def failed(error: Exception) -> None:
            self.outbox.refuse(request, request_error("failed", error))

        expected_s = table.reading.expected_s(len(keys))
        what = f"looking rows of '{name}' up"
        self.outbox.tasks.append(DeviceTask(what, run, then, failed, expected_s))


_MOST_AHEAD = 1 << 16  # steps


@dataclass
class RowPushHandler:
    """Updates a server's tables."""

    held: ServerState
    outbox: Outbox
    most_bytes: int
    resume_work: Callable[[], None]

    def push(self, request: Request) -> None:
        """Takes gradients of rows; rejects those of other servers, and too many queued ones."""
        held, message = self.held, request.message
        table = requested_table(message, held)
        keys = read_keys(message, held)
        grads, rate = read_gradients(message, table, keys), read_learning_rate(message)
        scores = read_scores(message, table, keys)
        self._check_step(request)
        if not held.scheduler.follows(request.trainer, previous_push(message), table.spec.name):
            raise missing_push_error(message)
        push = RowPush(
            request,
            keys,
            grads,
            rate,
            adds=bool(message.body.get("deltas")),
            received=held.scheduler.received_rows(table.spec.name, request.trainer, keys),
            **scores,
        )
        held.scheduler.push_rows(table.spec.name, push)

    def hand_out(self) -> None:
        """Starts the updates of tables that are complete for the current step."""
        scheduler = self.held.scheduler
        for name, pushes in scheduler.hand_out_tables():
            self._start(self.held.tables[name], pushes, scheduler.row_step)

    def _check_step(self, request: Request) -> None:
        scheduler, step = self.held.scheduler, request.step
        if scheduler.applied < 0:
            what = f"rows of step {step} came before any state"
            raise RequestError("bad_message", what, hint="send assign first")
        if step < 1:
            raise RequestError("bad_message", f"there is no step {step}; they start at 1")
        ahead, waits = step - scheduler.step, scheduler.queued_row_bytes
        too_much = waits + tensors_bytes(request.message.tensors) > self.most_bytes
        if ahead > _MOST_AHEAD or (ahead > 0 and too_much):
            what = f"step {step} is {ahead} steps ahead, and {waits} bytes of rows wait already"
            raise RequestError("bad_message", what, hint="push as far as look-ups were answered")

    def _start(self, table: ServerTable, pushes: Sequence[RowPush], step: int) -> None:
        held, name = self.held, table.spec.name

        def run() -> None:
            table.update(pushes, step, keeps_past=held.keeps_rows and held.plan.waits)

        def then(_: object) -> None:
            if held.scheduler.table_ran(name):
                held.extras.forget(held.scheduler.applied)
            self.resume_work()

        def failed(error: Exception) -> None:
            held.scheduler.take_back(name, step)
            refusal = request_error("refused", error)
            for push in pushes:
                self.outbox.refuse(push.request, refusal)
            self.resume_work()

        expected_s = table.writing.expected_s(sum(len(push.keys) for push in pushes))
        self.outbox.tasks.append(DeviceTask(f"step {step}", run, then, failed, expected_s))
