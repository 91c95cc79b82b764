"""Handler of pushes: decompresses gradients, and starts blocks that can run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxfleet.ps.gradient_encoding import decode_gradients
from jaxfleet.ps.server.execution_plan import BlockPlan, ServerPlan
from jaxfleet.ps.server.outbox import (
    DeviceTask,
    Outbox,
    Request,
    RequestError,
    missing_push_error,
    previous_push,
    tensors_bytes,
)
from jaxfleet.ps.server.server_links import PartialSums
from jaxfleet.ps.server.sparse_update import SentGradients
from jaxfleet.ps.server.state import ServerState
from jaxfleet.transport.messages import Tensor


def decompress(request: Request, plan: ServerPlan) -> Request:
    """Returns a push with all gradients decoded."""
    message = request.message
    how = message.body.get("encoded", {})
    if not how:
        return request
    arrays = {tensor.name: tensor.array for tensor in message.tensors}
    shapes = {name: merge.type.shape for name, merge in plan.merges.items() if name in arrays}
    try:
        if not isinstance(how, dict):
            raise ValueError("it does not say how")  # noqa: TRY004, TRY301  # like all others
        found = decode_gradients(arrays, how, shapes)
    except ValueError as error:
        what = f"trainer {request.trainer}'s encoded gradients of step {message.step}: {error}"
        raise RequestError("bad_message", what) from error
    tensors = tuple(Tensor(name, array) for name, array in found.items())
    return replace(request, message=replace(message, tensors=tensors))


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
        """Takes gradients.

        Raises:
            RequestError: they do not fit the program, or too many are queued.
        """
        scheduler, message = self.held.scheduler, request.message
        if scheduler.applied < 0:
            what = f"gradients of step {message.step} came before any state"
            raise RequestError("bad_message", what, hint="send assign first")
        misfit = self.held.plan.misfit(request.trainer, message.tensors)
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
        if ahead > 0 and scheduler.queued_bytes + tensors_bytes(message) > self.most_bytes:
            what = f"step {message.step} is {ahead} steps ahead, and"
            what = f"{what} {scheduler.queued_bytes} bytes of later steps wait already"
            raise RequestError("bad_message", what, hint="push as far as the pulls were answered")
        if not scheduler.follows(request.trainer, previous_push(message)):
            raise missing_push_error(message)
        scheduler.push(message.step, request.trainer, message.tensors, rows)

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
                held.host.update(views)
                if held.scheduler.ran(block):
                    held.extras.forget(held.scheduler.applied)
                self.parts.send_made(step, views.keys())
            self.resume_work()

        expected_s = sum(held.executor.took_s(block) for block, _ in blocks)
        self.outbox.tasks.append(DeviceTask(f"step {step}", run, then, expected_s=expected_s))


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
