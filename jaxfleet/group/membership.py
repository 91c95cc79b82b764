"""Joined: this process as a rank of a group, as steps and executors use it."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from jaxfleet.errors import ProgramError
from jaxfleet.group.center import RUNNING
from jaxfleet.group.differences import first_difference
from jaxfleet.group.member import Doing, Member
from jaxfleet.group.serving import Serving
from jaxfleet.group.verdict import CHANGED_STATE
from jaxfleet.group.worker import Worker
from jaxfleet.ps.hints import same_leaves_hint
from jaxfleet.watch import NO_SPANS, LongWait, Spans

_LOOK_S = 0.05  # between two looks at whether the group still is one

T = TypeVar("T")


class Joined:
    """This process among the others.

    Args:
        member: its lines to rank 0.
        serving: rank 0's thread; None elsewhere.
        spans: notes what this rank does when.

    Attributes:
        patience_s: how long this process may live on without having heard that others are gone.
        is_closed: it has left.
    """

    def __init__(self, member: Member, serving: Serving | None, spans: Spans = NO_SPANS) -> None:
        self.member, self._spans = member, spans
        self._serving = serving
        self._worker = Worker()
        self.patience_s = member.lost_after_s
        self.is_closed = False

    @property
    def rank(self) -> int:
        """Which of the processes this is, from 0."""
        return self.member.rank

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.member.size

    @property
    def step(self) -> int:
        """How many steps this process has begun, of all its programs."""
        return self.member.doing.step

    def wait_less(self, *, lost_after_s: float, step_timeout_s: float) -> None:
        """Sets how long to wait for others, where that is less than it was.

        Args:
            lost_after_s: for a word of one.
            step_timeout_s: for one that lives, and for this process to hear of what happened.
        """
        self.member.lost_after_s = min(lost_after_s, self.member.lost_after_s)
        if self._serving is not None:
            self._serving.center.lost_after_s = self.member.lost_after_s
        self.patience_s = min(step_timeout_s, self.patience_s)

    def check(self) -> None:
        """Raises if the group cannot go on.

        Raises:
            PeerLostError: a rank is gone.
            ProgramError: ranks do not run the same.
        """
        self.member.check()

    def next_step(self) -> None:
        """Says that this rank's next step begins; raises as `check` does."""
        self.check()
        self.member.now(Doing(self.step + 1, "preparing", inside=True))

    def doing(self, what: str) -> None:
        """Sets what the others are told that this rank does, from now on."""
        self.member.now(replace(self.member.doing, what=what))

    def gather(self, what: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Returns what each rank has, by rank, once all have come here.

        Args:
            what: names the place: the same on every rank.
            payload: this rank's.
            timeout_s: how long the others may take.

        Raises:
            PeerLostError: one is gone, or late.
            ProgramError: one is somewhere else.
        """
        self.check()
        with self._spans.span(f"wait for all at {what}", step=self.step):
            return self.member.together(what, payload, timeout_s)

    def barrier(self, what: str, *, timeout_s: float) -> None:
        """Returns once all ranks have come here; raises as `gather` does."""
        self.gather(what, b"", timeout_s=timeout_s)

    def agree(self, what: str, lines: Sequence[str], *, timeout_s: float) -> str:
        """Refuses, on every rank, what is not the same on all; returns a digest of what is.

        Args:
            what: it is.
            lines: the text of it.
            timeout_s: how long the others may take.

        Raises:
            PeerLostError: one is gone, or late.
            ProgramError: they differ; it names the ranks, and the first line that does.
        """
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
        """Runs a step that all ranks compute together; as `run`.

        Args:
            runs: which program, with which shapes: the same on all ranks.
            compute: runs it.
            timeout_s: how long it may take.
            digest: of what the ranks have agreed on before.
        """
        self.member.now(replace(self.member.doing, runs=runs))
        result = self.run(RUNNING, compute, timeout_s=timeout_s)
        self.member.ran(runs, digest)
        self.member.now(Doing(self.step, "between steps"))
        return result

    def run(self, what: str, compute: Callable[[], T], *, timeout_s: float) -> T:
        """Returns what all ranks compute together, once it is there.

        Args:
            what: is computed, in few words.
            compute: calls something compiled, and returns its arrays; in a thread of its own, to
                which settings of jax that hold for one thread do not come.
            timeout_s: how long it may take.

        Raises:
            PeerLostError: a rank is gone, or late.
            ProgramError: ranks do not run the same.
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
            if not wait.left_s and self.member.elsewhere(what):  # else the step just takes long
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
        """Raises who is gone, where that is why something failed.

        Collectives notice a process that ends at once, and cannot say whose it was; the beats can.
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
        """Waits until every rank is done, and ends all lines; raises as `gather` does."""
        self.member.bye()
        self.close()

    def close(self) -> None:
        """Ends all lines, when what is under way has been sent."""
        self.is_closed = True
        self.member.close()
        if self._serving is not None:
            self._serving.close()
