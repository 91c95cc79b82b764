"""The processes that wait to join a job, and when each was heard last."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from jaxfleet.ps.server.outbox import RequestError

_MOST = 1024


@dataclass
class JoinCandidates:
    """Sessions of processes that have the job's program and wait to become members."""

    _heard: dict[str, float] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self._heard)

    def note(self, session: str, now: float) -> None:
        """Adds a process, or notes that it still waits.

        Raises:
            RequestError: too many wait.
        """
        if session not in self._heard and len(self._heard) >= _MOST:
            raise RequestError("refused", "too many processes wait to join")
        self._heard[session] = now

    def beat(self, session: object, now: float) -> None:
        """Notes a heartbeat, which counts only if its process waits."""
        if isinstance(session, str) and session in self._heard:
            self._heard[session] = now

    def heard(self, session: str) -> float | None:
        """Returns when a process was heard last; None if it does not wait."""
        return self._heard.get(session)

    def forgive(self, seconds: float, now: float) -> None:
        """Discounts silence while this process was suspended."""
        for session, heard in self._heard.items():
            self._heard[session] = min(heard + seconds, now)

    def forget(self, sessions: Iterable[str]) -> None:
        """Removes processes that have become members."""
        for session in sessions:
            self._heard.pop(session, None)

    def forget_silent(self, since: float) -> None:
        """Removes processes that have not been heard since."""
        self.forget([session for session, heard in self._heard.items() if heard < since])
