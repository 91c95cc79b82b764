"""Requests, and the effects of a server's state machine: replies, errors and device tasks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxfleet.errors import CheckpointError, JaxfleetError
from jaxfleet.transport.messages import Kind, Message, Peer, Plain, Tensor

_LONGEST = 2000  # characters of an error
_MOST_WAITING = 512  # requests of one kind and trainer: each is checked on every arrival
# Reads may be repeated; reductions and barriers have their own logs, which hold the arrays.
_ONCE = frozenset(
    {Kind.DEFINE, Kind.ASSIGN, Kind.LEASE, Kind.SAVE, Kind.LOAD, Kind.SHRINK, Kind.BYE}
)
_PUSHES = frozenset({Kind.PUSH, Kind.PUSH_ROWS})
_MOST_ANSWERS = 64  # replies kept; a waiting trainer has few requests in flight


class RequestError(JaxfleetError):
    """A request was rejected; the state is unchanged. `code` determines the client's exception.

    `more` are further fields of the reply.
    """

    def __init__(
        self,
        code: str,
        what: str,
        *,
        hint: str | None = None,
        more: Mapping[str, Plain] = MappingProxyType({}),
    ) -> None:
        super().__init__(what)
        self.code = code
        self.hint = hint
        self.more = more


@dataclass(eq=False)
class Request:
    """A message to be answered, and when it came."""

    peer: Peer
    message: Message
    trainer: int
    since: float

    @property
    def step(self) -> int:
        return self.message.step


@dataclass
class RequestLog:
    """Requests of one process that must not be executed twice, and the last replies."""

    pending: set[int] = field(default_factory=set)
    _answers: dict[int, Message] = field(default_factory=dict)

    def begin(self, message: Message) -> bool:
        """Records a request; returns False for a duplicate, which must not be executed."""
        number = message.number
        if message.kind in _PUSHES or not number:
            return True
        if number in self.pending or number in self._answers:
            return False
        if message.kind in _ONCE:
            self.pending.add(number)
        return True

    def end(self, answer: Message) -> None:
        """Keeps a reply that may be needed again: any error, and those to requests of `begin`."""
        number = answer.number
        if number in self.pending or (answer.kind is Kind.ERROR and number):
            self.pending.discard(number)
            self._answers[number] = answer
            if len(self._answers) > _MOST_ANSWERS:
                del self._answers[next(iter(self._answers))]

    def answer(self, number: int) -> Message | None:
        return self._answers.get(number)


@dataclass(frozen=True)
class DeviceTask:
    """Work that takes time; tasks run in order.

    Attributes:
        what: the activity that the server reports meanwhile.
        run: does the work; may run in another thread.
        then: takes the result, in the server's thread.
        failed: takes an error that concerns only one request; without it, an error ends the server.
        expected_s: expected duration, from earlier ones.
        is_beside: it shares nothing with other tasks, and may run concurrently.
    """

    what: str
    run: Callable[[], Any]
    then: Callable[[Any], None]
    failed: Callable[[Exception], None] | None = None
    expected_s: float = math.inf
    is_beside: bool = False

    def attempt(self) -> tuple[Any, Exception | None]:
        try:
            return self.run(), None
        except Exception as error:  # noqa: BLE001  # reported to the trainers
            return None, error


@dataclass
class Outbox:
    """Collects outgoing messages and tasks.

    Every reply to a request of a trainer has the fields of `news`.
    """

    name: str = "server"
    out: list[tuple[Peer, Message]] = field(default_factory=list)
    tasks: list[DeviceTask] = field(default_factory=list)
    errors: int = 0
    news: Mapping[str, Plain] = field(default_factory=dict)

    def answer(
        self,
        peer: Peer,
        message: Message,
        kind: Kind,
        body: Mapping[str, Plain] | None = None,
        tensors: tuple[Tensor, ...] = (),
    ) -> None:
        reply = Message(kind, self.name, message.step, message.number, body or {}, tensors)
        self.out.append((peer, reply))

    def reply(
        self,
        request: Request,
        kind: Kind,
        body: Mapping[str, Plain] | None = None,
        tensors: tuple[Tensor, ...] = (),
    ) -> None:
        body = {**self.news, **(body or {})}
        self.answer(request.peer, request.message, kind, body, tensors)

    def refuse(self, request: Request, refusal: RequestError) -> None:
        self.error(request.peer, request.message, refusal)

    def error(self, peer: Peer, message: Message, refusal: RequestError) -> None:
        self.errors += 1
        what = refusal.what  # may quote the request, so it is truncated
        what = what if len(what) <= _LONGEST else f"{what[:_LONGEST]} ..."
        body = {**refusal.more, "error": refusal.code, "what": what, "hint": refusal.hint}
        self.answer(peer, message, Kind.ERROR, body)


def request_error(code: str, error: Exception) -> RequestError:
    """Returns an exception as an error for a peer, with its notes."""
    code = "checkpoint" if isinstance(error, CheckpointError) else code
    notes = "\n".join(getattr(error, "__notes__", ()))
    text = str(error) or repr(error)
    return RequestError(code, f"{text}\n{notes}" if notes else text)


def is_new(request: Request, waiting: Sequence[Request]) -> bool:
    """Whether a request is not a duplicate of a pending one.

    Raises:
        RequestError: its sender has too many pending requests.
    """
    others = [other.message for other in waiting if other.trainer == request.trainer]
    message = request.message
    if any(o.number == message.number and o.kind is message.kind for o in others):
        return False
    if len(others) >= _MOST_WAITING:
        what = f"{_MOST_WAITING} requests of {message.sender} wait already"
        raise RequestError("bad_message", what, hint="wait for answers before asking for more")
    return True


def previous_push(message: Message) -> int:
    """Returns the step of the sender's preceding push; -1 if not specified."""
    after = message.body.get("after")
    return after if isinstance(after, int) else -1


def missing_push_error(message: Message) -> RequestError:
    """Returns the error for a missing preceding push: the sender sends a hello and it again."""
    what = f"{message.sender}'s push before that of step {message.step} was lost on its way"
    return RequestError("stranger", what, hint="say hello, and send it again")


def tensors_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the total bytes of arrays."""
    return sum(tensor.array.nbytes for tensor in tensors)


def string_field(message: Message, name: str) -> str:
    """Returns a string field of a message's body."""
    value = message.body.get(name)
    if not isinstance(value, str):
        raise RequestError("bad_message", f"a {message.kind.value} needs '{name}', a string")
    return value


def names_field(message: Message) -> tuple[str, ...]:
    """Returns the list of names in a message's body."""
    value = message.body.get("names")
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise RequestError("bad_message", f"a {message.kind.value} needs 'names', a list")
    return tuple(str(name) for name in value)
