"""Which trainers have said bye, on disk: a server that comes back waits for none of them."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from jaxfleet.ps.messages import Plain
from jaxfleet.watch.notices import alert

_NAME = "byes.json"
_VALID_S = 600.0  # a later start is of another run, whose trainers are still to come


@dataclass(frozen=True)
class Left:
    """The trainers that had left when a server was killed.

    Attributes:
        trainers: how many the job has.
        sessions: of those that said bye, the process.
    """

    trainers: int
    sessions: dict[int, Plain]


@dataclass(frozen=True)
class Byes:
    """A file beside a server's own checkpoints.

    Attributes:
        folder: theirs.
    """

    folder: Path

    def write(self, left: Left) -> None:
        """Writes it, before the bye is answered; where it cannot be written, only logs that."""
        text = json.dumps([left.trainers, {str(n): said for n, said in left.sessions.items()}])
        new = self.folder / f"{_NAME}.new"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            new.write_text(text)
            new.replace(self.folder / _NAME)
        except OSError as error:
            alert(f"cannot note in {self.folder} which trainers have left: {error}")

    def read(self) -> Left | None:
        """Returns what was written shortly before; None where nothing was."""
        path = self.folder / _NAME
        try:
            if time.time() - path.stat().st_mtime > _VALID_S:
                return None
            trainers, sessions = json.loads(path.read_text())
            return Left(int(trainers), {int(n): said for n, said in sessions.items()})
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def clear(self) -> None:
        """Removes it: the server has ended, or trainers of another run have come."""
        try:
            (self.folder / _NAME).unlink(missing_ok=True)
        except OSError as error:
            alert(f"cannot remove {self.folder / _NAME}: {error}")
