"""A job of any system on two hosts, followed by the events that its processes write."""

import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from systems import task
from systems.hosts import Hosts

End = Literal["finished", "ended", "stuck"]
_POLL_S = 0.02
_STARTS_S = 120.0
_LAST_LINES = 12  # of a failed member that an error repeats


@dataclass(frozen=True)
class Member:
    """A process that a launch starts.

    Attributes:
        name: as in the events, such as "server-0".
        host: where it runs.
        words: its command.
        main: the job has ended when all main members have.
        after_s: the time by which it starts later than the first.
    """

    name: str
    host: int
    words: Sequence[str]
    main: bool = False
    after_s: float = 0.0


@dataclass(frozen=True)
class Event:
    at: float
    member: str
    what: str
    number: int


class Job:
    """A job, with its folder.

    Args:
        members: what a launch starts, in order.
        hosts: where; all processes on them are the job's.
        folder: of events, logs and the result; an empty one.
        environment: of the processes.
    """

    def __init__(
        self, members: Sequence[Member], hosts: Hosts, folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.members, self.hosts, self.folder = members, hosts, folder
        self._environment = os.environ | environment
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def launch(self) -> None:
        """Starts all members."""
        began = time.monotonic()
        for member in self.members:
            time.sleep(max(0.0, began + member.after_s - time.monotonic()))
            self.start(member.name)

    def start(self, name: str) -> None:
        """Starts a member; it has no other in its place."""
        [member] = [each for each in self.members if each.name == name]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [*self.hosts.on(member.host), *member.words],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def events(self, what: str = "") -> list[Event]:
        """Returns the events so far, or those of one kind."""
        with suppress(FileNotFoundError):
            lines = (self.folder / "events").read_text().splitlines()
            split = (line.split() for line in lines)
            found = [Event(float(at), member, name, int(n)) for at, member, name, n in split]
            return [event for event in found if what in {"", event.what}]
        return []

    @property
    def newest(self) -> int:
        """The latest step that has ended."""
        return max((event.number for event in self.events("step")), default=0)

    def wait_step(self, number: int) -> None:
        """Waits until a step has ended; raises RuntimeError if the job has, or takes too long."""
        deadline, newest = time.monotonic() + _STARTS_S, 0
        while newest < number:
            if (now := self.newest) > newest:
                newest, deadline = now, time.monotonic() + _STARTS_S
            if self._over() or time.monotonic() > deadline:
                raise RuntimeError(f"the job did not come to step {number}: {self.last_lines()}")
            time.sleep(_POLL_S)

    def kill(self, name: str) -> None:
        """Kills a process of the job, which it started itself or which reported its id."""
        pid = self._pid(name)
        if pid not in self.hosts.pids():
            raise RuntimeError(f"{name}, process {pid}, does not run on the hosts")
        os.kill(pid, signal.SIGKILL)

    def _pid(self, name: str) -> int:
        if reported := [each.number for each in self.events("process") if each.member == name]:
            return reported[-1]
        pattern = rf"launch +\| {name.replace('-', ' ')}: process (\d+)"  # of `jaxfleet launch`
        logs = (path.read_text(errors="replace") for path in self.folder.glob("*.log"))
        if printed := [int(pid) for log in logs for pid in re.findall(pattern, log)]:
            return printed[-1]
        return self._running[name].pid

    def wait_end(self, patience_s: float) -> tuple[End, float]:
        """Waits until the job is done, has failed, or has not got further for some time.

        Returns:
            how it ended, and when, on the clock of the events. A job that is over has no process
            left, also if it did not end its servers.
        """
        newest, deadline = 0, time.monotonic() + patience_s
        while not self._over():
            if (now := self.newest) > newest:
                newest, deadline = now, time.monotonic() + patience_s
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        ended = time.monotonic()
        how: End = "ended" if self._over() else "stuck"
        if (self.folder / "final.npz").exists():
            how = "finished"
        self.end()
        return how, ended

    def end(self) -> None:
        """Ends all processes of the job."""
        self.hosts.kill_all()
        for process in self._running.values():
            process.wait()

    def _over(self) -> bool:
        ends = {name: process.poll() is not None for name, process in self._running.items()}
        return all(ends[member.name] for member in self.members if member.main)

    def last_lines(self) -> str:
        """Returns the last lines of every member's log."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            parts.append("\n".join([f"{path.name}:", *lines]))
        return "\n".join(parts)


def outage_s(steps: Sequence[Event], fault: float) -> float:
    """Returns the longest time after a fault, in seconds, without a further step.

    A step that an earlier process had ended is not a further one.
    """
    reached, ends = 0, [fault]
    for event in steps:
        if event.number > reached:
            reached = event.number
            if event.at > fault:
                ends.append(event.at)
    return max((late - early for early, late in itertools.pairwise(ends)), default=0.0)


def repeated(events: Sequence[Event], fault: float) -> int:
    """Returns how many steps were computed again by processes that started after a fault."""
    reached = count = 0
    leader = next((event.member for event in events if event.what == "restored"), "")
    for event in events:
        if event.what == "step":
            reached = max(reached, event.number)
        elif event.what == "restored" and event.member == leader and event.at > fault:
            count += max(0, reached - event.number)
    return count


def environment(folder: Path, saves: Path) -> dict[str, str]:
    """Returns what processes of every system get."""
    return {
        task.FOLDER: str(folder),
        task.SAVES: str(saves),
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }
