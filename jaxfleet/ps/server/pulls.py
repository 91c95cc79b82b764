"""Hands values out: each as soon as its step has made it, whoever asked before or after."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.ps.messages import Kind, Plain, Tensor
from jaxfleet.ps.server.desk import Desk, Job, RefusedError, Request, is_new, names_of
from jaxfleet.ps.server.held import Held
from jaxfleet.ps.server.rows import check_rows, rows_asked_for


@dataclass
class Pull:
    """A pull of which something is still to be answered.

    Attributes:
        request: the pull.
        left: the names that were not answered yet.
        is_empty: it asks for nothing but that its step is applied.
    """

    request: Request
    left: list[str]
    is_empty: bool


@dataclass
class Pulls:
    """The pulls that wait, some of them since before the server had a program.

    Attributes:
        desk: where answers and work go.
    """

    desk: Desk
    _waiting: list[Pull] = field(default_factory=list)

    def add(self, request: Request, held: Held | None) -> None:
        """Takes a pull, which `serve` answers.

        Raises:
            RefusedError: the server holds no such thing, or not of that step any more.
        """
        names = list(dict.fromkeys(names_of(request.message)))
        pull = Pull(request, names, is_empty=not names)
        if held is not None:
            held.progress.follow(request.step)
            if held.step >= 0:
                self._check(pull, held)
        if is_new(request, self.requests()):
            self._waiting.append(pull)

    def requests(self) -> list[Request]:
        """Returns those that wait."""
        return [pull.request for pull in self._waiting]

    def drop(self, request: Request) -> None:
        """Forgets one that will not be answered."""
        self._waiting = [pull for pull in self._waiting if pull.request is not request]

    def serve(self, held: Held) -> None:
        """Answers what is ready."""
        if held.step >= 0 and self._waiting:
            self._waiting = [pull for pull in self._waiting if not self._is_done(pull, held)]

    def _is_done(self, pull: Pull, held: Held) -> bool:
        """Answers what is ready of a pull; tells whether that was the last of it."""
        request = pull.request
        try:
            self._check(pull, held)
        except RefusedError as refusal:
            self.desk.error(request.peer, request.message, refusal)
            return True
        step, trainer, until = request.step, request.trainer, until_of(request)
        ready = [name for name in pull.left if held.is_ready(name, step, trainer, until)]
        if ready:
            pull.left = [name for name in pull.left if name not in ready]
            self._send(request, ready, held)
        if pull.is_empty and held.progress.has_applied(step, trainer):
            self.desk.answer(request.peer, request.message, Kind.VALUES, _stamp(request, held))
            return True
        return not pull.left and not pull.is_empty

    def _check(self, pull: Pull, held: Held) -> None:
        step = pull.request.step
        check_rows(pull.request.message, held.plan)
        for name in pull.left:
            if not held.is_known(name):
                raise RefusedError("bad_message", f"{self.desk.name} does not hold '{name}'")
            if held.is_past(name, step):
                what = f"'{name}' is asked for as of step {step}"
                what = f"{what}, and {self.desk.name} is past it, at step {held.step}"
                raise RefusedError("bad_message", what, hint="pull before the next push")

    def _send(self, request: Request, names: Sequence[str], held: Held) -> None:
        rows = rows_asked_for(request.message)
        found = [(name, _rows(held.value(name), rows.get(name))) for name in names]
        held.progress.gave(request.trainer, (pair for pair in found if pair[0] not in rows))
        here = tuple(Tensor(name, array) for name, array in found if array is not None)
        if here:
            stamp = _stamp(request, held)
            self.desk.answer(request.peer, request.message, Kind.VALUES, stamp, here)
        rest = [name for name, array in found if array is None]
        if rest:
            self._read(request, rest, held)

    def _read(self, request: Request, names: Sequence[str], held: Held) -> None:
        """Answers by values that are on the device alone."""
        rows = rows_asked_for(request.message)

        def then(copies: Mapping[str, np.ndarray]) -> None:
            tensors = tuple(Tensor(name, copies[name]) for name in names)
            stamp = _stamp(request, held)
            self.desk.answer(request.peer, request.message, Kind.VALUES, stamp, tensors)

        def failed(error: Exception) -> None:
            what = f"{', '.join(names)}: no value as of step {request.step} ({error!r})"
            self.desk.error(request.peer, request.message, RefusedError("bad_message", what))

        self.desk.jobs.append(
            Job("reading", lambda: held.machine.copies(names, rows), then, failed)
        )


def _stamp(request: Request, held: Held) -> dict[str, Plain]:
    """Returns what goes with values: how old they are, and which of the sender's pushes are in."""
    return {**held.progress.stamp(), "applied": held.progress.step_of(request.trainer)}


def until_of(request: Request) -> int:
    """Returns the last step after which it is used what a pull asks for."""
    until = request.message.body.get("until")
    return until if isinstance(until, int) else request.step


def _rows(array: np.ndarray | None, numbers: np.ndarray | None) -> np.ndarray | None:
    """Returns the rows of a slice that are asked for, or all of it."""
    return array if array is None or numbers is None else np.take(array, numbers, axis=0)
