"""Heartbeats between a trainer and all servers."""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import islice

from jaxfleet.errors import ClosedError
from jaxfleet.ir.naming import unique
from jaxfleet.observability import printable, resident_bytes
from jaxfleet.ps.membership import Membership
from jaxfleet.transport.messages import Connections, Kind, Message, Network, Plain

_CLOSING_S = 5.0
MOST_SCALARS, MOST_SCALAR_NAME = 32, 100  # that a trainer reports; characters
_LONGEST_TEXT = 200  # characters of what a server reports


@dataclass(frozen=True)
class Pulse:
    """The last heartbeat of a server.

    Attributes:
        last_heard_s: its time by the heartbeat's clock; None before the first.
        incarnation: changes when it restarts; None if unknown.
        step: the last step it had applied; -1 if none.
        lost: names of the trainers whose heartbeats timed out.
        saved: the step of its last checkpoint; -1 if none.
        membership: the job's next or current members, once they have changed.
        number: of the heartbeat that it answers.
    """

    last_heard_s: float | None = None
    doing: str = ""
    incarnation: Plain = None
    step: int = -1
    lost: tuple[str, ...] = ()
    saved: int = -1
    membership: Membership | None = None
    number: int = field(default=0, compare=False)


class Heartbeat:
    """Sends heartbeats from its own thread and connections, also while the main thread compiles.

    Silence is measured in time spent listening, not in wall-clock time: while the whole process was
    suspended, it could not receive from its peers.

    Args:
        sender: `trainer 0`.
        session: the session of the trainer's hello, by which servers identify it.
        thread: False if the caller runs `run`, as a participant of a memory network does.

    Attributes:
        scalars: returns the newest scalar metrics and their step, without waiting for a step.
    """

    def __init__(
        self,
        network: Network,
        endpoints: Sequence[str],
        *,
        sender: str,
        session: str = "",
        every_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        thread: bool = True,
    ) -> None:
        self._network = network
        self._endpoints = tuple(endpoints)
        self._sender = sender
        self._session = session
        self._every_s = every_s
        self._clock = clock
        self._doing = "starting"
        self.scalars: Callable[[], tuple[int, Mapping[str, float]]] = lambda: (0, {})
        self._numbers = itertools.count(1)
        self._outdated = -1  # the last number whose answer may report progress that is void
        self._pulses = [Pulse() for _ in endpoints]
        self._silent_s = [0.0 for _ in endpoints]
        self._counted_at_s = clock()
        self._connections: Connections | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run_always, name="jaxfleet-heartbeat", daemon=True
        )
        if thread:
            self._thread.start()

    def doing(self, text: str) -> None:
        self._doing = text

    def pulse(self, server: int) -> Pulse:
        found = self._pulses[server]
        return found if found.number > self._outdated else replace(found, step=-1, saved=-1)

    def forget_progress(self) -> None:
        """Ignores the steps in answers to earlier heartbeats: servers have an older state now."""
        self._outdated = next(self._numbers)

    def silent_s(self, server: int) -> float:
        """Seconds spent listening since the last message of a server."""
        return self._silent_s[server] + self._uncounted_s()

    def close(self, last: str = "") -> None:
        """Ends the heartbeats, after one that reports the activity `last`, if given."""
        if last and self._connections is not None and not self._closing.is_set():
            self._doing = last
            with suppress(ClosedError), closing(self._network.connect(self._endpoints)) as own:
                self._say(own)
        self._closing.set()
        if (connections := self._connections) is not None:
            connections.close()
        if self._thread.is_alive():
            self._thread.join(_CLOSING_S)

    def run(self) -> None:
        """Sends heartbeats until closed, or until its connections fail."""
        self._connections = connections = self._network.connect(self._endpoints)
        try:
            while not self._closing.is_set():
                self._say(connections)
                self._listen(connections)
        except ClosedError:
            if not self._closing.is_set():
                raise
        finally:
            connections.close()

    def _run_always(self) -> None:
        while not self._closing.is_set():
            try:
                self.run()
            except Exception:  # noqa: BLE001  a live trainer must not look dead
                self._closing.wait(self._every_s)

    def _say(self, connections: Connections) -> None:
        body: dict[str, Plain] = {"doing": self._doing, "session": self._session, **self._report()}
        number = next(self._numbers)
        for server in range(len(self._endpoints)):
            connections.send(
                server, Message(Kind.HEARTBEAT, self._sender, number=number, body=body)
            )

    def _report(self) -> dict[str, Plain]:
        """Returns what servers publish about this trainer besides its activity."""
        step, values = self.scalars()
        scalars: dict[str, Plain] = {}
        for name, value in islice(values.items(), MOST_SCALARS):
            # Two names may differ after the cut only.
            scalars[unique(printable(name, MOST_SCALAR_NAME), scalars)] = value
        return {"resident": resident_bytes(), "scalar_step": step, "scalars": scalars}

    def _listen(self, connections: Connections) -> None:
        until = self._clock() + self._every_s
        while (now := self._clock()) < until:
            arrived = connections.receive(until - now)
            passed_s, self._counted_at_s = self._uncounted_s(), self._clock()
            self._silent_s = [silent + passed_s for silent in self._silent_s]
            if arrived is not None:
                self._hear(*arrived)

    def _uncounted_s(self) -> float:
        # Longer gaps mean that this process was suspended and could not receive.
        return min(self._clock() - self._counted_at_s, 2 * self._every_s)

    def _hear(self, server: int, message: Message) -> None:
        self._silent_s[server] = 0.0
        body = message.body
        if message.kind is not Kind.HEARTBEAT:
            return  # such as an error, whose sender is alive
        doing, step, lost = body.get("doing"), body.get("step"), body.get("lost")
        saved = body.get("saved")
        self._pulses[server] = Pulse(
            last_heard_s=self._clock(),
            doing=printable(doing, _LONGEST_TEXT) if isinstance(doing, str) else "",
            incarnation=body.get("incarnation"),
            step=step if isinstance(step, int) else -1,
            lost=tuple(printable(str(one), _LONGEST_TEXT) for one in lost)
            if isinstance(lost, list)
            else (),
            saved=saved if isinstance(saved, int) else -1,
            membership=Membership.of(body),
            number=message.number,
        )
