"""ProcessGroup: this process as a rank of a group, as steps and executors use it."""

import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeVar

import jax

from jaxfleet.cluster.coordinator import RUNNING, CoordinatorThread
from jaxfleet.cluster.coordinator_client import CoordinatorClient, Doing
from jaxfleet.cluster.group_view import CHANGED_STATE
from jaxfleet.cluster.rank_metrics import RankCounts, RankExporter
from jaxfleet.errors import ProgramError
from jaxfleet.observability import NO_SPANS, LongWait, Spans
from jaxfleet.transport.consistency import first_difference as first_line
from jaxfleet.transport.consistency import same_leaves_hint

Exchange = Callable[[str, bytes], list[bytes]]
"""Gives each rank what all have: a name for it, this rank's; all ranks', by rank."""


def first_difference(lines: Sequence[str], exchange: Exchange) -> str | None:
    """Describes which ranks differ from rank 0, and where; None if all agree.

    Whole texts travel only if their digests differ.
    """
    text = "\n".join(lines).encode()
    digests = exchange("comparing", hashlib.sha256(text).digest())
    if len(set(digests)) == 1:
        return None
    packed = exchange("comparing line by line", zlib.compress(text))
    texts = [zlib.decompress(each).decode() for each in packed]
    first, *others = (each.split("\n") for each in texts)
    differ = [rank for rank, found in enumerate(others, start=1) if found != first]
    found = first_line(first, others[differ[0] - 1])
    assert found is not None
    number, here, there = found
    named = " and ".join(f"rank {rank}" for rank in differ)
    shown = f"rank 0 has '{here}', rank {differ[0]} '{there}'"
    return f"{named} differ{'s' if len(differ) == 1 else ''} from rank 0; line {number}: {shown}"


_LOOK_S = 0.05  # interval of checks that the group still works

T = TypeVar("T")


class ProcessGroup:
    """This process as a rank of its group.

    Attributes:
        patience_s: how long this process may live on after the loss of a rank before it is ended.
        is_closed: it has left.
        counts: of its work.
        metrics: exports them.
    """

    def __init__(
        self, member: CoordinatorClient, serving: CoordinatorThread | None, spans: Spans = NO_SPANS
    ) -> None:
        self.member, self._spans = member, spans
        self._serving = serving
        self.counts = RankCounts()
        self.metrics = RankExporter(member, self.counts)
        self._worker = XlaThread()
        self.patience_s = member.lost_after_s
        self.is_closed = False

    @property
    def rank(self) -> int:
        return self.member.rank

    @property
    def size(self) -> int:
        return self.member.size

    @property
    def step(self) -> int:
        """Number of steps begun, over all programs."""
        return self.member.doing.step

    def wait_less(self, *, lost_after_s: float, step_timeout_s: float) -> None:
        """Lowers the timeouts to these, if they are shorter."""
        self.member.lost_after_s = min(lost_after_s, self.member.lost_after_s)
        if self._serving is not None:
            for coordinator in self._serving.coordinators:
                coordinator.lost_after_s = self.member.lost_after_s
        self.patience_s = min(step_timeout_s, self.patience_s)

    def check(self) -> None:
        """Raises if the group has failed."""
        self.member.check()

    def next_step(self) -> None:
        """Begins this rank's next step; raises as `check` does."""
        self.check()
        self.member.now(Doing(self.step + 1, "preparing", inside=True))

    def doing(self, what: str) -> None:
        self.member.now(replace(self.member.doing, what=what))

    def gather(self, what: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Returns every rank's payload, in rank order, once all have arrived.

        Raises:
            PeerLostError: a rank is gone or late.
            ProgramError: a rank is at another place.
        """
        self.check()
        with self._spans.span(f"wait for all at {what}", step=self.step), self.counts.waiting():
            return self.member.together(what, payload, timeout_s)

    def barrier(self, what: str, *, timeout_s: float) -> None:
        """Waits for all ranks; raises as `gather` does."""
        self.gather(what, b"", timeout_s=timeout_s)

    def agree(self, what: str, lines: Sequence[str], *, timeout_s: float) -> str:
        """Checks, on every rank, that a text is the same on all; returns its digest."""
        difference = first_difference(
            lines, lambda how, data: self.gather(f"{how} {what}", data, timeout_s=timeout_s)
        )
        if difference is not None:
            hint = "run the same script, with the same arguments, on each rank"
            hint = same_leaves_hint("rank") if CHANGED_STATE in what else hint
            raise ProgramError(f"{what} is not the same on all ranks: {difference}", hint=hint)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def run_step(
        self, runs: str, compute: Callable[[], T], *, timeout_s: float, digest: str = ""
    ) -> T:
        """Runs a step that all ranks compute together, as `run` does.

        `runs` describes the program and its shapes, and `digest` is of all that the ranks have
        agreed on.
        """
        self.member.now(replace(self.member.doing, runs=runs))
        with self.counts.running():
            result = self.run(RUNNING, compute, timeout_s=timeout_s)
        self.member.ran(runs, digest)
        self.member.now(Doing(self.step, "between steps"))
        return result

    def run(self, what: str, compute: Callable[[], T], *, timeout_s: float) -> T:
        """Returns the result of a computation that all ranks take part in.

        `compute` runs in a thread of its own, so thread-local settings of jax do not apply.
        """
        self.check()
        before = self.member.doing
        self.doing(what)
        with self._spans.span(what, step=self.step):
            result = self._computed(what, compute, timeout_s)
        self.member.now(before)
        return result

    def _computed(self, what: str, compute: Callable[[], T], timeout_s: float) -> T:
        task, until = self._worker.begin(compute), time.monotonic() + timeout_s
        wait = LongWait()
        while not task.is_done(_LOOK_S):
            self.check()
            if not wait.left_s and self.member.elsewhere(what):  # otherwise the step is merely slow
                wait.look(lambda: self.member.waits(what))
            if time.monotonic() > until:
                raise self.member.late(what, timeout_s)
        try:
            result: T = task.result()
        except (RuntimeError, ValueError) as error:
            self._explain(error)
            raise
        return result

    def _explain(self, error: Exception) -> None:
        """Raises the loss of a rank as the cause of an error, if it is.

        Collectives notice at once that a process ended but cannot name it; the heartbeats can.
        """
        text = str(error)
        if not any(word in text for word in ("Gloo", "NCCL", "onnection")):
            return
        until = time.monotonic() + 2 * self.member.lost_after_s
        while self.member.verdict is None and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if (verdict := self.member.verdict) is not None:
            raise self.member.error(verdict) from error

    def leave(self) -> None:
        """Waits until every rank is done, and closes all connections; raises as `gather` does."""
        self.member.bye()
        self.metrics.end(is_failed=False)
        self.close()

    def close(self) -> None:
        self.is_closed = True
        self.member.close()
        if self._serving is not None:
            self._serving.close()
        self.metrics.close()


class Task:
    """A computation of the thread."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute
        self._result: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()

    def is_done(self, timeout_s: float) -> bool:
        return self._done.wait(timeout_s)

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def run(self) -> None:
        try:
            self._result = self._compute()
            jax.block_until_ready(jax.tree_util.tree_leaves(self._result)[:1])
        except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
            self._error = error
        self._done.set()


class XlaThread:
    """Runs tasks one after another, in a daemon thread, so that no other thread waits inside XLA.

    Nothing can be raised in a thread that waits for a collective. XLA:CPU runs small programs
    before their call returns, so the call itself is such a wait too.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        threading.Thread(target=self._run, name="jaxfleet-xla", daemon=True).start()

    def begin(self, compute: Callable[[], Any]) -> Task:
        """Returns a task, which runs in its turn."""
        task = Task(compute)
        self._tasks.put(task)
        return task

    def _run(self) -> None:
        while True:
            self._tasks.get().run()
