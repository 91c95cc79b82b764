"""The members of a job: its trainers in order, from one change of their number to the next."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxfleet.transport.messages import Plain

CHANGED = "rescaled"  # the error of requests of an epoch that ends
_MOST = 1 << 16  # trainers of a job
_LONGEST = 200  # characters of a session


@dataclass(frozen=True)
class Membership:
    """The trainers of a job between two changes.

    Attributes:
        epoch: number of changes before; members of an earlier one have no part in this.
        sessions: the processes, in the order of their numbers.
        dismissed: processes that can have no equal part of the batch: they leave without error.
    """

    epoch: int = 0
    sessions: tuple[str, ...] = ()
    dismissed: tuple[str, ...] = ()

    def number_of(self, session: str) -> int | None:
        """Returns the number of a process; None if it is not a member."""
        return self.sessions.index(session) if session in self.sessions else None

    def plain(self) -> dict[str, Plain]:
        """Returns the fields of a message."""
        members: list[Plain] = list(self.sessions)
        dismissed: list[Plain] = list(self.dismissed)
        return {"epoch": self.epoch, "members": members, "dismissed": dismissed}

    @classmethod
    def of(cls, body: Mapping[str, Plain]) -> "Membership | None":
        """Returns the membership in a message; None if there is none, or it is malformed."""
        epoch, members, dismissed = (body.get(name) for name in ("epoch", "members", "dismissed"))
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
            return None
        lists = [_sessions(members), _sessions(dismissed or [])]
        if None in lists:
            return None
        sessions, gone = (tuple(found or ()) for found in lists)
        if len(set(sessions)) < len(sessions):
            return None
        return cls(epoch, sessions, gone)


def _sessions(value: Plain) -> list[str] | None:
    if not isinstance(value, list) or len(value) > _MOST:
        return None
    found = [each for each in value if isinstance(each, str) and len(each) <= _LONGEST]
    return found if len(found) == len(value) else None


class MembershipChangedError(Exception):
    """A trainer's operation was interrupted: the job goes on with other members.

    It is never raised to a script: the step takes its new place, and begins the operation again.

    Args:
        membership: the new one; None if the server that interrupted did not name it.
    """

    def __init__(self, membership: Membership | None) -> None:
        super().__init__("the members of the job change")
        self.membership = membership
