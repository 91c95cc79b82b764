"""The pushes that a trainer keeps until servers have them in checkpoints, or have applied them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from jaxfleet.observability.notices import alert
from jaxfleet.transport.messages import Kind, Message

COLLECTIVE_KINDS = frozenset({Kind.REDUCE, Kind.BARRIER, Kind.ASSIGN})
_SAVE_AGAIN_S = 10.0  # after a server lacked space for its checkpoint
_MOST_FULL = 4  # times the limit, while servers lack space
_UNAPPLIED_BYTES = 1 << 28  # of pushes kept until they are applied


@dataclass
class ReplayLog:
    """Pushes to one server by step, and the collective requests of all trainers to it.

    With `until_saved`, as servers may be restarted, pushes are kept until the server's recovery
    checkpoint contains them. Otherwise they are kept until the server has applied them, since a
    broken connection loses messages in flight. `forgotten` is the last step with a discarded push.

    Collective requests are kept while another trainer may still wait for them: one that is a step
    behind lost its reply with the server, where this trainer had received its own.
    """

    until_saved: bool
    bytes: int = 0
    forgotten: int = -1
    _steps: dict[int, list[Message]] = field(default_factory=dict)
    _together: list[tuple[int, Message]] = field(default_factory=list)  # with the step of each

    def add(self, message: Message, step: int | None = None) -> None:
        """Keeps a message until its step, or the given one, is applied or saved."""
        self._steps.setdefault(message.step if step is None else step, []).append(message)
        self.bytes += _size(message)

    def add_together(self, message: Message, step: int) -> None:
        """Keeps a collective request of a step until this trainer is two steps further."""
        if self.until_saved and message.kind in COLLECTIVE_KINDS:
            kept = [
                (at, old) for at, old in self._together if at >= step - 1 and old is not message
            ]
            self._together = [*kept, (step, message)]

    def restart(self, step: int) -> None:
        """Keeps the collective requests as those of a step, to which all have returned."""
        self._together = [(step, message) for _, message in self._together]

    def together(self, step: int) -> list[Message]:
        """Returns the requests that others may still wait for while this trainer is at a step."""
        return [message for at, message in self._together if at >= step - 1]

    def saved(self, step: int) -> None:
        """Discards the pushes that a checkpoint after a step contains."""
        for old in [known for known in self._steps if known <= step]:
            self._forget(old)

    def applied(self, step: int) -> None:
        """Discards the pushes of an applied step, unless they are kept until saved."""
        if not self.until_saved:
            self.saved(step)

    def shrink(self, excess_bytes: int) -> int:
        """Discards the oldest steps until this many bytes are free; returns the number discarded.

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
        """Discards the pushes after a step, from which all trainers restart."""
        for void in [known for known in self._steps if known > step]:
            self.bytes -= sum(map(_size, self._steps.pop(void)))
        self.forgotten = min(self.forgotten, step)  # a server that lacks the later ones is right

    def first_after(self, step: int) -> int | None:
        """Returns the first step after one whose pushes are kept."""
        return min((known for known in self._steps if known > step), default=None)

    def after(self, step: int) -> Iterator[tuple[int, list[Message]]]:
        for known in sorted(self._steps):
            if known > step:
                yield known, list(self._steps.get(known, ()))

    def first_step(self) -> int | None:
        return min(self._steps, default=None)

    def _forget(self, step: int) -> None:
        self.bytes -= sum(map(_size, self._steps.pop(step)))
        self.forgotten = max(self.forgotten, step)


def _size(message: Message) -> int:
    return sum(tensor.array.nbytes for tensor in message.tensors)


@dataclass
class ReplayBudget:
    """The pushes kept for all servers together.

    At most `limit_bytes` are kept until recovery checkpoints contain them. It is 0 if servers are
    never restarted: pushes are then kept until applied.
    """

    name: str
    logs: Sequence[ReplayLog]
    limit_bytes: int
    clock: Callable[[], float]
    _save_at: float = 0.0  # when to request checkpoints again
    _has_warned: bool = False

    @property
    def bytes(self) -> int:
        return sum(log.bytes for log in self.logs)

    @property
    def is_full(self) -> bool:
        return self._keeps(self.limit_bytes)

    @property
    def is_half_full(self) -> bool:
        """Whether to request checkpoints now, with room for pushes until they are written."""
        return self._keeps(self.limit_bytes / 2)

    def _keeps(self, least: float) -> bool:
        return 0 < least <= self.bytes and self.clock() >= self._save_at

    def put_off_saving(self) -> None:
        """Postpones checkpoint requests: a server lacks space, so pushes are kept meanwhile."""
        self._save_at = self.clock() + _SAVE_AGAIN_S

    def forget_saved(self, server: int, step: int) -> None:
        """Discards the pushes that a server's checkpoint after a step contains."""
        self.logs[server].saved(step)

    def bound(self) -> None:
        """Discards the oldest pushes while servers do not apply or save them."""
        most = _MOST_FULL * self.limit_bytes or _UNAPPLIED_BYTES
        if (excess := self.bytes - most) > 0:
            fullest = max(self.logs, key=lambda log: log.bytes)
            if fullest.shrink(excess) and self.limit_bytes and not self._has_warned:
                self._has_warned = True
                alert(
                    f"{self.name} keeps {most} bytes of pushes that servers have no room to "
                    "save, and forgets the oldest: a server that dies now ends the job"
                )
