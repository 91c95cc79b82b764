"""Spare processes: each has imported what a server needs, and becomes one when another dies.

Importing JAX and compiling for the first time take most of a cold start. A spare has done both, and
waits at a pipe for its role: the environment of the server whose place it takes. It computes
nothing before, and belongs to no job. It ends when the pipe is closed, so never outlives the
launch; the guard watches it like any process.
"""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from jaxfleet.launch.guard import signal_group
from jaxfleet.launch.process import Process
from jaxfleet.launch.starter import SparesDue, Starter

# After a start, servers and trainers need the processors: imports take 4 s of one.
_AFTER_S = 8.0
_MOST_DEATHS = 3  # of spares before their roles, after which none is started again


@dataclass(frozen=True)
class _Spare:
    process: Process
    pipe: int  # descriptor of its end at which this launch writes the role


class Spares:
    """Keeps some spare processes.

    Args:
        starter: starts them.
        command: of a spare, which reads its role from the descriptor that follows.
        environment: until it has a role.
        count: the number to keep.
    """

    def __init__(
        self,
        starter: Starter,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        count: int,
    ) -> None:
        self._starter, self._command, self._environment = starter, command, environment
        self._count = count
        self._idle: list[_Spare] = []
        self._deaths = 0

    @property
    def processes(self) -> list[Process]:
        """Those that have no role yet."""
        return [spare.process for spare in self._idle]

    def start_later(self) -> None:
        """Starts the missing ones once the processes that were just started are ready."""
        if len(self._idle) < self._count:
            self._starter.events.put_later(SparesDue(), _AFTER_S)

    def start_missing(self) -> None:
        while len(self._idle) < self._count:
            self._idle.append(self._start())

    def take(self, name: str, environment: Mapping[str, str]) -> Process | None:
        """Gives a role to a spare; returns it, or None if there is none."""
        text = json.dumps(self._starter.settled(environment)).encode()
        while self._idle:
            spare = self._idle.pop(0)
            if _write(spare.pipe, text) and spare.process.status is None:
                signal_group(spare.process.pid, signal.SIGCONT)  # someone may have stopped it
                self._starter.enlist(spare.process, name)
                return spare.process
            spare.process.tell(signal.SIGKILL)
            self.start_later()  # another
        return None

    def has_ended(self, process: Process) -> bool:
        """Whether a process that ended was a spare; starts another unless that happens often."""
        spare = next((one for one in self._idle if one.process is process), None)
        if spare is None:
            return False
        self._idle.remove(spare)
        os.close(spare.pipe)
        self._deaths += 1
        if self._deaths < _MOST_DEATHS:
            self.start_later()
        else:
            self._count = 0
            self._starter.console.say(
                f"{process.name} {process.ending}, as {self._deaths} of them: none is started "
                "again, and a dead server takes longer to come back"
            )
        return True

    def close(self) -> None:
        """Closes the pipes, which ends the spares."""
        while self._idle:
            os.close(self._idle.pop().pipe)

    def _start(self) -> _Spare:
        theirs, ours = os.pipe()
        try:
            process = self._starter.start_spare(
                "spare", [*self._command, str(theirs)], self._environment, [theirs]
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        os.set_blocking(ours, False)
        return _Spare(process, ours)


def _write(pipe: int, text: bytes) -> bool:
    """Writes a role and closes the pipe; returns False if the spare cannot take it all at once."""
    try:
        with suppress(BrokenPipeError, BlockingIOError):
            return os.write(pipe, text) == len(text)
        return False
    finally:
        os.close(pipe)
