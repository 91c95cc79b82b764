"""Says to every server that this trainer lives and what it does, and hears the same of them."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from jaxfleet.errors import ClosedError
from jaxfleet.ps.messages import Kind, Message, Plain
from jaxfleet.ps.network import Lines, Network

_CLOSING_S = 5.0


@dataclass(frozen=True)
class Pulse:
    """What a server last said.

    Attributes:
        last_heard_s: when, by the heartbeat's clock; None if it never did.
        doing: what it did then.
        incarnation: another after it started again; None if it never said.
        step: the last step that it had applied; -1 if none.
        lost: the trainers that it had not heard of for too long, by name.
        saved: the step of its last checkpoint; -1 if none.
    """

    last_heard_s: float | None = None
    doing: str = ""
    incarnation: Plain = None
    step: int = -1
    lost: tuple[str, ...] = ()
    saved: int = -1


class Heartbeat:
    """Beats in a thread with lines of its own, so also while the main thread compiles.

    Silence is counted by how long this thread listened, not by the clock on the wall: where the
    whole process stood still, its peers had no chance to be heard.

    Args:
        network: carries the beats.
        endpoints: of the servers.
        sender: who beats: `trainer 0`.
        session: what its hello said, by which servers know whose beats these are.
        every_s: how often.
        clock: tells the time in seconds.
        thread: False where the caller lets `run` run, as a participant of a memory network does.
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
        self._numbers = itertools.count(1)
        self._pulses = [Pulse() for _ in endpoints]
        self._silent_s = [0.0 for _ in endpoints]
        self._counted_at_s = clock()
        self._lines: Lines | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run_always, name="jaxfleet-heartbeat", daemon=True
        )
        if thread:
            self._thread.start()

    def doing(self, text: str) -> None:
        """Sets what is said from the next beat on."""
        self._doing = text

    def pulse(self, server: int) -> Pulse:
        """Returns what a server last said."""
        return self._pulses[server]

    def silent_s(self, server: int) -> float:
        """Returns for how many seconds of listening nothing came from a server."""
        return self._silent_s[server] + self._uncounted_s()

    def close(self, last: str = "") -> None:
        """Ends the beats.

        Args:
            last: what one more beat says before.
        """
        if last and self._lines is not None and not self._closing.is_set():
            self._doing = last
            with suppress(ClosedError), closing(self._network.connect(self._endpoints)) as own:
                self._say(own)
        self._closing.set()
        if (lines := self._lines) is not None:
            lines.close()
        if self._thread.is_alive():
            self._thread.join(_CLOSING_S)

    def run(self) -> None:
        """Beats until the heartbeat is closed, or its lines fail."""
        self._lines = lines = self._network.connect(self._endpoints)
        try:
            while not self._closing.is_set():
                self._say(lines)
                self._listen(lines)
        except ClosedError:
            if not self._closing.is_set():
                raise
        finally:
            lines.close()

    def _run_always(self) -> None:
        while not self._closing.is_set():
            try:
                self.run()
            except Exception:  # noqa: BLE001  whatever it is, a live trainer must not look dead
                self._closing.wait(self._every_s)

    def _say(self, lines: Lines) -> None:
        body: dict[str, Plain] = {"doing": self._doing, "session": self._session}
        number = next(self._numbers)
        for server in range(len(self._endpoints)):
            lines.send(server, Message(Kind.HEARTBEAT, self._sender, number=number, body=body))

    def _listen(self, lines: Lines) -> None:
        """Hears what comes until the next beat."""
        until = self._clock() + self._every_s
        while (now := self._clock()) < until:
            arrived = lines.receive(until - now)
            passed_s, self._counted_at_s = self._uncounted_s(), self._clock()
            self._silent_s = [silent + passed_s for silent in self._silent_s]
            if arrived is not None:
                self._hear(*arrived)

    def _uncounted_s(self) -> float:
        # If it is more, this process stood still, and its servers had no chance to be heard.
        return min(self._clock() - self._counted_at_s, 2 * self._every_s)

    def _hear(self, server: int, message: Message) -> None:
        self._silent_s[server] = 0.0
        body = message.body
        if message.kind is not Kind.HEARTBEAT:
            return  # an error, say: whoever sends one lives
        doing, step, lost = body.get("doing"), body.get("step"), body.get("lost")
        saved = body.get("saved")
        self._pulses[server] = Pulse(
            last_heard_s=self._clock(),
            doing=doing if isinstance(doing, str) else "",
            incarnation=body.get("incarnation"),
            step=step if isinstance(step, int) else -1,
            lost=tuple(map(str, lost)) if isinstance(lost, list) else (),
            saved=saved if isinstance(saved, int) else -1,
        )
