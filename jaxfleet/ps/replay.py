"""The replay log: what a trainer sent that a server may lack after a reset or a restart."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxfleet.ps.messages import Kind, Message

TOGETHER = frozenset({Kind.REDUCE, Kind.BARRIER, Kind.ASSIGN})


@dataclass
class ReplayLog:
    """Pushes to one server by step, and the requests that all trainers make there together.

    Where a server may be started again, pushes stay until its own checkpoint holds them. Elsewhere
    they stay until the server has applied them: a connection that breaks loses what it carried.

    Requests made together are kept for as long as another trainer may still wait for them: one
    that is a step behind lost its answer with the server, where this trainer had its own.

    Attributes:
        until_saved: pushes stay until they are in a checkpoint.
        bytes: the size of the pushes that it keeps.
        forgotten: the last step with a push that is no longer kept, -1 where all are.
    """

    until_saved: bool
    bytes: int = 0
    forgotten: int = -1
    _steps: dict[int, list[Message]] = field(default_factory=dict)
    _together: list[Message] = field(default_factory=list)

    def add(self, message: Message) -> None:
        """Keeps a push."""
        self._steps.setdefault(message.step, []).append(message)
        self.bytes += _size(message)

    def add_together(self, message: Message, step: int) -> None:
        """Keeps a request that all trainers send, until this trainer is two steps further.

        Args:
            message: the request.
            step: where this trainer is.
        """
        if self.until_saved and message.kind in TOGETHER:
            self._together = [old for old in self._together if old.step >= step - 1]
            self._together.append(message)

    def together(self, step: int) -> list[Message]:
        """Returns the requests that others may still wait for while this trainer is at a step."""
        return [message for message in self._together if message.step >= step - 1]

    def saved(self, step: int) -> None:
        """Forgets the pushes that a checkpoint after a step holds."""
        for old in [known for known in self._steps if known <= step]:
            self._forget(old)

    def applied(self, step: int) -> None:
        """Notes that a server applied a step, which ends the need for its pushes in some jobs."""
        if not self.until_saved:
            self.saved(step)

    def shrink(self, excess_bytes: int) -> int:
        """Forgets the oldest steps until so many bytes are free; returns how many steps went.

        The newest step stays.
        """
        goal, count = self.bytes - excess_bytes, 0
        for old in sorted(self._steps)[:-1]:
            if self.bytes <= goal:
                break
            self._forget(old)
            count += 1
        return count

    def rewind(self, step: int) -> None:
        """Forgets the pushes after a step, from which all go on anew."""
        for void in [known for known in self._steps if known > step]:
            self.bytes -= sum(map(_size, self._steps.pop(void)))

    def after(self, step: int) -> Iterator[tuple[int, list[Message]]]:
        """Yields the pushes after a step, step by step."""
        for known in sorted(self._steps):
            if known > step:
                yield known, list(self._steps.get(known, ()))

    def first_step(self) -> int | None:
        """Returns the first step that it has, None where it has none."""
        return min(self._steps, default=None)

    def _forget(self, step: int) -> None:
        self.bytes -= sum(map(_size, self._steps.pop(step)))
        self.forgotten = max(self.forgotten, step)


def _size(message: Message) -> int:
    return sum(tensor.array.nbytes for tensor in message.tensors)
