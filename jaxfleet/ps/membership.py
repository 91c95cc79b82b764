"""The members of a job: its trainers in order, and its servers, from one change to the next."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxfleet.transport.messages import Plain

CHANGED = "rescaled"  # the error of requests of an epoch that ends
_MOST = 1 << 16  # trainers of a job
_LONGEST = 200  # characters of a session
_MOST_SERVERS = 1024
_LONGEST_ENDPOINT, _LONGEST_FOLDER = 300, 4096  # characters


@dataclass(frozen=True)
class ServerMove:
    """Other servers with which a job goes on.

    Attributes:
        servers: their endpoints, in order; those that stay come first, in their own places.
        folder: where the state is saved for them, which all processes of the job can access.
    """

    servers: tuple[str, ...]
    folder: str

    def plain(self) -> dict[str, Plain]:
        """Returns the fields of a message."""
        servers: list[Plain] = list(self.servers)
        return {"moves_to": servers, "moves_through": self.folder}

    @classmethod
    def of(cls, body: Mapping[str, Plain]) -> "ServerMove | None":
        """Returns the move in a message; None if there is none, or it is malformed."""
        servers, folder = body.get("moves_to"), body.get("moves_through")
        if not isinstance(folder, str) or not 0 < len(folder) <= _LONGEST_FOLDER:
            return None
        if not isinstance(servers, list) or not 0 < len(servers) <= _MOST_SERVERS:
            return None
        found = [
            each for each in servers if isinstance(each, str) and len(each) <= _LONGEST_ENDPOINT
        ]
        if len(set(found)) < len(servers):
            return None
        return cls(tuple(found), folder)


@dataclass(frozen=True)
class Membership:
    """The trainers of a job between two changes.

    Attributes:
        epoch: number of changes before; members of an earlier one have no part in this.
        sessions: the processes, in the order of their numbers.
        dismissed: processes that can have no equal part of the batch: they leave without error.
        move: other servers, to which the job moves once it has done a step; None if they stay.
    """

    epoch: int = 0
    sessions: tuple[str, ...] = ()
    dismissed: tuple[str, ...] = ()
    move: ServerMove | None = None

    def number_of(self, session: str) -> int | None:
        """Returns the number of a process; None if it is not a member."""
        return self.sessions.index(session) if session in self.sessions else None

    def plain(self) -> dict[str, Plain]:
        """Returns the fields of a message."""
        members: list[Plain] = list(self.sessions)
        dismissed: list[Plain] = list(self.dismissed)
        move = self.move.plain() if self.move is not None else {}
        return {"epoch": self.epoch, "members": members, "dismissed": dismissed, **move}

    def moved(self) -> "Membership":
        """Returns that of the same trainers at the servers to which they have moved."""
        return Membership(self.epoch + 1, self.sessions)

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
        return cls(epoch, sessions, gone, ServerMove.of(body))


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
        begun_at: a server that has begun another epoch, so it refuses a hello of this one.
    """

    def __init__(self, membership: Membership | None, begun_at: int | None = None) -> None:
        super().__init__("the members of the job change")
        self.membership = membership
        self.begun_at = begun_at

    def is_newer_than(self, other: Membership) -> bool:
        """Whether it names members that come after others."""
        return self.membership is not None and self.membership.epoch > other.epoch
