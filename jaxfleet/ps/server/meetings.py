"""What all trainers do together: reductions, barriers, and taking in a state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxfleet.ps.messages import Message, Tensor
from jaxfleet.ps.server.desk import RefusedError, Request, tensors_bytes

REDUCTIONS: Mapping[str, Callable[..., np.ndarray]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
GATHER = "gather"

_MOST_WAITING = 1024  # meetings that one trainer waits in

Key = tuple[str, int, str]  # what for, the step, its name


@dataclass
class Meeting:
    """One thing that all trainers do together.

    Attributes:
        key: which.
        requests: who came, with the request.
        answer: the tensors that all get, once all came.
    """

    key: Key
    requests: dict[int, Request] = field(default_factory=dict)
    answer: tuple[Tensor, ...] | None = None

    def is_new_round(self, request: Request) -> bool:
        """Tells whether a trainer that had its answer asks for another meeting of this name."""
        old = self.requests.get(request.trainer)
        if self.answer is None or old is None:
            return False
        return old.message.number < request.message.number  # else it came again, late

    def in_order(self) -> list[Message]:
        """Returns the requests, in the order of the trainers."""
        return [self.requests[trainer].message for trainer in sorted(self.requests)]


@dataclass
class Meetings:
    """All meetings: those that wait, and answers that may be asked for again."""

    _held: dict[Key, Meeting] = field(default_factory=dict)

    def join(self, key: Key, request: Request) -> Meeting:
        """Notes that a trainer came; whoever comes again changes nothing."""
        meeting = self._held.get(key)
        if meeting is None or meeting.is_new_round(request):
            meeting = self._held[key] = Meeting(key)
        old = meeting.requests.get(request.trainer)
        # What came first counts; where the answer goes to may be another connection.
        meeting.requests[request.trainer] = replace(old, peer=request.peer) if old else request
        return meeting

    def waiting(self) -> list[Meeting]:
        """Returns those that are not complete."""
        return [meeting for meeting in self._held.values() if meeting.answer is None]

    def misfit(self, key: Key, message: Message) -> str | None:
        """Says what a request differs in from those that came before it, if it does."""
        meeting = self._held.get(key)
        if meeting is None or meeting.answer is not None:
            return None
        for other in meeting.in_order():
            if _outline(other) != _outline(message):
                return (
                    f"{other.sender} sent {_outline(other)}, {message.sender} {_outline(message)}"
                )
        return None

    def check_room(self, key: Key, request: Request, most_bytes: int) -> None:
        """Refuses to begin more than a server can hold.

        Raises:
            RefusedError: too much waits for others already.
        """
        if key in self._held:
            return
        met = [meeting.requests.get(request.trainer) for meeting in self.waiting()]
        waiting = [old for old in met if old is not None]
        held = sum(tensors_bytes(old.message) for old in [*waiting, request])
        if len(waiting) >= _MOST_WAITING or held > most_bytes:
            what = f"trainer {request.trainer} waits in {len(waiting)} meetings, of {held} bytes"
            raise RefusedError("bad_message", what, hint="wait for answers before asking for more")

    def drop(self, meeting: Meeting) -> None:
        """Forgets a meeting that will not be."""
        self._held.pop(meeting.key, None)

    def forget(self, before: int) -> None:
        """Forgets answers of steps before one."""
        self._held = {
            key: meeting
            for key, meeting in self._held.items()
            if meeting.answer is None or key[1] >= before
        }


def reduce_tensors(how: str, requests: Sequence[Message]) -> tuple[Tensor, ...]:
    """Reduces what trainers sent, in their order."""
    made = []
    for place, first in enumerate(requests[0].tensors):
        arrays = [request.tensors[place].array for request in requests]
        made.append(Tensor(first.name, _reduced(how, arrays)))
    return tuple(made)


def _reduced(how: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    if how == GATHER:
        return np.stack(arrays)
    if len(arrays) == 1:
        return arrays[0].copy()
    reduce = REDUCTIONS[how]
    with np.errstate(all="ignore"):  # what is infinite or no number is so on one device too
        total: np.ndarray = np.asarray(reduce(arrays[0], arrays[1], dtype=arrays[0].dtype))
        for array in arrays[2:]:
            total = np.asarray(reduce(total, array, dtype=total.dtype))
    return total


def why_not_reduced(how: object, message: Message) -> str | None:
    """Says why arrays cannot be reduced so, if they cannot."""
    if how == GATHER:
        return None
    if not isinstance(how, str) or how not in REDUCTIONS:
        return f"there is no reduction {how!r}, only {', '.join(REDUCTIONS)}, {GATHER}"
    for tensor in message.tensors:
        if how in {"and", "or", "xor"} and tensor.array.dtype.kind not in "biu":
            return f"'{tensor.name}' is {tensor.array.dtype}, which has no bits to {how}"
    return None


def _outline(message: Message) -> str:
    arrays = ", ".join(f"{t.name} {t.array.dtype}{list(t.array.shape)}" for t in message.tensors)
    how = message.body.get("how")
    return f"[{arrays}]" if how is None else f"{how} of [{arrays}]"
