"""What lets the processes of a job meet."""

from typing import Any, Literal, Protocol

GroupName = Literal["trainer", "pserver", "all"]


class Meeting(Protocol):
    """Lets the processes of a job gather what each has; who gathers waits for all the others."""

    def gather(self, group: GroupName, value: Any, what: str) -> list[Any]:
        """Returns what every process of a group gave, in their order: workers, then servers.

        Args:
            group: who gathers; this process is one of them.
            value: what this process gives.
            what: what the gathering is for; all give the same, and errors name it.

        Raises:
            ConnectError: somebody never came.
            PeerLostError: somebody was there, and did not come to this.
        """
        ...

    def close(self) -> None:
        """Ends it for this process; again, it does nothing."""
        ...


class Alone:
    """Is the meeting of a process that is the only one of its group."""

    def gather(self, group: GroupName, value: Any, what: str) -> list[Any]:
        """Returns what this process gave."""
        del group, what
        return [value]

    def close(self) -> None:
        """Does nothing."""
