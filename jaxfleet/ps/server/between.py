"""Saves and loads: what needs a moment between two steps, when nothing runs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxfleet.checkpoint import PartReceipt, open_checkpoint
from jaxfleet.ps.messages import Kind, Plain
from jaxfleet.ps.server.desk import Desk, Job, RefusedError, Request, is_new, refusal_of, text_of
from jaxfleet.ps.server.held import Held
from jaxfleet.ps.server.own_saves import OwnSaves
from jaxfleet.ps.server.storage import load_state, load_stores, save_part
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
        self.held.progress.follow(request.step)
        self._add(request)

    def add_load(self, request: Request) -> None:
        """Takes a load.

        Raises:
            RefusedError: it does not say of what.
        """
        text_of(request.message, "path")
        self._add(request)

    def _add(self, request: Request) -> None:
        if is_new(request, self.waiting):
            self.waiting.append(request)

    def drop(self, request: Request) -> None:
        """Forgets one that will not be answered."""
        self.waiting = [other for other in self.waiting if other is not request]

    def serve(self) -> None:
        """Starts what waits, where no block is under way."""
        applied = self.held.step
        if not self.waiting or self.is_busy or self.held.progress.is_running:
            return
        for request in list(self.waiting):
            if request.message.kind is Kind.LOAD:
                self._start_load(request)
            elif self._may_save(request, applied):
                self._start_save(request)
            else:
                continue
            self.drop(request)
            if self.is_busy:
                return

    def _may_save(self, request: Request, applied: int) -> bool:
        """Tells whether what a save is about is applied: of an own checkpoint, the sender's."""
        if request.message.body.get("path") is None:
            return self.held.progress.has_applied(request.step, request.trainer)
        return request.step <= applied

    def _start_save(self, request: Request) -> None:
        held, step, path = self.held, self.held.step, request.message.body.get("path")
        if path is None:
            self._start_own(request)
            return
        if request.step != step:
            what = f"a save of step {request.step} came when step {step} was applied"
            self.desk.error(request.peer, request.message, RefusedError("bad_message", what))
            return

        def run() -> PartReceipt:
            arrays = held.machine.views(held.plan.state)
            return save_part(Path(str(path)), held.plan, arrays, step, held.stores)

        self._hand_out("saving", run, lambda receipt: self._saved(request, receipt, step), request)

    def _start_own(self, request: Request) -> None:
        step, steps = self.held.step, self.held.progress.steps()
        if self.own.saved == steps:
            self.desk.answer(request.peer, request.message, Kind.OK, {"step": step})
            return

        def then(receipt: PartReceipt) -> None:
            self.own.saved = steps
            self._saved(request, receipt, step)

        progress = self.held.progress
        run = self.own.write(self.held, progress.number, steps, progress.kinds())
        self._hand_out("saving", run, then, request)

    def _saved(self, request: Request, receipt: PartReceipt, step: int) -> None:
        body: dict[str, Plain] = {"files": receipt.files, "bytes": receipt.bytes, "step": step}
        body["receipt"] = receipt.to_plain()
        self.desk.answer(request.peer, request.message, Kind.OK, body)
        self._free()

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
