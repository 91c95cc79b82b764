"""The control socket of a launch, at which `jaxfleet scale` asks for other numbers of processes.

The launch listens at a Unix socket in a folder that only its user may enter, among the temporary
files. It greets with a line of JSON; a request and its answer are a line each::

    {"job": "job-1a2b3c4d"}
    {"trainers": 3, "servers": null}
    {"done": "trainer 2 joins job 'job-1a2b3c4d' at its next step"}

An error has `error` and `hint` instead of `done`.
"""

import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from jaxfleet.env import is_private
from jaxfleet.errors import ConnectError, StrategyError

NAME = "control"
_FOLDERS = "jaxfleet-*"  # as `temporary_folder` names them
_GREETING_S = 5.0
_REQUEST_S = 5.0
_ANSWER_S = 240.0  # new servers are started meanwhile, and server 0 is asked several times
_RETRY_S = 0.1
_LONGEST = 4096  # characters of a line


class ControlSocket:
    """Answers requests at a socket, in a thread of its own, until it is closed.

    Args:
        folder: only this user may enter it.
        job: the job's name.
        scale: asks for a number of trainers, one of servers, or both, and returns what is done;
            raises what is wrong.

    Raises:
        OSError: the socket cannot be made, for example because its path is too long.
    """

    def __init__(
        self, folder: Path, job: str, scale: Callable[[int | None, int | None], str]
    ) -> None:
        self._job, self._scale = job, scale
        self._scaling = threading.Lock()  # one request after another
        self._is_closed = False
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(str(folder / NAME))
            self._socket.listen()
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="jaxfleet-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                time.sleep(_RETRY_S)  # closed, or no descriptor is free
                continue
            # One that only looks for a job, or waits, must not keep another waiting.
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError, RecursionError):
            connection.settimeout(_REQUEST_S)
            self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        with connection.makefile("rw", encoding="utf-8") as lines:
            _write(lines, {"job": self._job})
            request = _read(lines)
            if request is None:
                return  # it only looked for a job
            try:
                answer = {"done": self._done(request.get("trainers"), request.get("servers"))}
            except Exception as error:  # noqa: BLE001  # who asked is told, and the launch goes on
                answer = {"error": str(error), "hint": getattr(error, "hint", None) or ""}
            _write(lines, answer)

    def _done(self, trainers: object, servers: object) -> str:
        numbers = [_number("trainers", trainers), _number("servers", servers)]
        if numbers == [None, None]:
            raise StrategyError("the request has no number of trainers, nor of servers")
        with self._scaling:
            return self._scale(*numbers)


def _number(name: str, value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise StrategyError(f"the request has {value!r} for the number of {name}")


@dataclass(frozen=True)
class RunningLaunch:
    """A connection to a launch that runs."""

    job: str
    connection: socket.socket
    lines: TextIO

    def scale(self, trainers: int | None = None, servers: int | None = None) -> str:
        """Asks for a number of trainers, of servers, or both; returns what the launch does.

        Raises:
            ConnectError: it does not answer.
            StrategyError: it refuses.
        """
        self.connection.settimeout(_ANSWER_S)
        answer = None
        with suppress(OSError, ValueError):
            _write(self.lines, {"trainers": trainers, "servers": servers})
            answer = _read(self.lines)
        if answer is None:
            what = f"the launch of job '{self.job}' did not answer"
            raise ConnectError(what, hint="has it ended?")
        if "error" in answer:
            hint = answer.get("hint")
            raise StrategyError(str(answer["error"]), hint=str(hint) if hint else None)
        return str(answer.get("done"))


@contextmanager
def running_launch(job: str | None = None) -> Iterator[RunningLaunch]:
    """Context with the launch of this user on this machine that runs a job with servers.

    Args:
        job: the job's name; any if only one runs.

    Raises:
        StrategyError: there is none, or there are several.
    """
    found = list(_running_launches())
    try:
        chosen = [each for each in found if job in {None, each.job}]
        if len(chosen) == 1:
            yield chosen[0]
            return
        names = ", ".join(sorted(each.job for each in found))
        if chosen:
            which = f"{len(chosen)} launches of job '{job}'" if job else f"several jobs: {names}"
            hint = "choose one with --job" if job is None else "start each with a --job of its own"
            raise StrategyError(f"this user runs {which}", hint=hint)
        if names:
            raise StrategyError(f"this user runs no job '{job}' here", hint=f"there is {names}")
        what = "this user runs no job with servers on this machine"
        raise StrategyError(what, hint="jaxfleet launch, with the same TMPDIR, starts one")
    finally:
        for each in found:
            with suppress(OSError):  # it writes what is left, to a launch that may have ended
                each.lines.close()
            each.connection.close()


def _running_launches() -> Iterator[RunningLaunch]:
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{_FOLDERS}/{NAME}")):
        if not is_private(path.parent):
            continue  # another user's
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_GREETING_S)
        greeting: Mapping[str, object] | None = None
        with suppress(OSError, ValueError):
            connection.connect(str(path))
            lines = connection.makefile("rw", encoding="utf-8")
            greeting = _read(lines)
        if greeting is None:
            connection.close()  # its launch was killed
            continue
        yield RunningLaunch(str(greeting.get("job")), connection, lines)


def _write(lines: TextIO, message: Mapping[str, object]) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()


def _read(lines: TextIO) -> Mapping[str, object] | None:
    """Returns the next message; None at the end of the connection."""
    line = lines.readline(_LONGEST)
    if not line:
        return None
    message = json.loads(line)
    return message if isinstance(message, dict) else None
