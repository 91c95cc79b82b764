"""Maintenance between steps, when no block runs: saves, loads, and table administration."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxfleet.checkpoint import PartReceipt, open_checkpoint
from jaxfleet.ps.server import table_admin
from jaxfleet.ps.server.job_checkpoint import load_state, load_stores, save_part, save_tables_part
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
from jaxfleet.ps.server.state import ServerState
from jaxfleet.ps.server.table_admin import TableAdmin
from jaxfleet.tables import TableStore
from jaxfleet.transport.messages import Kind, Message, Plain

_LONGEST_PATH = 300  # characters of a path shown in an error


@dataclass(frozen=True)
class SaveFolders:
    """Checks paths in messages.

    The folders come from the server's own configuration, never from a peer. Symbolic links are
    resolved before the comparison.

    Attributes:
        roots: the folders; None allows any path, for servers that no other process reaches.
    """

    roots: tuple[Path, ...] | None = None

    def check(self, message: Message) -> None:
        """Rejects a message whose `path`, or nonempty `refill`, is outside all folders."""
        path, refill = message.body.get("path"), message.body.get("refill")
        verb = "write" if message.kind is Kind.SAVE else "read"
        if isinstance(path, str):
            self._check_path(path, verb)
        if isinstance(refill, str) and refill:
            self._check_path(refill, verb)

    def _check_path(self, path: str, verb: str) -> None:
        if self.roots is None:
            return
        try:
            found = Path(path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a null byte
            what = f"the path {path!r:.{_LONGEST_PATH}} cannot be used: {error}"
            raise RequestError("bad_message", what) from error
        if any(found.is_relative_to(root.resolve()) for root in self.roots):
            return
        folders = ", ".join(map(str, self.roots))
        what = f"servers {verb} checkpoints below {folders} alone, not {path:.{_LONGEST_PATH}}"
        hint = "allow the folder when the job starts: jaxfleet launch --save-dir DIR, or set"
        raise RequestError("checkpoint", what, hint=f"{hint} JAXFLEET_SAVE_DIR for servers")


@dataclass
class MaintenanceQueue:
    """Pending maintenance requests, and the one that runs.

    Attributes:
        resume_work: called when steps may continue.
        on_load: called when a checkpoint was loaded, which voids all earlier messages.
        is_busy: a request is running; no block may run meanwhile.
    """

    held: ServerState
    outbox: Outbox
    own: RecoverySaver
    resume_work: Callable[[], None]
    on_load: Callable[[], None]
    waiting: list[Request] = field(default_factory=list)
    is_busy: bool = False

    def add_save(self, request: Request) -> None:
        """Queues a save until its step is applied."""
        path = request.message.body.get("path")
        if path is None and self.own.series is None:
            hint = "start the server with a folder for checkpoints"
            raise RequestError("bad_message", f"{self.outbox.name} keeps no checkpoints", hint=hint)
        if path is not None and not isinstance(path, str):
            raise RequestError("bad_message", "the path of a save is a string")
        self._stores(request)
        self.held.scheduler.follow(request.step)
        self._add(request)

    def add_load(self, request: Request) -> None:
        string_field(request.message, "path")
        self._add(request)

    def add_tending(self, request: Request) -> None:
        """Queues a table request until its step is applied."""
        table_admin.check_request(request, self.held)
        self.held.scheduler.follow(request.step)
        self._add(request)

    def _add(self, request: Request) -> None:
        if is_new(request, self.waiting):
            self.waiting.append(request)

    def drop(self, request: Request) -> None:
        self.waiting = [other for other in self.waiting if other is not request]

    def serve(self) -> None:
        """Starts queued requests, or a checkpoint that is due, unless a block is running."""
        applied = self.held.step
        if self.is_busy or self.own.is_writing or self.held.scheduler.is_running:
            return
        for request in list(self.waiting):
            if request.message.kind is Kind.LOAD:
                self._start_load(request)
            elif not self._may_start(request, applied):
                continue
            elif request.message.kind is Kind.SAVE:
                self._start_save(request)
            else:
                self._start_tending(request)
            self.drop(request)
            if self.is_busy:
                return
        if self.own.is_due(self.held):
            self._write_own(lambda _: None, self._put_due_off)

    def _put_due_off(self, error: Exception) -> None:
        if not self.own.put_off(error, unasked=True):
            self.own.give_up(error)

    def _write_own(
        self, then: Callable[[Written], None], failed: Callable[[Exception], None]
    ) -> None:
        """Writes a recovery checkpoint; if from a copy, steps continue once it is made."""
        own, scheduler = self.own, self.held.scheduler
        steps = scheduler.steps()
        what = self.held, scheduler.number, steps, scheduler.kinds()

        def written(found: Written) -> None:
            own.wrote(found, steps)
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

    def _stores(self, request: Request) -> list[TableStore] | None:
        """Returns the tables that a save names, None for the whole state."""
        names, tables = request.message.body.get("tables"), self.held.tables
        if names is None:
            return None
        if not isinstance(names, list) or request.message.body.get("path") is None:
            raise RequestError("bad_message", "a save of tables has a list of names, and a path")
        for name in names:
            if name not in tables:
                what = f"there is no table '{name}' here, and it shall be saved"
                raise RequestError(
                    "bad_message", what, hint=f"it has {', '.join(tables) or 'none'}"
                )
        return [table.rows for name, table in tables.items() if name in names]

    def _may_start(self, request: Request, applied: int) -> bool:
        """Whether the step is applied: the sender's, for tables and recovery checkpoints."""
        body = request.message.body
        if request.message.kind is not Kind.SAVE:
            return request.step <= applied
        if body.get("path") is None or body.get("tables") is not None:
            return self.held.scheduler.has_applied(request.step, request.trainer)
        return request.step <= applied

    def _start_save(self, request: Request) -> None:
        held, step, path = self.held, self.held.step, request.message.body.get("path")
        if path is None:
            self._start_own(request)
            return
        if (stores := self._stores(request)) is not None:
            self._start_tables(request, Path(str(path)), stores)
            return
        if request.step != step:
            what = f"a save of step {request.step} came when step {step} was applied"
            self.outbox.error(request.peer, request.message, RequestError("bad_message", what))
            return

        def run() -> PartReceipt:
            arrays = held.executor.views(held.plan.state)
            return save_part(Path(str(path)), held.plan, arrays, step, held.stores)

        self._hand_out("saving", run, lambda receipt: self._saved(request, receipt, step), request)

    def _start_tables(self, request: Request, path: Path, stores: list[TableStore]) -> None:
        """Writes only tables, in their current state, under the sender's step."""
        step, plan = request.step, self.held.plan

        def run() -> PartReceipt:
            return save_tables_part(path, plan, step, stores)

        self._hand_out("saving", run, lambda receipt: self._saved(request, receipt, step), request)

    def _start_own(self, request: Request) -> None:
        step = self.held.step
        if self.own.has(request.step, request.trainer):
            self.outbox.answer(request.peer, request.message, Kind.OK, {"step": request.step})
            return
        if self.own.schedule.is_waiting:
            self._not_saved(request)
            return

        def failed(error: Exception) -> None:
            if self.own.put_off(error):
                self._not_saved(request)
            else:
                self.outbox.error(request.peer, request.message, request_error("failed", error))

        self._write_own(lambda made: self._answer(request, made.receipt, step), failed)

    def _not_saved(self, request: Request) -> None:
        """Replies that there is no space for a checkpoint: pushes are to be kept."""
        self.outbox.answer(request.peer, request.message, Kind.OK, {"is_full": True})

    def _saved(self, request: Request, receipt: PartReceipt, step: int) -> None:
        self._answer(request, receipt, step)
        self._free()

    def _answer(self, request: Request, receipt: PartReceipt, step: int) -> None:
        body: dict[str, Plain] = {"files": receipt.files, "bytes": receipt.bytes, "step": step}
        body["receipt"] = receipt.to_plain()
        self.outbox.answer(request.peer, request.message, Kind.OK, body)

    def _start_tending(self, request: Request) -> None:
        work = TableAdmin(self.held, self.outbox, self._keep, self._free).work(request)
        if work is not None:
            self._hand_out(*work, request)

    def _keep(self, then: Callable[[], None]) -> None:
        scheduler = self.held.scheduler
        self.own.save_now(self.held, scheduler.number, scheduler.steps(), scheduler.kinds(), then)

    def _start_load(self, request: Request) -> None:
        held, path = self.held, Path(string_field(request.message, "path"))

        def run() -> tuple[dict[str, Any], list[TableStore], int]:
            arrays, step = load_state(path, held.plan)
            stores = load_stores([open_checkpoint(path)], held.plan)
            return dict(held.executor.assign(arrays)), stores, step

        def then(loaded: tuple[dict[str, Any], list[TableStore], int]) -> None:
            views, stores, step = loaded
            held.host.update(views)
            held.replace_stores(stores)
            self.own.begin_anew()
            self.own.save(held, step, lambda: loaded_and_kept(step))

        def loaded_and_kept(step: int) -> None:
            held.scheduler.restart(step)
            self.on_load()
            self.outbox.answer(request.peer, request.message, Kind.OK, {"step": step})
            self._free()

        self._hand_out("loading", run, then, request)

    def _hand_out(
        self, what: str, run: Callable[[], Any], then: Callable[[Any], None], request: Request
    ) -> None:
        def failed(error: Exception) -> None:
            self.outbox.error(request.peer, request.message, request_error("failed", error))
            self._free()

        self.is_busy = True
        self.outbox.tasks.append(DeviceTask(what, run, then, failed))

    def _free(self) -> None:
        self.is_busy = False
        self.resume_work()
