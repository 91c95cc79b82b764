"""What a trainer has sent since a server's last checkpoint, for the case that the server dies."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxfleet.ps.messages import Kind, Message

TOGETHER = frozenset({Kind.REDUCE, Kind.BARRIER, Kind.ASSIGN})


@dataclass
class ReplayLog:
    """Pushes to one server by step, and what all trainers do there together.

    What is done together is kept for as long as another trainer may still wait for it: one that is
    a step behind lost its answer with the server, where this trainer had its own.

    Attributes:
        limit_bytes: the most it keeps; 0 keeps nothing, and then no server can be brought level.
        bytes: what it keeps.
        forgotten: the last step of which a push is kept no more, -1 where all are.
    """

    limit_bytes: int
    bytes: int = 0
    forgotten: int = -1
    _steps: dict[int, list[Message]] = field(default_factory=dict)
    _together: list[Message] = field(default_factory=list)

    def add(self, message: Message) -> None:
        """Keeps a push."""
        if self.limit_bytes:
            self._steps.setdefault(message.step, []).append(message)
            self.bytes += _size(message)
        else:
            self.forgotten = max(self.forgotten, message.step)

    def add_together(self, message: Message, step: int) -> None:
        """Keeps a request that all trainers send, until this trainer is two steps further.

        Args:
            message: the request.
            step: where this trainer is.
        """
        if self.limit_bytes and message.kind in TOGETHER:
            self._together = [old for old in self._together if old.step >= step - 1]
            self._together.append(message)

    def together(self, step: int) -> list[Message]:
        """Returns what others may still wait for while this trainer is at a step."""
        return [message for message in self._together if message.step >= step - 1]

    def forget(self, step: int) -> None:
        """Forgets what a checkpoint after a step holds."""
        for old in [known for known in self._steps if known <= step]:
            self.bytes -= sum(map(_size, self._steps.pop(old)))
            self.forgotten = max(self.forgotten, old)

    def rewind(self, step: int) -> None:
        """Forgets what was pushed after a step, from which all go on anew."""
        for void in [known for known in self._steps if known > step]:
            self.bytes -= sum(map(_size, self._steps.pop(void)))

    def after(self, step: int) -> Iterator[tuple[int, list[Message]]]:
        """Yields what was pushed after a step, step by step."""
        for known in sorted(self._steps):
            if known > step:
                yield known, list(self._steps.get(known, ()))

    @property
    def is_full(self) -> bool:
        """Tells whether a checkpoint is due."""
        return bool(self.limit_bytes) and self.bytes >= self.limit_bytes

    def first_step(self) -> int | None:
        """Returns the first step that it has, None where it has none."""
        return min(self._steps, default=None)


def _size(message: Message) -> int:
    return sum(tensor.array.nbytes for tensor in message.tensors)
