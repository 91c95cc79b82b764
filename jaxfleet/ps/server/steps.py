"""Takes gradients in, and hands blocks to the machine as soon as they can run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxfleet.ps.server.desk import (
    Desk,
    Job,
    RefusedError,
    Request,
    after_of,
    lost_before,
    tensors_bytes,
)
from jaxfleet.ps.server.held import Held
from jaxfleet.ps.server.parts import Parts
from jaxfleet.ps.server.plan import BlockPlan
from jaxfleet.ps.server.row_blocks import Sent

_TOGETHER_BYTES = 1 << 20  # of gradients, of blocks that run as one job

Made = Sequence[Mapping[str, np.ndarray]]
Ready = tuple[BlockPlan, Sent]


@dataclass
class Steps:
    """The steps of a server.

    Attributes:
        held: what they change.
        desk: where work goes.
        parts: what crosses from server to server.
        most_bytes: the most that may wait for later steps.
        go_on: is called when blocks ran.
    """

    held: Held
    desk: Desk
    parts: Parts
    most_bytes: int
    go_on: Callable[[], None]

    def push(self, request: Request) -> None:
        """Takes gradients.

        Raises:
            RefusedError: they are not of this program, or too many wait.
        """
        progress, message = self.held.progress, request.message
        if progress.applied < 0:
            what = f"gradients of step {message.step} came before any state"
            raise RefusedError("bad_message", what, hint="send assign first")
        misfit = self.held.plan.misfit(request.trainer, message.tensors)
        if misfit is None and message.step < 1:
            misfit = f"there is no step {message.step}; they start at 1"
        if misfit is not None:
            raise RefusedError("bad_message", misfit)
        rows = message.body.get("rows")
        rows = rows if isinstance(rows, int) else 0
        other = progress.other_rows(message.step, request.trainer, rows)
        if other is not None:
            raise RefusedError("refused", other, hint="give all trainers batches of the same size")
        ahead = message.step - progress.step
        if ahead > 0 and progress.queued_bytes + tensors_bytes(message) > self.most_bytes:
            what = f"step {message.step} is {ahead} steps ahead, and"
            what = f"{what} {progress.queued_bytes} bytes of later steps wait already"
            raise RefusedError("bad_message", what, hint="push as far as the pulls were answered")
        if not progress.follows(request.trainer, after_of(message)):
            raise lost_before(message)
        progress.push(message.step, request.trainer, message.tensors, rows)

    def hand_out(self) -> None:
        """Hands out the blocks that can run now."""
        progress = self.held.progress
        for blocks in _jobs(progress.hand_out()):
            self._start(blocks, progress.step)

    def _start(self, blocks: Sequence[Ready], step: int) -> None:
        held = self.held

        def run() -> Made:
            return [held.machine.run(block, sent) for block, sent in blocks]

        def then(made: Made) -> None:
            for (block, _), views in zip(blocks, made, strict=True):
                held.host.update(views)
                if held.progress.ran(block):
                    held.extras.forget(held.progress.applied)
                self.parts.send_made(step, views.keys())
            self.go_on()

        expected_s = sum(held.machine.took_s(block) for block, _ in blocks)
        self.desk.jobs.append(Job(f"step {step}", run, then, expected_s=expected_s))


def _jobs(ready: Sequence[Ready]) -> list[list[Ready]]:
    """Puts small blocks together, each lot one job: one answer then says what all of them made.

    Large blocks go before the small ones that they do not come after: what they made is on its way
    while the small ones run.
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
    """Returns the blocks, of those in order, that must run before some do."""
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
