"""Maintenance between steps, when no block runs: saves, loads, and administration of whole tables.

`shrink` removes rows: those that the table's evictions select, or with `refill` all of them,
replaced by those of a checkpoint (its folder) or by none (an empty text). `export` returns rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from jaxfleet.checkpoint import PartReceipt, open_checkpoint
from jaxfleet.checkpoint.data_position import position_in
from jaxfleet.ps.server.checkpoints import load_state, load_stores, save_part, save_tables_part
from jaxfleet.ps.server.lease_record import LeaseRecord
from jaxfleet.ps.server.outbox import (
    DeviceTask,
    Outbox,
    Request,
    RequestError,
    is_new,
    request_error,
    string_field,
)
from jaxfleet.ps.server.recovery_saver import RecoverySaver, Written
from jaxfleet.ps.server.row_requests import requested_table
from jaxfleet.ps.server.state import ServerState
from jaxfleet.tables import RowBatch, TableStore
from jaxfleet.tables.buckets import BUCKETS
from jaxfleet.transport.messages import Kind, Message, Plain, Tensor


@dataclass
class MaintenanceQueue:
    """Pending maintenance requests, and the one that runs.

    Attributes:
        resume_work: called when steps may continue.
        on_load: called when a checkpoint was loaded, which voids all earlier messages.
        is_busy: a request is running; no block may run meanwhile.
        saves: number of this server's parts written for trainers' checkpoints.
        has_saved_end: a checkpoint has what trainers have done that give place to others.
    """

    held: ServerState
    outbox: Outbox
    own: RecoverySaver
    resume_work: Callable[[], None]
    on_load: Callable[[], None]
    waiting: list[Request] = field(default_factory=list)
    is_busy: bool = False
    saves: int = 0
    has_saved_end: bool = False
    _is_end_lost: bool = False

    def add(self, request: Request) -> None:
        """Queues a request until its step is applied, or a load until no block runs."""
        message = request.message
        if message.kind is Kind.LOAD:
            string_field(message, "path")
        elif message.kind is Kind.SAVE:
            self._check_save(message)
        else:
            requested_table(message, self.held)
            if message.kind is Kind.SHRINK:
                string_field(message, "token")
                _refill(message)
            else:
                _first_bucket(message)
        if message.kind is not Kind.LOAD:
            self.held.scheduler.follow(request.step)
        if is_new(request, self.waiting):
            self.waiting.append(request)

    def _check_save(self, message: Message) -> None:
        path = message.body.get("path")
        if path is None and self.own.series is None:
            hint = "start the server with a folder for checkpoints"
            raise RequestError("bad_message", f"{self.outbox.name} keeps no checkpoints", hint=hint)
        if path is not None and not isinstance(path, str):
            raise RequestError("bad_message", "the path of a save is a string")
        self._stores(message)

    def drop(self, request: Request) -> None:
        self.waiting = [other for other in self.waiting if other is not request]

    def serve(self) -> None:
        """Starts queued requests, or a checkpoint that is due, unless a block is running.

        A load waits for no step: the pushes that complete it may be lost, and trainers, which
        return to an earlier state, do not send them again. Blocks that were started end before it
        begins.
        """
        if self.is_busy or self.own.is_writing:
            return
        starts = {
            Kind.LOAD: self._start_load,
            Kind.SAVE: self._start_save,
            Kind.SHRINK: self._start_shrink,
            Kind.EXPORT: self._start_export,
        }
        for request in list(self.waiting):
            if self._may_start(request):
                starts[request.message.kind](request)
                self.drop(request)
            if self.is_busy:
                return
        if not self.held.scheduler.is_running and self.own.is_due(self.held):
            self._write_own(lambda _: None, self._put_due_off)

    def save_end(self) -> bool:
        """Returns whether a checkpoint has what trainers have done that now give place to others.

        Otherwise it begins to write one, which also has what ran of an incomplete step. No block
        may run any more. If it cannot be written, the job goes on without it.
        """
        own = self.own
        if own.series is None or self._is_end_lost:
            return True
        if not self.has_saved_end and own.has_all(self.held):
            self.has_saved_end = True
        elif not (self.has_saved_end or self.is_busy or own.is_writing):
            self._write_own(self._note_end, self._end_not_saved)
        return self.has_saved_end

    def _note_end(self, _: Written) -> None:
        self.has_saved_end = True

    def _end_not_saved(self, error: Exception) -> None:
        self._put_due_off(error)
        self._is_end_lost = True

    def _put_due_off(self, error: Exception) -> None:
        if not self.own.put_off(error, unasked=True):
            self.own.give_up(error)

    def _write_own(
        self, then: Callable[[Written], None], failed: Callable[[Exception], None]
    ) -> None:
        """Writes a recovery checkpoint; if from a copy, steps continue once it is made."""
        own, what = self.own, (self.held, self.held.scheduler.progress())

        def written(found: Written) -> None:
            own.wrote(found)
            then(found)
            self._free()

        def not_written(error: Exception) -> None:
            own.end_writing()
            failed(error)
            self._free()

        def copied(run: Callable[[], Written]) -> None:
            self.outbox.tasks.append(
                DeviceTask("saving", run, written, not_written, is_beside=True)
            )
            self._free()

        self.is_busy = own.is_writing = True
        if own.may_write_beside(self.held):
            self.outbox.tasks.append(DeviceTask("copying", own.copy(*what), copied, not_written))
        else:
            self.outbox.tasks.append(DeviceTask("saving", own.write(*what), written, not_written))

    def _stores(self, message: Message) -> list[TableStore] | None:
        """Returns the tables that a save names, None for the whole state."""
        names, tables = message.body.get("tables"), self.held.tables
        if names is None:
            return None
        if not isinstance(names, list) or message.body.get("path") is None:
            raise RequestError("bad_message", "a save of tables has a list of names, and a path")
        for name in names:
            if name not in tables:
                what = f"there is no table '{name}' here, and it shall be saved"
                hint = f"it has {', '.join(tables) or 'none'}"
                raise RequestError("bad_message", what, hint=hint)
        return [table.rows for name, table in tables.items() if name in names]

    def _may_start(self, request: Request) -> bool:
        """Whether the step is applied: the sender's, for tables and recovery checkpoints."""
        kind, body = request.message.kind, request.message.body
        if kind is Kind.LOAD or self.held.scheduler.is_running:
            return kind is Kind.LOAD
        if kind is Kind.SAVE and (body.get("path") is None or body.get("tables") is not None):
            return self.held.scheduler.has_applied(request.step, request.trainer)
        return request.step <= self.held.step

    def _start_save(self, request: Request) -> None:
        """Writes this server's part of a checkpoint; tables alone in their current state."""
        held, step, message = self.held, request.step, request.message
        if message.body.get("path") is None:
            self._start_own(request)
            return
        path, stores = Path(str(message.body["path"])), self._stores(message)
        data = held.leases.position(held.scheduler.step_of)
        if stores is None and step != held.step:
            what = f"a save of step {step} came when step {held.step} was applied"
            self.outbox.refuse(request, RequestError("bad_message", what))
            return

        def run() -> PartReceipt:
            if stores is not None:
                return save_tables_part(path, held.plan, step, stores)
            return save_part(
                path, held.plan, held.executor.views(held.plan.state), step, held.stores
            )

        def then(receipt: PartReceipt) -> None:
            self.saves += 1
            self._answer(request, receipt, step, data)
            self._free()

        self._hand_out("saving", run, then, request)

    def _start_own(self, request: Request) -> None:
        step = self.held.step
        if self.own.has(request.step, request.trainer):
            self.outbox.reply(request, Kind.OK, {"step": request.step})
            return
        if self.own.schedule.is_waiting:
            self._not_saved(request)
            return

        def failed(error: Exception) -> None:
            if self.own.put_off(error):
                self._not_saved(request)
            else:
                self.outbox.refuse(request, request_error("failed", error))

        self._write_own(lambda made: self._answer(request, made.receipt, step), failed)

    def _not_saved(self, request: Request) -> None:
        """Replies that there is no space for a checkpoint: pushes are to be kept."""
        self.outbox.reply(request, Kind.OK, {"is_full": True})

    def _answer(
        self, request: Request, receipt: PartReceipt, step: int, data: Plain = None
    ) -> None:
        body: dict[str, Plain] = {"files": receipt.files, "bytes": receipt.bytes, "step": step}
        body["receipt"] = receipt.to_plain()
        if data is not None:
            body["data"] = data
        self.outbox.reply(request, Kind.OK, body)

    def _start_shrink(self, request: Request) -> None:
        held, message = self.held, request.message
        table, token = requested_table(message, held), string_field(message, "token")
        step = held.scheduler.row_step  # later than any save
        refill = _refill(message)

        def told() -> None:
            self.outbox.reply(request, Kind.OK, {"rows": table.shrunk[1]})

        def kept() -> None:
            told()
            self._free()

        def run() -> int:
            if refill is None:
                return table.shrink(step)
            return table.refill(refill, held.plan.buckets, step)

        def then(count: int) -> None:
            table.shrunk = (token, count)
            # Removed rows must not reappear with a restarted server.
            self.own.save_now(held, held.scheduler.progress(), kept)

        if table.shrunk[0] == token:  # a repeated request
            told()
        else:
            self._hand_out(f"shrinking '{table.spec.name}'", run, then, request)

    def _start_export(self, request: Request) -> None:
        message = request.message
        table = requested_table(message, self.held)

        def then(found: tuple[RowBatch | None, int]) -> None:
            batch, following = found
            tensors: tuple[Tensor, ...] = ()
            if batch is not None:
                tensors = (Tensor("keys", batch.keys), Tensor("rows", batch.rows))
            body: dict[str, Plain] = {"next": following if batch is not None else None}
            self.outbox.reply(request, Kind.ROWS, body, tensors)
            self._free()

        run = partial(table.rows_from, _first_bucket(message))
        self._hand_out(f"giving rows of '{table.spec.name}' out", run, then, request)

    def _start_load(self, request: Request) -> None:
        held, path = self.held, Path(string_field(request.message, "path"))

        def run() -> tuple[dict[str, Any], list[TableStore], LeaseRecord, int]:
            arrays, step = load_state(path, held.plan)
            checkpoint, leases = open_checkpoint(path), LeaseRecord()
            leases.load(position_in(checkpoint))
            stores = load_stores([checkpoint], held.plan)
            return dict(held.executor.assign(arrays)), stores, leases, step

        def then(loaded: tuple[dict[str, Any], list[TableStore], LeaseRecord, int]) -> None:
            views, stores, leases, step = loaded
            held.host.update(views)
            held.leases.ledger = leases.ledger
            held.replace_stores(stores)
            self.own.begin_anew()
            held.begin_from(step)
            self.own.save(held, step, lambda: loaded_and_kept(step))

        def loaded_and_kept(step: int) -> None:
            held.scheduler.rewind(step)
            self.on_load()
            self.outbox.reply(request, Kind.OK, {"step": step})
            self._free()

        self._hand_out("loading", run, then, request)

    def _hand_out(
        self, what: str, run: Callable[[], Any], then: Callable[[Any], None], request: Request
    ) -> None:
        def failed(error: Exception) -> None:
            self.outbox.refuse(request, request_error("failed", error))
            self._free()

        self.is_busy = True
        self.outbox.tasks.append(DeviceTask(what, run, then, failed))

    def _free(self) -> None:
        self.is_busy = False
        self.resume_work()


def _refill(message: Message) -> str | None:
    given = message.body.get("refill")
    if given is not None and not isinstance(given, str):
        what = f"'refill' is the folder of a checkpoint, or empty, and not {given!r}"
        raise RequestError("bad_message", what)
    return given


def _first_bucket(message: Message) -> int:
    first = message.body.get("first")
    if not isinstance(first, int) or isinstance(first, bool) or not 0 <= first <= BUCKETS:
        what = f"an export needs 'first', a bucket from 0 to {BUCKETS}, and not {first!r}"
        raise RequestError("bad_message", what)
    return first
