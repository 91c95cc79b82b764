"""One process of a job: start, output, and end together with its descendants."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from jaxfleet.errors import PeerLostError
from jaxfleet.launch import gate
from jaxfleet.launch.guard import GuardClient, signal_group
from jaxfleet.launch.output import Console, Reader

_LAST_LINES = 20
_DRAIN_S = 5.0  # to show output written before the end
_KILL_S = 2.0
_LOOK_S = 0.05

# A process waits there until the guard tracks it, so it is never without a guard.
_GATE = (sys.executable, "-I", "-S", gate.__file__)


class Process:
    """Runs a command in its own session.

    `on_end` is called from another thread when it has ended, and `on_gone` once its descendants
    have ended too, at most `grace_s` later, and all output was shown. `inherited` are descriptors
    that the command keeps.
    """

    def __init__(
        self,
        *,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        console: Console,
        log: BinaryIO | None,
        keeper: GuardClient,
        grace_s: float,
        on_end: Callable[["Process"], None],
        on_gone: Callable[["Process"], None],
        inherited: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        self.told: signal.Signals | None = None  # sent by this launch to end it
        self._keeper, self._grace_s = keeper, grace_s
        self._on_end, self._on_gone = on_end, on_gone
        self._began, self._ended_at = time.monotonic(), 0.0
        self._empty = threading.Event()  # set once its group is empty: the number may be reused
        self._gone = threading.Event()
        self._popen = subprocess.Popen(  # noqa: S603  # the user's own command
            [*_GATE, str(os.getpid()), *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=inherited,
            bufsize=0,
        )
        self.pid = self._popen.pid
        self._readers = [
            Reader(stream, name=name, console=console, last=self.last, log=log, error=error)
            for stream, error in ((self._popen.stdout, False), (self._popen.stderr, True))
            if stream is not None
        ]
        self._open_gate()
        threading.Thread(target=self._follow, name=f"waits for {name}", daemon=True).start()

    @property
    def status(self) -> int | None:
        """The exit status as in a shell, 128 + n for signal n; None while it runs."""
        code = self._popen.returncode
        return 128 - code if code is not None and code < 0 else code

    @property
    def seconds(self) -> float:
        return (self._ended_at or time.monotonic()) - self._began

    @property
    def gone(self) -> bool:
        """Whether it and its descendants have ended and all output was shown."""
        return self._gone.is_set()

    @property
    def lacks_peer(self) -> bool:
        """Whether its last lines report that it lost a peer."""
        return any(PeerLostError.__name__ in line for line in self.last)

    @property
    def ending(self) -> str:
        code = self._popen.returncode
        if code is None:
            return "still runs"
        if self.told is not None:
            return f"stopped with {self.told.name}"
        if code < 0:
            return f"killed by {_signal_name(-code)}"
        return f"ended with exit code {code}" if code else "ended well"

    def rename(self, name: str, log: BinaryIO | None) -> None:
        """Gives a spare process its name in the job; its output is shown under that from now on."""
        self.name = name
        for reader in self._readers:
            reader.rename(name, log)

    def tell(self, number: signal.Signals) -> None:
        """Sends a signal to it and its descendants; stopped processes are continued first."""
        if self._empty.is_set():
            return
        if self._popen.returncode is None:
            self.told = number
        signal_group(self.pid, number)
        signal_group(self.pid, signal.SIGCONT)

    def ask_to_end(self) -> None:
        """Sends it SIGTERM alone: its descendants are needed until it ends."""
        self._popen.send_signal(signal.SIGTERM)
        self._popen.send_signal(signal.SIGCONT)

    def _open_gate(self) -> None:
        self._keeper.watch(self.pid)
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._popen.stdin as gate:
            gate.write(b"\n")

    def _follow(self) -> None:
        self._popen.wait()
        self._ended_at = time.monotonic()
        self._on_end(self)
        self._end_rest()
        for reader in self._readers:
            reader.finish(_DRAIN_S)
        self._gone.set()
        self._on_gone(self)

    def _end_rest(self) -> None:
        for number, wait_s in ((signal.SIGTERM, self._grace_s), (signal.SIGKILL, _KILL_S)):
            deadline = time.monotonic() + wait_s
            alive = signal_group(self.pid, number)
            while alive and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
                alive = signal_group(self.pid, 0)
        self._empty.set()
        self._keeper.forget(self.pid)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
