"""Requests for values: pushes of gradients, which start blocks, and pulls of their results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.ps.gradient_encoding import decode_gradients, fit_gradients, has_rows, row_mismatch
from jaxfleet.ps.server.execution_plan import BlockPlan, SentGradients, ServerPlan
from jaxfleet.ps.server.outbox import (
    DeviceTask,
    Outbox,
    Request,
    RequestError,
    is_new,
    missing_push_error,
    names_field,
    previous_push,
    tensors_bytes,
)
from jaxfleet.ps.server.server_links import PartialSums
from jaxfleet.ps.server.state import ServerState
from jaxfleet.transport.messages import Kind, Message, Plain, Tensor

_TOGETHER_BYTES = 1 << 20  # of gradients, of blocks that run as one task

Made = Sequence[Mapping[str, np.ndarray]]
Ready = tuple[BlockPlan, SentGradients]


@dataclass
class PushHandler:
    """Takes gradients and runs the blocks of steps."""

    held: ServerState
    outbox: Outbox
    parts: PartialSums
    most_bytes: int
    resume_work: Callable[[], None]

    def push(self, request: Request) -> None:
        """Takes gradients; rejects those that do not fit the program, and too many queued ones."""
        scheduler, plan = self.held.scheduler, self.held.plan
        message, tensors = request.message, _gradients(request, plan)
        if scheduler.applied < 0:
            what = f"gradients of step {message.step} came before any state"
            raise RequestError("bad_message", what, hint="send assign first")
        misfit = plan.misfit(request.trainer, tensors)
        if misfit is None and message.step < 1:
            misfit = f"there is no step {message.step}; they start at 1"
        if misfit is not None:
            raise RequestError("bad_message", misfit)
        rows = message.body.get("rows")
        rows = rows if isinstance(rows, int) else 0
        other = scheduler.other_rows(message.step, request.trainer, rows)
        if other is not None:
            raise RequestError("refused", other, hint="give all trainers batches of the same size")
        ahead = message.step - scheduler.step
        if ahead > 0 and scheduler.queued_bytes + tensors_bytes(tensors) > self.most_bytes:
            what = f"step {message.step} is {ahead} steps ahead, and"
            what = f"{what} {scheduler.queued_bytes} bytes of later steps wait already"
            raise RequestError("bad_message", what, hint="push as far as the pulls were answered")
        if not scheduler.follows(request.trainer, previous_push(message)):
            raise missing_push_error(message)
        if not message.body.get("idle"):
            scheduler.push(message.step, request.trainer, tensors, rows)
        elif plan.waits or tensors:
            what = "a step without gradients is one of a trainer that the others do not wait for"
            raise RequestError("bad_message", what)
        else:
            scheduler.idle(message.step, request.trainer)

    def hand_out(self) -> None:
        scheduler = self.held.scheduler
        for blocks in _tasks(scheduler.hand_out()):
            self._start(blocks, scheduler.step)

    def _start(self, blocks: Sequence[Ready], step: int) -> None:
        held = self.held

        def run() -> Made:
            return [held.executor.run(block, sent) for block, sent in blocks]

        def then(made: Made) -> None:
            for (block, _), views in zip(blocks, made, strict=True):
                held.take_made(step, views)
                if held.scheduler.ran(block):
                    held.extras.forget(held.scheduler.applied)
                self.parts.send_made(step, views.keys())
            self.resume_work()

        expected_s = sum(held.executor.took_s(block) for block, _ in blocks)
        self.outbox.tasks.append(DeviceTask(f"step {step}", run, then, expected_s=expected_s))


def _gradients(request: Request, plan: ServerPlan) -> tuple[Tensor, ...]:
    """Returns a push's gradients, decoded, in the form that blocks expect: dense or by rows."""
    message = request.message
    how, tensors = message.body.get("encoded", {}), message.tensors
    if how:
        arrays = {tensor.name: tensor.array for tensor in tensors}
        shapes = {name: merge.type.shape for name, merge in plan.merges.items() if name in arrays}
        try:
            if not isinstance(how, dict):
                raise ValueError("it does not say how")  # noqa: TRY004, TRY301  # like all others
            found = decode_gradients(arrays, how, shapes)
        except ValueError as error:
            what = f"trainer {request.trainer}'s encoded gradients of step {message.step}: {error}"
            raise RequestError("bad_message", what) from error
        tensors = tuple(Tensor(name, array) for name, array in found.items())
    if not has_rows(tensors):
        return tensors
    types = {name: merge.type for name, merge in plan.merges.items()}
    fitted, misfit = fit_gradients(tensors, types, plan.by_rows)
    if misfit is not None:
        raise RequestError("bad_message", misfit)
    return fitted


def _tasks(ready: Sequence[Ready]) -> list[list[Ready]]:
    """Groups small blocks into tasks, so that one reply contains all their results.

    Large blocks run before the small ones that they do not depend on: their results are sent while
    the small ones run.
    """
    large = [entry for entry in ready if _bytes_of(entry) > _TOGETHER_BYTES]
    small = [entry for entry in ready if _bytes_of(entry) <= _TOGETHER_BYTES]
    needed = _before({block.index for block, _ in large}, [block for block, _ in ready])
    first = [entry for entry in small if entry[0].index in needed]
    if any(block.after & {other.index for other, _ in large} for block, _ in first):
        return [[entry] for entry in ready]
    rest = [entry for entry in small if entry[0].index not in needed]
    return [*_lots(first), *([entry] for entry in large), *_lots(rest)]


def _before(indices: set[int], blocks: Sequence[BlockPlan]) -> set[int]:
    """Returns the blocks, of those in order, that the given ones depend on."""
    needed, wanted = set[int](), set(indices)
    for block in reversed(blocks):
        if block.index in wanted:
            wanted |= block.after
            needed |= block.after
    return needed


def _lots(small: Sequence[Ready]) -> list[list[Ready]]:
    found: list[list[Ready]] = []
    room = -1
    for entry in small:
        room -= _bytes_of(entry)
        if room < 0:
            found.append([])
            room = _TOGETHER_BYTES - _bytes_of(entry)
        found[-1].append(entry)
    return found


def _bytes_of(entry: Ready) -> int:
    return sum(array.nbytes for array in entry[1].values())


@dataclass
class Pull:
    """An incompletely answered pull; one that `is_empty` only waits for its step."""

    request: Request
    left: list[str]
    is_empty: bool


@dataclass
class PullHandler:
    """Pending pulls, some of them from before the server had a program."""

    outbox: Outbox
    _waiting: list[Pull] = field(default_factory=list)

    def add(self, request: Request, held: ServerState | None) -> None:
        """Queues a pull for `serve`; rejects one of unknown or replaced values."""
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
            self.outbox.refuse(request, refusal)
            return True
        step, trainer, until = request.step, request.trainer, valid_until(request)
        ready = [name for name in pull.left if held.is_ready(name, step, trainer, until)]
        if ready:
            pull.left = [name for name in pull.left if name not in ready]
            self._send(request, ready, held)
        if pull.is_empty and held.scheduler.has_applied(step, trainer):
            self.outbox.reply(request, Kind.VALUES, _stamp(request, held))
            return True
        return not pull.left and not pull.is_empty

    def _check(self, pull: Pull, held: ServerState) -> None:
        step = pull.request.step
        _check_rows(pull.request.message, held.plan)
        for name in pull.left:
            if not held.is_known(name):
                raise RequestError("bad_message", f"{self.outbox.name} does not hold '{name}'")
            if held.is_past(name, step):
                what = f"'{name}' was requested for step {step}"
                what = f"{what}, and {self.outbox.name} is past it, at step {held.step}"
                raise RequestError("bad_message", what, hint="pull before the next push")

    def _send(self, request: Request, names: Sequence[str], held: ServerState) -> None:
        rows = _requested_rows(request.message)
        step = request.step
        found = [(name, _rows(held.value(name, step), rows.get(name))) for name in names]
        held.scheduler.gave(request.trainer, (pair for pair in found if pair[0] not in rows))
        here = tuple(Tensor(name, array) for name, array in found if array is not None)
        if here:
            stamp = _stamp(request, held)
            self.outbox.reply(request, Kind.VALUES, stamp, here)
        rest = [name for name, array in found if array is None]
        if rest:
            self._read(request, rest, held)

    def _read(self, request: Request, names: Sequence[str], held: ServerState) -> None:
        """Sends values that are only on the device."""
        rows = _requested_rows(request.message)

        def then(copies: Mapping[str, np.ndarray]) -> None:
            tensors = tuple(Tensor(name, copies[name]) for name in names)
            held.note_read(request.step, {n: x for n, x in copies.items() if n not in rows})
            stamp = _stamp(request, held)
            self.outbox.reply(request, Kind.VALUES, stamp, tensors)

        def failed(error: Exception) -> None:
            what = f"{', '.join(names)}: no value of step {request.step} ({error!r})"
            self.outbox.refuse(request, RequestError("bad_message", what))

        self.outbox.tasks.append(
            DeviceTask("reading", lambda: held.executor.copies(names, rows), then, failed)
        )


def _requested_rows(message: Message) -> Mapping[str, np.ndarray]:
    """Returns the requested row numbers of each slice; slices without an entry are whole."""
    return {tensor.name: tensor.array for tensor in message.tensors}


def _check_rows(message: Message, plan: ServerPlan) -> None:
    """Rejects a pull of rows that a slice does not have."""
    for name, numbers in _requested_rows(message).items():
        held = plan.types.get(name)
        misfit = "it is not held here" if held is None else row_mismatch(numbers, held)
        if misfit is not None:
            raise RequestError("bad_message", f"'{name}': {misfit}")


def _stamp(request: Request, held: ServerState) -> dict[str, Plain]:
    """Returns the metadata of values: their clock, and the sender's last applied push."""
    return {**held.scheduler.stamp(), "applied": held.scheduler.step_of(request.trainer)}


def valid_until(request: Request) -> int:
    """Last step for which the pulled value may be used."""
    until = request.message.body.get("until")
    return until if isinstance(until, int) else request.step


def _rows(array: np.ndarray | None, numbers: np.ndarray | None) -> np.ndarray | None:
    return array if array is None or numbers is None else np.take(array, numbers, axis=0)
