"""Answers look-ups of rows: each once the step before its own was applied to its table."""

from dataclasses import dataclass, field

import numpy as np

from jaxfleet.ps.messages import Kind, Tensor
from jaxfleet.ps.server.desk import Desk, Job, RefusedError, Request, is_new, refusal_of
from jaxfleet.ps.server.held import Held
from jaxfleet.ps.server.keyed import keys_of, table_of
from jaxfleet.ps.server.table import Table


@dataclass
class LookUps:
    """The look-ups that wait, some of them since before the server had a program.

    Attributes:
        desk: where answers and work go.
        waiting: in the order they came.
    """

    desk: Desk
    waiting: list[Request] = field(default_factory=list)

    def add(self, request: Request, held: Held | None) -> None:
        """Takes a look-up, which `serve` answers.

        Raises:
            RefusedError: the server has no such table, or not those keys.
        """
        if held is not None:
            table_of(request.message, held)
            keys_of(request.message, held)
        if is_new(request, self.waiting):
            self.waiting.append(request)

    def drop(self, request: Request) -> None:
        """Forgets one that will not be answered."""
        self.waiting = [other for other in self.waiting if other is not request]

    def serve(self, held: Held) -> None:
        """Hands out those whose step is there."""
        if held.step >= 0 and self.waiting:
            self.waiting = [request for request in self.waiting if not self._began(request, held)]

    def _began(self, request: Request, held: Held) -> bool:
        """Hands a look-up out if its step is there; tells whether it is done with."""
        try:
            table = table_of(request.message, held)
            keys = keys_of(request.message, held)
        except RefusedError as refusal:  # it came before there was a program
            self.desk.error(request.peer, request.message, refusal)
            return True
        if not held.progress.may_look_up(table.spec.name, request.step):
            return False
        self._start(request, table, keys, held)
        return True

    def _start(self, request: Request, table: Table, keys: np.ndarray, held: Held) -> None:
        peer, message = request.peer, request.message

        def run() -> np.ndarray:
            return table.look_up(keys, message.step)

        def then(rows: np.ndarray) -> None:
            held.progress.gave_rows(table.spec.name, request.trainer, keys, rows)
            self.desk.answer(peer, message, Kind.ROWS, {}, (Tensor("rows", rows),))

        def failed(error: Exception) -> None:
            self.desk.error(peer, message, refusal_of("failed", error))

        expected_s = table.reading.expected_s(len(keys))
        what = f"looking rows of '{table.spec.name}' up"
        self.desk.jobs.append(Job(what, run, then, failed, expected_s))
