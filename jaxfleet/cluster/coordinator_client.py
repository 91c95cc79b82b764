"""A rank's connection to the coordinator: reports progress, sends requests, learns of failures."""

import hashlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from jaxfleet.cluster.group_view import GroupView, Termination
from jaxfleet.errors import ClosedError, ConnectError, JaxfleetError, StrategyError
from jaxfleet.observability import LongWait
from jaxfleet.transport.messages import Connections, Kind, Message, Network, Plain, Tensor

_HELLO_S = 0.5
_LOOK_S = 0.05  # interval of checks that the group still works
_MOST_BETWEEN_BEATS_S = 1.0
_CLOSING_S = 5.0
_ASK_AGAIN_S = 5.0  # doubled on each retry: a large payload takes time
_ASK_AGAIN_MOST_S = 40.0
_ANSWERS = frozenset({Kind.PARTS, Kind.PENDING, Kind.OK})


@dataclass(frozen=True)
class Doing:
    """The activity that a rank reports."""

    step: int = 0  # current step; 0 before the first
    what: str = "starting"  # short description
    runs: str = ""  # the program and its shapes
    inside: bool = False  # it has begun the step but not yet run it


class CoordinatorClient:
    """One rank of the group.

    Heartbeats use their own thread and connection, so they continue while the main thread compiles
    or waits.
    """

    def __init__(
        self,
        network: Network,
        endpoint: str,
        *,
        rank: int,
        size: int,
        job: str,
        lost_after_s: float,
        clock: Callable[[], float] = time.monotonic,
        beats: bool = True,
    ) -> None:
        self._clock, self._has_beats, self._had = clock, beats, 0
        self.rank, self.size, self.endpoint = rank, size, endpoint
        self._network, self._job = network, job
        self.lost_after_s = lost_after_s
        self._session = uuid.uuid4().hex
        self._doing = Doing()
        self._numbers, self._words = itertools.count(1), itertools.count(1)
        self._news = GroupView()
        self._ran, self._last = b"", "nothing"
        self.has_raised = False
        self._lines = network.connect([endpoint])
        self._beats: Connections | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="jaxfleet-beats", daemon=True)

    @property
    def doing(self) -> Doing:
        return self._doing

    @property
    def verdict(self) -> Termination | None:
        """Why the group failed, if it did."""
        return self._news.verdict

    def now(self, doing: Doing) -> None:
        self._doing = doing

    def ran(self, what: str, digest: str) -> None:
        """Records a program run in this step; when ranks meet, all must have run the same.

        Otherwise two programs whose sums have equal shapes would silently pair with each other.
        """
        self._last = f"{what} in step {self._doing.step}"
        self._ran = hashlib.sha256(self._ran + f"{self._last}, {digest}".encode()).digest()

    def check(self) -> None:
        if self.verdict is not None:
            raise self.error(self.verdict)

    def error(self, verdict: Termination) -> JaxfleetError:
        """Returns the error that this rank raises; it becomes the reported reason of its exit."""
        self.has_raised = True
        return verdict.error(self._doing.step)

    def meet(self, connect_s: float) -> str:
        """Waits until all ranks have arrived; returns the address of jax's coordinator.

        Raises:
            ConnectError: some ranks did not arrive in time; the message names them.
            StrategyError: rank 0 belongs to another job, or has already met another process with
                this rank.
        """
        came: list[int] | None = None
        until = self._clock() + connect_s
        body: dict[str, Plain] = {"job": self._job, "size": self.size}
        hello_at, wait = 0.0, LongWait(self._clock)
        while (left_s := until - self._clock()) > 0:
            if self._clock() >= hello_at:
                self._send(self._lines, Kind.HELLO, body=body)
                hello_at = self._clock() + _HELLO_S
            arrived = self._lines.receive(min(max(0.0, hello_at - self._clock()), left_s))
            wait.look(partial("rank {} waits for {}".format, self.rank, self._absent(came)))
            if arrived is None:
                continue
            answer = arrived[1]
            if (refused := answer.body.get("refused")) is not None:
                what = f"rank {self.rank} is refused at {self.endpoint}: {refused}"
                raise StrategyError(what, hint="give every process of a job a rank of its own")
            found = answer.body.get("came")
            came = [int(str(each)) for each in found] if isinstance(found, list) else came
            if came is not None and len(came) == self.size:
                if self._has_beats:
                    self._thread.start()
                return str(answer.body["coordinator"])
        raise self._nobody(came, connect_s)

    def _nobody(self, came: Sequence[int] | None, connect_s: float) -> ConnectError:
        if came is None:
            what = f"rank 0 did not answer at {self.endpoint} within {connect_s:g} s"
            hint = "is it running, and is that its address? the job's secret must be the same"
            return ConnectError(what, hint=hint)
        who = self._absent(came)
        what = f"{who} of {self.size} did not come to {self.endpoint} within {connect_s:g} s"
        return ConnectError(what, hint="look at their logs; connect_s is how long to wait for them")

    def _absent(self, came: Sequence[int] | None) -> str:
        if came is None:
            return f"rank 0, which does not answer at {self.endpoint}"
        missing = [str(rank) for rank in range(self.size) if rank not in came]
        return f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing)}"

    def together(self, what: str, payload: bytes, timeout_s: float) -> list[bytes]:
        """Gathers a payload from every rank, in rank order, once all have reached one place."""
        number, before = next(self._numbers), self._doing
        self._doing = replace(before, what=what)
        tensors = (Tensor("payload", np.frombuffer(payload, np.uint8)),)
        body: dict[str, Plain] = {"what": what, **self._history}
        until, wait, again_s = self._clock() + timeout_s, LongWait(self._clock), _ASK_AGAIN_S
        self._send(self._lines, Kind.BARRIER, number, body, tensors)
        while True:
            left_s = until - self._clock()
            if left_s <= 0:
                raise self.late(what, timeout_s)
            answer = self._awaited(number, min(again_s, left_s))
            if answer is not None and answer.kind is Kind.PARTS:
                break
            if answer is not None:  # rank 0 has not received it
                self._send(self._lines, Kind.BARRIER, number, body, tensors)
                continue
            # A broken connection lost the last request or its answer: rank 0 tracks which.
            wait.look(lambda: self.waits(what))
            self._send(self._lines, Kind.BARRIER, number, {**body, "again": True})
            again_s = min(2 * again_s, _ASK_AGAIN_MOST_S)
        self._had = number
        self._doing = before
        return [tensor.array.tobytes() for tensor in answer.tensors]

    def waits(self, what: str) -> str:
        """Describes, for the log, this rank's wait and the activity of the others."""
        others = self.elsewhere(what)
        said = f"; {others}" if others else ""
        return f"rank {self.rank} waits for '{what}' in step {self._doing.step}{said}"

    def elsewhere(self, what: str) -> str:
        """Describes the ranks that are not at this place, and their activity."""
        return self._news.elsewhere(self.rank, self._doing.step, what)

    def late(self, what: str, timeout_s: float) -> JaxfleetError:
        """Returns the error that names the late ranks, and notifies the others."""
        waited = f"rank {self.rank} waited {timeout_s:g} s for '{what}' in step {self._doing.step}"
        verdict = self._news.late(self.rank, what, waited)
        with suppress(ClosedError):
            self._send(self._lines, Kind.ERROR, body={"verdict": verdict.body()})
        return self.error(verdict)

    def bye(self) -> None:
        """Reports that this rank needs the others no more, and waits until all have done so.

        There is no timeout: a live rank reports its activity and may take as long as it needs.

        Raises:
            PeerLostError: a rank is gone, or waits for a step that this rank will not take.
        """
        number, wait = next(self._numbers), LongWait(self._clock)
        self._send(self._lines, Kind.BYE, number, self._history)
        while self._awaited(number, _ASK_AGAIN_S) is None:
            wait.look(lambda: self.waits("the others' end"))
            # A broken connection lost the last message.
            self._send(self._lines, Kind.BYE, number, self._history)

    @property
    def _history(self) -> dict[str, Plain]:
        return {"ran": self._ran.hex(), "last": self._last}

    def fail(self, error: str) -> None:
        """Reports that this rank ends with an error.

        On rank 0 the coordinator ends with the process, which therefore waits for delivery.
        """
        number = next(self._numbers)
        with suppress(ClosedError):
            self._send(self._lines, Kind.BYE, number, {"error": error})
            until = time.monotonic() + (0.0 if self.rank else _CLOSING_S)
            while (left_s := until - time.monotonic()) > 0:
                arrived = self._lines.receive(left_s)
                if arrived is not None and arrived[1].number == number:
                    return

    def close(self) -> None:
        """Ends the heartbeats after sending pending messages."""
        self._closing.set()
        for lines in (self._beats, self._lines):
            if lines is not None:
                lines.close()
        if self._thread.is_alive():
            self._thread.join(_CLOSING_S)

    def _send(
        self,
        lines: Connections,
        kind: Kind,
        number: int = 0,
        body: dict[str, Plain] | None = None,
        tensors: tuple[Tensor, ...] = (),
    ) -> None:
        # Numbered before it reads the state: of two threads' messages the later is at least as new.
        word, doing = next(self._words), self._doing
        said: dict[str, Plain] = {"rank": self.rank, "session": self._session, "word": word}
        said["had"] = self._had
        said |= {"doing": doing.what, "runs": doing.runs, "inside": doing.inside, **(body or {})}
        sender, step = f"rank {self.rank}", doing.step
        lines.send(0, Message(kind, sender, step=step, number=number, body=said, tensors=tensors))

    def _awaited(self, number: int, timeout_s: float) -> Message | None:
        """Returns the answer to a request; None on timeout or on a new connection."""
        until = self._clock() + timeout_s
        while (left_s := until - self._clock()) > 0:
            arrived = self._lines.receive(min(_LOOK_S, left_s))
            if arrived is not None:
                if arrived[1].kind in _ANSWERS and arrived[1].number == number:
                    return arrived[1]
                self._news.hear(arrived[1])
            self.check()
            if self._lines.renewed():
                return None
        return None

    def _beat(self) -> None:
        while not self._closing.is_set():
            try:
                self._beat_on()
            except Exception:  # noqa: BLE001  whatever it is, a rank that lives must not look dead
                self._closing.wait(_MOST_BETWEEN_BEATS_S)
                self._miss(_MOST_BETWEEN_BEATS_S)

    def _beat_on(self) -> None:
        self._beats = lines = self._network.connect([self.endpoint])
        try:
            while not self._closing.is_set():
                self._send(lines, Kind.HEARTBEAT)
                self._listen(lines, min(_MOST_BETWEEN_BEATS_S, self.lost_after_s / 5))
        finally:
            lines.close()

    def _miss(self, seconds: float) -> None:
        self._news.miss(seconds, lost_after_s=self.lost_after_s)

    def _listen(self, lines: Connections, every_s: float) -> None:
        until = time.monotonic() + every_s
        while (before := time.monotonic()) < until:
            arrived = lines.receive(until - before)
            if arrived is not None:
                self._news.hear(arrived[1])
            else:
                # A larger gap means that this process was suspended: rank 0 could not be heard.
                self._miss(min(time.monotonic() - before, 2 * every_s))
