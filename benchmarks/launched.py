"""A job that `jaxfleet launch` runs, followed by its output, whose processes a benchmark kills."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Self

LONGEST_S = 300.0  # without a step, or to an end
_LAST_LINES = 200  # of a failed job that an error repeats
_STEP = re.compile(r"trainer (\d+) +\| step (\d+)$")
_STARTED = re.compile(r"launch +\| (server|trainer) (\d+): process (\d+)(?:, at ([^\s,]+))?")

Victim = tuple[str, int]  # a process of the job: ("server", 0)


class LaunchedJob:
    """Launches a job whose trainers print `step N` after every step.

    A context, at whose end no process of the job is left.

    Args:
        words: options of `jaxfleet launch`, the script and its arguments.
        trainers: the number of trainers.
        output: a file that gets all output.

    Attributes:
        steps: the times at which each trainer's steps ended.
        newest: the last step of each trainer.
        pids: the processes of each member, the newest last.
        endpoints: the addresses of servers, by number.
        lines: the output but for steps, with times.
    """

    def __init__(self, words: Sequence[str], *, trainers: int, output: Path | None = None) -> None:
        self.trainers = trainers
        self.steps: dict[int, list[float]] = {number: [] for number in range(trainers)}
        self.newest = dict.fromkeys(range(trainers), 0)
        self.pids: dict[Victim, list[int]] = {}
        self.endpoints: dict[int, str] = {}
        self.lines: list[tuple[float, str]] = []
        self._output = output
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxfleet", "launch", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with (self._output or Path(os.devnull)).open("a", buffering=1) as output:
            for line in self.process.stdout:
                now = time.monotonic()
                if found := _STEP.match(line):
                    trainer = int(found[1])
                    self.steps[trainer].append(now)
                    self.newest[trainer] = max(self.newest[trainer], int(found[2]))
                    continue
                output.write(f"{now:.3f} {line}")
                self.lines.append((now, line.rstrip()))
                if found := _STARTED.match(line):
                    self.pids.setdefault((found[1], int(found[2])), []).append(int(found[3]))
                    if found[4]:
                        self.endpoints[int(found[2])] = found[4]

    @property
    def whole_starts(self) -> int:
        """How often the whole job was started again."""
        return sum("the whole job is started again" in line for _, line in self.lines)

    def error(self, what: str) -> RuntimeError:
        """Returns an error with the last lines of the job's output."""
        text = "\n".join(line for _, line in self.lines[-_LAST_LINES:])
        return RuntimeError(f"{what}; its last lines:\n{text}")

    def wait_steps(self, since: float, count: int) -> None:
        """Waits until every trainer has ended some steps since a time."""
        deadline = time.monotonic() + LONGEST_S
        while any(_count_since(times, since) < count for times in self.steps.values()):
            self._check(deadline)
            time.sleep(0.02)

    def _check(self, deadline: float) -> None:
        if (code := self.process.poll()) is not None:
            self._reader.join(LONGEST_S)
            raise self.error(f"the job ended with {code}")
        if time.monotonic() > deadline:
            raise self.error(f"the job has not gone on for {LONGEST_S:g} s")

    def kill(self, victim: Victim) -> int | None:
        """Kills a member with SIGKILL; returns its number of starts, None if it is not running."""
        pids = self.pids.get(victim, [])
        starts = len(pids)
        if not pids:
            return None
        try:
            descriptor = os.pidfd_open(pids[-1])  # the number may be another's by now
        except ProcessLookupError:
            return None
        try:
            if _parent(pids[-1]) != self.process.pid:
                return None
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return starts
        finally:
            os.close(descriptor)
        return None

    def wait_starts(self, victim: Victim, starts: int) -> None:
        """Waits until a member was started more often than that."""
        deadline = time.monotonic() + LONGEST_S
        while len(self.pids[victim]) <= starts:
            self._check(deadline)
            time.sleep(0.02)

    def outage_s(self, killed: float) -> float:
        """Returns the time from a kill to the end of the longest gap between a trainer's steps."""
        ends = []
        for times in self.steps.values():
            after = [killed, *(at for at in list(times) if at > killed)]
            gaps = [(late - early, late) for early, late in itertools.pairwise(after)]
            ends.append(max(gaps)[1])
        return max(ends) - killed

    def finish(self) -> None:
        """Waits for the end of the job, which its script was told to come to."""
        seen, deadline = -1, 0.0
        while self.process.poll() is None:
            if (now := sum(self.newest.values())) != seen:
                seen, deadline = now, time.monotonic() + LONGEST_S
            if time.monotonic() > deadline:
                raise self.error(f"the job has not gone on for {LONGEST_S:g} s")
            time.sleep(0.1)
        self._reader.join(LONGEST_S)
        if code := self.process.returncode:
            raise self.error(f"the job ended with {code}")

    def close(self) -> None:
        """Ends the job; the launch, or its guard if it is killed, ends all its processes."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(LONGEST_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _count_since(times: list[float], since: float) -> int:
    count = 0
    for at in reversed(times):
        if at <= since:
            break
        count += 1
    return count


def _parent(pid: int) -> int | None:
    """Returns the parent of a process, None if there is no such process."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])
    return None


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise SystemExit, so that jobs are closed."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = [(each, signal.signal(each, leave)) for each in (signal.SIGTERM, signal.SIGHUP)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def import_s(times: int = 3) -> float:
    """Returns the median time of a fresh process that imports JAX."""
    took = []
    for _ in range(times):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import jax"], check=True)
        took.append(time.monotonic() - began)
    return sorted(took)[len(took) // 2]
