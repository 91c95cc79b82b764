"""Start of a job's processes, with their output, logs, events, folders and secret."""

import fcntl
import os
import queue
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, TypeAlias, TypeVar

from jaxfleet.env import PeriodicSaves, read_meeting_dir
from jaxfleet.launch.guard import GuardClient
from jaxfleet.launch.job_spec import AnyJob
from jaxfleet.launch.output import Console
from jaxfleet.launch.process import Process
from jaxfleet.observability import LongWait

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Ended:
    """A process has ended; its descendants may still run."""

    process: Process


@dataclass(frozen=True)
class Gone:
    """A process and its descendants have ended, and all their output was shown."""

    process: Process


@dataclass(frozen=True)
class Told:
    """This process received a signal or an equivalent request."""

    number: signal.Signals


@dataclass(frozen=True)
class Due:
    """It is time to start a process again: `server` or `trainer`, and its number."""

    index: int
    role: str = "server"
    start: int = 0  # of the whole job, to which it belongs


@dataclass(frozen=True)
class SparesDue:
    """It is time to start spare processes."""


@dataclass(frozen=True)
class Asked:
    """A request that the thread of the launch carries out: it calls `act`, and answers."""

    act: Callable[[], Any]
    answer: Future[Any]


Event: TypeAlias = Ended | Gone | Told | Due | SparesDue | Asked


class Events:
    """Queue of events. Any thread or signal handler may put one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        self._queue.put(event)

    def put_later(self, event: Event, seconds: float) -> None:
        timer = threading.Timer(seconds, self._queue.put, [event])
        timer.daemon = True
        timer.start()

    def next(self, deadline: float) -> Event | None:
        """Returns the next event, or None at the deadline."""
        left = deadline - time.monotonic()
        try:
            return self._queue.get(timeout=min(max(left, 0.0), threading.TIMEOUT_MAX))
        except queue.Empty:
            return None

    def awaited(self, deadline: float, wait: LongWait, describe: Callable[[], str]) -> Event | None:
        """Returns the next event, as `next`, and logs the wait for it once it is long."""
        event = self.next(min(deadline, time.monotonic() + wait.left_s))
        if event is None and time.monotonic() < deadline:
            wait.look(describe)
            event = self.next(deadline)
        return event

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Context in which termination signals become events.

        Signals reach only the main thread; in another one this does nothing. Signals that are
        ignored, as under `nohup` and in a shell's background jobs, stay ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [each for each in _STOPPING if signal.getsignal(each) != signal.SIG_IGN]
        before = [(each, signal.signal(each, self._tell)) for each in heard]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.put(Told(signal.Signals(number)))


class Starter:
    """Starts the processes of a job, and keeps track of them."""

    def __init__(
        self,
        job: AnyJob,
        *,
        keeper: GuardClient,
        console: Console,
        events: Events,
        logs: "Logs",
    ) -> None:
        self._job, self._keeper, self._logs = job, keeper, logs
        self._settings = _settings(job)
        self.console, self.events = console, events
        self.everybody: list[Process] = []

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Process:
        process = self._process(name, command, environment)
        self.everybody.append(process)
        return process

    def name_log(self, name: str, file: str) -> None:
        """Gives a process, which is one more than at first, a file for its log."""
        self._logs.name(name, file)

    def start_spare(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        inherited: Sequence[int],
    ) -> Process:
        """Starts a process that has no part in the job until `enlist` gives it one."""
        return self._process(name, command, environment, inherited)

    def enlist(self, spare: Process, name: str) -> None:
        """Counts a spare process among the job's, under the name of its new role."""
        spare.rename(name, self._logs.get(name))
        self.everybody.append(spare)

    def settled(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment of a process with the settings of this launch."""
        return {**environment, **self._settings}

    def _process(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        inherited: Sequence[int] = (),
    ) -> Process:
        return Process(
            name=name,
            command=command,
            environment=self.settled(environment),
            console=self.console,
            log=self._logs.get(name),
            keeper=self._keeper,
            grace_s=self._job.grace_s,
            on_end=lambda process: self.events.put(Ended(process)),
            on_gone=lambda process: self.events.put(Gone(process)),
            inherited=inherited,
        )


class Logs:
    """The log files of a job's processes, each opened when its first process starts.

    Machines that share a folder do not empty each other's files: a process has a number of its own.
    """

    def __init__(self, folder: Path | None, names: Mapping[str, str]) -> None:
        self._folder, self._names = folder, dict(names)
        self._opened: dict[str, BinaryIO] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str) -> BinaryIO | None:
        """Returns a process's file, if the job has logs and the process has one."""
        if self._folder is None or name not in self._names:
            return None
        if name not in self._opened:
            self._opened[name] = (self._folder / self._names[name]).open("wb", buffering=0)
        return self._opened[name]

    def name(self, name: str, file: str) -> None:
        self._names[name] = file

    def close(self) -> None:
        for file in self._opened.values():
            file.close()


def log_name(role: str, number: int) -> str:
    """Returns the name of a process's log.

    >>> log_name("trainer", 0)
    'trainer-0.log'
    """
    return f"{role}-{number}.log"


def meeting_folder(job: AnyJob, stack: ExitStack) -> tuple[Path | None, list[Path]]:
    """Returns the folder of the role makers' rendezvous, and the folders that the launch removes.

    Several machines need a shared one: the folder that the environment specifies, if any.
    """
    if job.nodes.several:
        return read_meeting_dir(), []
    folder = temporary_folder(stack)
    return folder, [folder]


def periodic_saves(
    job: AnyJob, stack: ExitStack, folder: Path | None = None
) -> tuple[PeriodicSaves | None, list[Path]]:
    """Returns the job's periodic checkpoints, and the folders that the launch removes.

    Args:
        job: the job.
        stack: removes a temporary folder.
        folder: where they are unless the job has a folder for them.
    """
    if job.save_every is None:
        return None, []
    root, removed = job.save_to or folder, list[Path]()
    if root is None:
        root = temporary_folder(stack)
        removed.append(root)
    saved = root.resolve() / job.name / "saved"
    return PeriodicSaves(saved, job.save_every, job.save_keep), removed


@contextmanager
def starting(
    job: AnyJob, logs: Mapping[str, str], *, folders: Sequence[Path] = ()
) -> Iterator[Starter]:
    """Context in which a job's processes can be started; ends them all."""
    with ExitStack() as stack:
        events = Events()
        stack.enter_context(events.signals())
        console = Console(tuple(logs), lambda: events.put(Told(signal.SIGPIPE)), quiet=job.quiet)
        written = Logs(job.log_dir, logs)
        stack.callback(written.close)
        keeper = GuardClient(job.grace_s, folders)
        stack.callback(keeper.close)
        yield Starter(job, keeper=keeper, console=console, events=events, logs=written)


def _settings(job: AnyJob) -> dict[str, str]:
    """Returns the environment of the processes apart from their roles."""
    settings = {"PYTHONUNBUFFERED": "1"}  # unbuffered, so that lines are shown at once
    if job.threads is not None:
        # XLA's pool on the CPU, and numpy's.
        names = ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        settings |= dict.fromkeys(names, str(job.threads))
    return settings


def temporary_folder(stack: ExitStack) -> Path:
    """Creates a folder, mode 0700, that is removed with the stack.

    It is locked meanwhile: systemd-tmpfiles, which removes files unused for days, skips locked
    folders, and a server that is restarted in the third week needs its secret.
    """
    made = tempfile.TemporaryDirectory(prefix="jaxfleet-", ignore_cleanup_errors=True)
    folder = Path(stack.enter_context(made))
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return folder


SECRET_NAME = "secret"

AJob = TypeVar("AJob", bound=AnyJob)


def with_secret(job: AJob, stack: ExitStack) -> tuple[AJob, list[Path]]:
    """Returns the job with the file of its secret, and the folders that the launch removes.

    A job without a given secret gets a new one: 32 random bytes in a file that only its owner may
    read (0600), in a new folder that only its owner may enter (0700). Processes get the file's
    path, never the secret. With `insecure` there is none.
    """
    if job.secret_file is not None or job.insecure:
        return job, []
    folder = temporary_folder(stack)
    return replace(job, secret_file=write_secret(folder / SECRET_NAME)), [folder]


def write_secret(path: Path) -> Path:
    """Writes a new secret to a new file, and returns its path."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return path
