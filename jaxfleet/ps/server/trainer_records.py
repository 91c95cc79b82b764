"""Records of trainers: the request log of each, and on disk those that have departed."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from jaxfleet.observability.notices import alert
from jaxfleet.transport.messages import Kind, Message, Plain

# Reads may be repeated; reductions and barriers have their own logs, which hold the arrays.
_ONCE = frozenset({Kind.DEFINE, Kind.ASSIGN, Kind.SAVE, Kind.LOAD, Kind.SHRINK, Kind.BYE})
_PUSHES = frozenset({Kind.PUSH, Kind.PUSH_ROWS})
_MOST_ANSWERS = 64  # replies kept; a waiting trainer has few requests in flight


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


_FILE_NAME = "byes.json"
_VALID_S = 600.0  # without launch ids, a later start belongs to another run


@dataclass(frozen=True)
class Departures:
    """The trainers that had left when a server was killed.

    Attributes:
        sessions: sessions of those that said bye.
        present: sessions of the others that had connected.
        is_certain: recorded in this launch of the job; otherwise possibly in an earlier one.
    """

    trainers: int
    sessions: dict[int, Plain]
    present: dict[int, Plain]
    is_certain: bool = False

    def is_of_another_run(self, trainer: int, session: Plain) -> bool:
        """Whether a trainer's hello shows that those that left were of an earlier run."""
        known = self.sessions if self.is_certain else {**self.present, **self.sessions}
        return known.get(trainer, session) != session


@dataclass(frozen=True)
class DepartureRecord:
    """A file beside a server's recovery checkpoints.

    Attributes:
        launch_id: distinguishes launches of the job; None if unavailable.
    """

    folder: Path
    launch_id: str | None = None

    def write(self, left: Departures) -> None:
        """Writes the record before the bye is answered; a failure is only logged."""
        fields = {"launch": self.launch_id, "trainers": left.trainers}
        text = json.dumps({**fields, "left": left.sessions, "present": left.present})
        new = self.folder / f"{_FILE_NAME}.new"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            new.write_text(text)
            new.replace(self.folder / _FILE_NAME)
        except OSError as error:
            alert(f"cannot note in {self.folder} which trainers have left: {error}")

    def read(self) -> Departures | None:
        """Returns the record if it is, or may be, of this launch; otherwise None."""
        path = self.folder / _FILE_NAME
        try:
            found = json.loads(path.read_text())
            launch_id = found["launch"]
            is_certain = launch_id == self.launch_id and launch_id is not None
            if not is_certain and None not in (launch_id, self.launch_id):
                return None
            if not is_certain and time.time() - path.stat().st_mtime > _VALID_S:
                return None
            left, present = (
                {int(trainer): session for trainer, session in found[name].items()}
                for name in ("left", "present")
            )
            return Departures(int(found["trainers"]), left, present, is_certain)
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            return None

    def clear(self) -> None:
        """Removes the record: the server has ended, or trainers of another run have connected."""
        try:
            (self.folder / _FILE_NAME).unlink(missing_ok=True)
        except OSError as error:
            alert(f"cannot remove {self.folder / _FILE_NAME}: {error}")
