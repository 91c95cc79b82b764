"""What leaves a server's state machine: answers, errors, and work for the machine."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxfleet.errors import CheckpointError, JaxfleetError
from jaxfleet.ps.messages import Kind, Message, Plain, Tensor
from jaxfleet.ps.network import Peer

_LONGEST = 2000  # characters of an error
_MOST_WAITING = 512  # requests of a kind, of one trainer: each is looked at as others come


class RefusedError(JaxfleetError):
    """A request cannot be done; the state is as it was.

    Args:
        code: what a client makes an exception of: `refused`, `bad_message`, ...
        what: what is wrong.
        hint: what the user can do.
    """

    def __init__(self, code: str, what: str, *, hint: str | None = None) -> None:
        super().__init__(what)
        self.code = code
        self.hint = hint


@dataclass(frozen=True)
class Request:
    """A message that is to be answered.

    Attributes:
        peer: where the answer goes.
        message: the request.
        trainer: who asked.
        since: when it came.
    """

    peer: Peer
    message: Message
    trainer: int
    since: float

    @property
    def step(self) -> int:
        """The step that it is about."""
        return self.message.step


@dataclass(frozen=True)
class Job:
    """Work that takes a while, done in the order it was given.

    Attributes:
        what: what the server says that it does meanwhile.
        run: does it; may run on another thread.
        then: takes what it gave, on the server's own thread.
        failed: takes an error that concerns nobody but who asked; without it the server ends.
        expected_s: how long it takes, by what it took before.
    """

    what: str
    run: Callable[[], Any]
    then: Callable[[Any], None]
    failed: Callable[[Exception], None] | None = None
    expected_s: float = math.inf

    def attempt(self) -> tuple[Any, Exception | None]:
        """Does it; returns what it gave, or the exception that it ended in."""
        try:
            return self.run(), None
        except Exception as error:  # noqa: BLE001  # whatever it is, the trainers hear of it
            return None, error


@dataclass
class Desk:
    """Collects what leaves.

    Attributes:
        name: the server's: `server 0`.
        out: messages with the connections they go to.
        jobs: work that is to be started.
        errors: how many errors were sent.
    """

    name: str = "server"
    out: list[tuple[Peer, Message]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    errors: int = 0

    def answer(
        self,
        peer: Peer,
        message: Message,
        kind: Kind,
        body: Mapping[str, Plain] | None = None,
        tensors: tuple[Tensor, ...] = (),
    ) -> None:
        """Answers a request."""
        reply = Message(kind, self.name, message.step, message.number, body or {}, tensors)
        self.out.append((peer, reply))

    def error(self, peer: Peer, message: Message, refusal: RefusedError) -> None:
        """Answers a request by an error."""
        self.errors += 1
        what = refusal.what  # may repeat what came, so it is cut
        what = what if len(what) <= _LONGEST else f"{what[:_LONGEST]} ..."
        body = {"error": refusal.code, "what": what, "hint": refusal.hint}
        self.answer(peer, message, Kind.ERROR, body)


def refusal_of(code: str, error: Exception) -> RefusedError:
    """Returns an exception as an error for a peer, with its notes."""
    code = "checkpoint" if isinstance(error, CheckpointError) else code
    notes = "\n".join(getattr(error, "__notes__", ()))
    text = str(error) or repr(error)
    return RefusedError(code, f"{text}\n{notes}" if notes else text)


def is_new(request: Request, waiting: Sequence[Request]) -> bool:
    """Tells whether a request is none that waits already and came again.

    Raises:
        RefusedError: it is one more than a trainer may have waiting.
    """
    others = [other.message for other in waiting if other.trainer == request.trainer]
    message = request.message
    if any(o.number == message.number and o.kind is message.kind for o in others):
        return False
    if len(others) >= _MOST_WAITING:
        what = f"{_MOST_WAITING} requests of {message.sender} wait already"
        raise RefusedError("bad_message", what, hint="wait for answers before asking for more")
    return True


def after_of(message: Message) -> int:
    """Returns the step of the push before one, of the same sender; -1 where it does not say."""
    after = message.body.get("after")
    return after if isinstance(after, int) else -1


def lost_before(message: Message) -> RefusedError:
    """Returns that a push is missing before one: its sender says hello, and sends them anew."""
    what = f"{message.sender}'s push before that of step {message.step} was lost on its way"
    return RefusedError("stranger", what, hint="say hello, and send it again")


def tensors_bytes(message: Message) -> int:
    """Returns how many bytes the arrays of a message have."""
    return sum(tensor.array.nbytes for tensor in message.tensors)


def text_of(message: Message, name: str) -> str:
    """Returns a string of a message's body.

    Raises:
        RefusedError: it has none.
    """
    value = message.body.get(name)
    if not isinstance(value, str):
        raise RefusedError("bad_message", f"a {message.kind.value} needs '{name}', a string")
    return value


def names_of(message: Message) -> tuple[str, ...]:
    """Returns the names that a message lists.

    Raises:
        RefusedError: it lists none.
    """
    value = message.body.get("names")
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise RefusedError("bad_message", f"a {message.kind.value} needs 'names', a list")
    return tuple(str(name) for name in value)
