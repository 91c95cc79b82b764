"""Takes gradients of rows in, and applies them to their table once all trainers sent theirs.

What trainers push at a step is summed in their order and applied once: so neither who was first nor
how many servers there are changes a bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxfleet.ps.server.desk import (
    Desk,
    Job,
    RefusedError,
    Request,
    after_of,
    lost_before,
    refusal_of,
    tensors_bytes,
)
from jaxfleet.ps.server.held import Held
from jaxfleet.ps.server.keyed import grads_of, keys_of, rate_of, scores_of, table_of
from jaxfleet.ps.server.table import Table
from jaxfleet.ps.server.table_progress import RowPush

_MOST_AHEAD = 1 << 16  # steps


@dataclass
class RowPushes:
    """The updates of a server's tables.

    Attributes:
        held: what they change.
        desk: where work goes.
        most_bytes: the most that may wait for later steps.
        go_on: is called when rows were updated.
    """

    held: Held
    desk: Desk
    most_bytes: int
    go_on: Callable[[], None]

    def push(self, request: Request) -> None:
        """Takes gradients of rows.

        Raises:
            RefusedError: they are none of this server's, are not finite, or too many wait.
        """
        held, message = self.held, request.message
        table = table_of(message, held)
        keys = keys_of(message, held)
        grads, rate = grads_of(message, table, keys), rate_of(message)
        scores = scores_of(message, table, keys)
        self._check_step(request)
        if not held.progress.follows(request.trainer, after_of(message), table.spec.name):
            raise lost_before(message)
        push = RowPush(
            request,
            keys,
            grads,
            rate,
            adds=bool(message.body.get("deltas")),
            received=held.progress.received_rows(table.spec.name, request.trainer, keys),
            **scores,
        )
        held.progress.push_rows(table.spec.name, push)

    def hand_out(self) -> None:
        """Hands out the tables that the step under way can be applied to."""
        progress = self.held.progress
        for name, pushes in progress.hand_out_tables():
            self._start(self.held.tables[name], pushes, progress.row_step)

    def _check_step(self, request: Request) -> None:
        progress, step = self.held.progress, request.step
        if progress.applied < 0:
            what = f"rows of step {step} came before any state"
            raise RefusedError("bad_message", what, hint="send assign first")
        if step < 1:
            raise RefusedError("bad_message", f"there is no step {step}; they start at 1")
        ahead, waits = step - progress.step, progress.tables.queued_bytes
        too_much = waits + tensors_bytes(request.message) > self.most_bytes
        if ahead > _MOST_AHEAD or (ahead > 0 and too_much):
            what = f"step {step} is {ahead} steps ahead, and {waits} bytes of rows wait already"
            raise RefusedError("bad_message", what, hint="push as far as look-ups were answered")

    def _start(self, table: Table, pushes: Sequence[RowPush], step: int) -> None:
        held, name = self.held, table.spec.name

        def run() -> None:
            table.update(pushes, step)

        def then(_: object) -> None:
            if held.progress.table_ran(name):
                held.extras.forget(held.progress.applied)
            self.go_on()

        def failed(error: Exception) -> None:
            held.progress.tables.take_back(name, step)
            refusal = refusal_of("refused", error)
            for push in pushes:
                self.desk.error(push.request.peer, push.request.message, refusal)
            self.go_on()

        expected_s = table.writing.expected_s(sum(len(push.keys) for push in pushes))
        self.desk.jobs.append(Job(f"step {step}", run, then, failed, expected_s))
