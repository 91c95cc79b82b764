"""Saves, loads, and what is done to whole tables: between two steps, when nothing runs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxfleet.checkpoint import PartReceipt, open_checkpoint
from jaxfleet.ps.messages import Kind, Plain
from jaxfleet.ps.server import tending
from jaxfleet.ps.server.desk import Desk, Job, RefusedError, Request, is_new, refusal_of, text_of
from jaxfleet.ps.server.held import Held
from jaxfleet.ps.server.own_saves import OwnSaves
from jaxfleet.ps.server.storage import (
    load_state,
    load_stores,
    save_part,
    save_tables_part,
)
from jaxfleet.ps.server.tending import Tending
from jaxfleet.tables import TableStore


@dataclass
class Between:
    """Requests that wait for such a moment, and the one that has it.

    Attributes:
        held: what is saved and loaded.
        desk: where answers and work go.
        own: the server's own checkpoints.
        go_on: is called when steps may go on.
        on_load: is called when a checkpoint was loaded: what came before it is void.
        waiting: in the order they came.
        is_busy: one is under way; no block may run meanwhile.
    """

    held: Held
    desk: Desk
    own: OwnSaves
    go_on: Callable[[], None]
    on_load: Callable[[], None]
    waiting: list[Request] = field(default_factory=list)
    is_busy: bool = False

    def add_save(self, request: Request) -> None:
        """Takes a save, which is done once its step is applied.

        Raises:
            RefusedError: there is nowhere to write it.
        """
        path = request.message.body.get("path")
        if path is None and self.own.series is None:
            hint = "start the server with a folder for checkpoints"
            raise RefusedError("bad_message", f"{self.desk.name} keeps no checkpoints", hint=hint)
        if path is not None and not isinstance(path, str):
            raise RefusedError("bad_message", "the path of a save is a string")
        self._stores(request)
        self.held.progress.follow(request.step)
        self._add(request)

    def add_load(self, request: Request) -> None:
        """Takes a load.

        Raises:
            RefusedError: it does not say of what.
        """
        text_of(request.message, "path")
        self._add(request)

    def add_tending(self, request: Request) -> None:
        """Takes what a trainer asks of a whole table, which is done once its step is applied.

        Raises:
            RefusedError: there is no such table, or it does not say what.
        """
        tending.check(request, self.held)
        self.held.progress.follow(request.step)
        self._add(request)

    def _add(self, request: Request) -> None:
        if is_new(request, self.waiting):
            self.waiting.append(request)

    def drop(self, request: Request) -> None:
        """Forgets one that will not be answered."""
        self.waiting = [other for other in self.waiting if other is not request]

    def serve(self) -> None:
        """Starts what waits, or a checkpoint that is due, where no block is under way."""
        applied = self.held.step
        if self.is_busy or self.held.progress.is_running:
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
            self._start_due()

    def _start_due(self) -> None:
        """Writes an own checkpoint that no trainer has asked for."""
        progress = self.held.progress
        steps = progress.steps()

        def then(_: object) -> None:
            self.own.saved = steps
            self._free()

        def failed(error: Exception) -> None:
            if not self.own.put_off(error, unasked=True):
                self.own.give_up(error)
            self._free()

        self.is_busy = True
        run = self.own.write(self.held, progress.number, steps, progress.kinds())
        self.desk.jobs.append(Job("saving", run, then, failed))

    def _stores(self, request: Request) -> list[TableStore] | None:
        """Returns the tables that a save is of, None where it is of all that the server holds.

        Raises:
            RefusedError: the server has no such table.
        """
        names, tables = request.message.body.get("tables"), self.held.tables
        if names is None:
            return None
        if not isinstance(names, list) or request.message.body.get("path") is None:
            raise RefusedError("bad_message", "a save of tables has a list of names, and a path")
        for name in names:
            if name not in tables:
                what = f"there is no table '{name}' here, and it shall be saved"
                raise RefusedError(
                    "bad_message", what, hint=f"it has {', '.join(tables) or 'none'}"
                )
        return [table.rows for name, table in tables.items() if name in names]

    def _may_start(self, request: Request, applied: int) -> bool:
        """Tells whether what a request is about is applied: of tables or its own, the sender's."""
        body = request.message.body
        if request.message.kind is not Kind.SAVE:
            return request.step <= applied
        if body.get("path") is None or body.get("tables") is not None:
            return self.held.progress.has_applied(request.step, request.trainer)
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
            self.desk.error(request.peer, request.message, RefusedError("bad_message", what))
            return

        def run() -> PartReceipt:
            arrays = held.machine.views(held.plan.state)
            return save_part(Path(str(path)), held.plan, arrays, step, held.stores)

        self._hand_out("saving", run, lambda receipt: self._saved(request, receipt, step), request)

    def _start_tables(self, request: Request, path: Path, stores: list[TableStore]) -> None:
        """Writes tables alone, as they are now; the step that it is of is the sender's."""
        step, plan = request.step, self.held.plan

        def run() -> PartReceipt:
            return save_tables_part(path, plan, step, stores)

        self._hand_out("saving", run, lambda receipt: self._saved(request, receipt, step), request)

    def _start_own(self, request: Request) -> None:
        step, steps = self.held.step, self.held.progress.steps()
        if self.own.is_saved(steps):
            self.desk.answer(request.peer, request.message, Kind.OK, {"step": step})
            return
        if self.own.schedule.is_waiting:
            self._not_saved(request)
            return

        def then(receipt: PartReceipt) -> None:
            self.own.saved = steps
            self._saved(request, receipt, step)

        progress = self.held.progress
        run = self.own.write(self.held, progress.number, steps, progress.kinds())

        def failed(error: Exception) -> None:
            if self.own.put_off(error):
                self._not_saved(request)
            else:
                self.desk.error(request.peer, request.message, refusal_of("failed", error))
            self._free()

        self.is_busy = True
        self.desk.jobs.append(Job("saving", run, then, failed))

    def _not_saved(self, request: Request) -> None:
        """Answers that there is no room for a checkpoint now: pushes are to be kept."""
        self.desk.answer(request.peer, request.message, Kind.OK, {"is_full": True})

    def _saved(self, request: Request, receipt: PartReceipt, step: int) -> None:
        body: dict[str, Plain] = {"files": receipt.files, "bytes": receipt.bytes, "step": step}
        body["receipt"] = receipt.to_plain()
        self.desk.answer(request.peer, request.message, Kind.OK, body)
        self._free()

    def _start_tending(self, request: Request) -> None:
        work = Tending(self.held, self.desk, self._keep, self._free).work(request)
        if work is not None:
            self._hand_out(*work, request)

    def _keep(self, then: Callable[[], None]) -> None:
        """Writes the state as it is, where checkpoints are kept at all."""
        progress = self.held.progress
        self.own.save_now(self.held, progress.number, progress.steps(), progress.kinds(), then)

    def _start_load(self, request: Request) -> None:
        held, path = self.held, Path(text_of(request.message, "path"))

        def run() -> tuple[dict[str, Any], list[TableStore], int]:
            arrays, step = load_state(path, held.plan)
            stores = load_stores([open_checkpoint(path)], held.plan)
            return dict(held.machine.assign(arrays)), stores, step

        def then(loaded: tuple[dict[str, Any], list[TableStore], int]) -> None:
            views, stores, step = loaded
            held.host.update(views)
            held.replace_stores(stores)
            self.own.begin_anew()
            self.own.save(held, step, lambda: loaded_and_kept(step))

        def loaded_and_kept(step: int) -> None:
            held.progress.restart(step)
            self.on_load()
            self.desk.answer(request.peer, request.message, Kind.OK, {"step": step})
            self._free()

        self._hand_out("loading", run, then, request)

    def _hand_out(
        self, what: str, run: Callable[[], Any], then: Callable[[Any], None], request: Request
    ) -> None:
        def failed(error: Exception) -> None:
            self.desk.error(request.peer, request.message, refusal_of("failed", error))
            self._free()

        self.is_busy = True
        self.desk.jobs.append(Job(what, run, then, failed))

    def _free(self) -> None:
        self.is_busy = False
        self.go_on()
