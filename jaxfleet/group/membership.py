"""Joined: this process as a rank of a group, as steps and executors use it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import jax

from jaxfleet.errors import ProgramError
from jaxfleet.group.center import RUNNING
from jaxfleet.group.differences import first_difference
from jaxfleet.group.member import Doing, Member
from jaxfleet.group.serving import Serving

_SOONEST_S = 50e-6
_SHARE = 128  # a wait is looked at again after this part of the time that it has taken
_LATEST_S = 0.01

Wait: TypeAlias = Callable[[Sequence[Any]], None]


class Joined:
    """This process among the others.

    Args:
        member: its lines to rank 0.
        serving: rank 0's thread; None elsewhere.
        lost_after_s: how long a rank may be silent.
    """

    def __init__(self, member: Member, serving: Serving | None, *, lost_after_s: float) -> None:
        self.member = member
        self._serving = serving
        self._lost_after_s = lost_after_s

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
        return self.member.together(what, payload, timeout_s)

    def barrier(self, what: str, *, timeout_s: float) -> None:
        """Returns once all ranks have come here; raises as `gather` does."""
        self.gather(what, b"", timeout_s=timeout_s)

    def agree(self, what: str, lines: Sequence[str], *, timeout_s: float) -> None:
        """Refuses, on every rank, what is not the same on all.

        Args:
            what: it is.
            lines: the text of it.
            timeout_s: how long the others may take.

        Raises:
            PeerLostError: one is gone, or late.
            ProgramError: they differ; it names the ranks, and the first line that does.
        """
        difference = first_difference(
            lines, lambda part, data: self.gather(f"{part} of {what}", data, timeout_s=timeout_s)
        )
        if difference is not None:
            hint = "run the same script, with the same arguments, on each rank"
            raise ProgramError(f"{what} is not the same on all ranks: {difference}", hint=hint)

    @contextmanager
    def running(self, runs: str, timeout_s: float) -> Iterator[Wait]:
        """Runs a step that all ranks compute together; as `together`.

        Args:
            runs: which program, with which shapes: the same on all ranks.
            timeout_s: how long it may take.
        """
        self.member.now(replace(self.member.doing, runs=runs))
        with self.together(RUNNING, timeout_s) as wait:
            yield wait
        self.member.now(Doing(self.step, "between steps"))

    @contextmanager
    def together(self, what: str, timeout_s: float) -> Iterator[Wait]:
        """Lets arrays be computed that all ranks compute together, and waited for.

        Args:
            what: is computed, in few words.
            timeout_s: how long it may take.

        Yields:
            What waits for arrays. It looks again and again whether they are there, and does not
            wait inside XLA: nothing can be raised there.

        Raises:
            PeerLostError: a rank is gone, or late.
            ProgramError: ranks do not run the same.
        """
        self.check()
        before = self.member.doing
        self.doing(what)
        try:
            yield lambda arrays: self._wait(arrays, what, timeout_s)
        except (RuntimeError, ValueError) as error:
            self._explain(error)
            raise
        self.member.now(before)

    def _wait(self, arrays: Sequence[Any], what: str, timeout_s: float) -> None:
        start = time.monotonic()
        for array in arrays:
            while not array.is_ready():
                waited = time.monotonic() - start
                self.check()
                if waited > timeout_s:
                    raise self.member.late(what, timeout_s)
                time.sleep(min(_LATEST_S, max(_SOONEST_S, waited / _SHARE)))
        jax.block_until_ready(arrays)  # raises what went wrong

    def _explain(self, error: Exception) -> None:
        """Raises who is gone, where that is why something failed.

        Collectives notice a process that ends at once, and cannot say whose it was; the beats can.
        """
        text = str(error)
        if not any(word in text for word in ("Gloo", "NCCL", "onnection")):
            return
        until = time.monotonic() + 2 * self._lost_after_s
        while self.member.verdict is None and time.monotonic() < until:
            time.sleep(_LATEST_S)
        if (verdict := self.member.verdict) is not None:
            raise self.member.error(verdict) from error

    def leave(self) -> None:
        """Waits until every rank is done, and ends all lines; raises as `gather` does."""
        self.member.bye()
        self.close()

    def close(self) -> None:
        """Ends all lines, when what is under way has been sent."""
        self.member.close()
        if self._serving is not None:
            self._serving.close()
