"""Handler of pulls: sends each value as soon as its step has computed it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.ps.server.outbox import DeviceTask, Outbox, Request, RequestError, is_new, names_field
from jaxfleet.ps.server.row_requests import check_rows, requested_rows
from jaxfleet.ps.server.state import ServerState
from jaxfleet.transport.messages import Kind, Plain, Tensor


@dataclass
class Pull:
    """An incompletely answered pull.

    Attributes:
        is_empty: it has no names, and only waits for its step.
    """

    request: Request
    left: list[str]
    is_empty: bool


@dataclass
class PullHandler:
    """Pending pulls, some of them from before the server had a program."""

    outbox: Outbox
    _waiting: list[Pull] = field(default_factory=list)

    def add(self, request: Request, held: ServerState | None) -> None:
        """Queues a pull for `serve`.

        Raises:
            RequestError: the server does not have a value, or only that of a later step.
        """
        names = list(dict.fromkeys(names_field(request.message)))
        pull = Pull(request, names, is_empty=not names)
        if held is not None:
            held.scheduler.follow(request.step)
            if held.step >= 0:
                self._check(pull, held)
        if is_new(request, self.requests()):
            self._waiting.append(pull)

    def requests(self) -> list[Request]:
        return [pull.request for pull in self._waiting]

    def drop(self, request: Request) -> None:
        self._waiting = [pull for pull in self._waiting if pull.request is not request]

    def serve(self, held: ServerState) -> None:
        if held.step >= 0 and self._waiting:
            self._waiting = [pull for pull in self._waiting if not self._is_done(pull, held)]

    def _is_done(self, pull: Pull, held: ServerState) -> bool:
        """Sends the values that are ready; returns whether the pull is complete."""
        request = pull.request
        try:
            self._check(pull, held)
        except RequestError as refusal:
            self.outbox.error(request.peer, request.message, refusal)
            return True
        step, trainer, until = request.step, request.trainer, valid_until(request)
        ready = [name for name in pull.left if held.is_ready(name, step, trainer, until)]
        if ready:
            pull.left = [name for name in pull.left if name not in ready]
            self._send(request, ready, held)
        if pull.is_empty and held.scheduler.has_applied(step, trainer):
            self.outbox.answer(request.peer, request.message, Kind.VALUES, _stamp(request, held))
            return True
        return not pull.left and not pull.is_empty

    def _check(self, pull: Pull, held: ServerState) -> None:
        step = pull.request.step
        check_rows(pull.request.message, held.plan)
        for name in pull.left:
            if not held.is_known(name):
                raise RequestError("bad_message", f"{self.outbox.name} does not hold '{name}'")
            if held.is_past(name, step):
                what = f"'{name}' is asked for as of step {step}"
                what = f"{what}, and {self.outbox.name} is past it, at step {held.step}"
                raise RequestError("bad_message", what, hint="pull before the next push")

    def _send(self, request: Request, names: Sequence[str], held: ServerState) -> None:
        rows = requested_rows(request.message)
        found = [(name, _rows(held.value(name), rows.get(name))) for name in names]
        held.scheduler.gave(request.trainer, (pair for pair in found if pair[0] not in rows))
        here = tuple(Tensor(name, array) for name, array in found if array is not None)
        if here:
            stamp = _stamp(request, held)
            self.outbox.answer(request.peer, request.message, Kind.VALUES, stamp, here)
        rest = [name for name, array in found if array is None]
        if rest:
            self._read(request, rest, held)

    def _read(self, request: Request, names: Sequence[str], held: ServerState) -> None:
        """Sends values that are only on the device."""
        rows = requested_rows(request.message)

        def then(copies: Mapping[str, np.ndarray]) -> None:
            tensors = tuple(Tensor(name, copies[name]) for name in names)
            stamp = _stamp(request, held)
            self.outbox.answer(request.peer, request.message, Kind.VALUES, stamp, tensors)

        def failed(error: Exception) -> None:
            what = f"{', '.join(names)}: no value as of step {request.step} ({error!r})"
            self.outbox.error(request.peer, request.message, RequestError("bad_message", what))

        self.outbox.tasks.append(
            DeviceTask("reading", lambda: held.executor.copies(names, rows), then, failed)
        )


def _stamp(request: Request, held: ServerState) -> dict[str, Plain]:
    """Returns the metadata of values: their clock, and the sender's last applied push."""
    return {**held.scheduler.stamp(), "applied": held.scheduler.step_of(request.trainer)}


def valid_until(request: Request) -> int:
    """Last step for which the pulled value may be used."""
    until = request.message.body.get("until")
    return until if isinstance(until, int) else request.step


def _rows(array: np.ndarray | None, numbers: np.ndarray | None) -> np.ndarray | None:
    return array if array is None or numbers is None else np.take(array, numbers, axis=0)
