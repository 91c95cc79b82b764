"""MetricsLog: writes a step's scalar metrics and statistics where their user keeps them."""

import atexit
import itertools
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, Self, TypeAlias
from weakref import WeakMethod

from jaxfleet.errors import StrategyError
from jaxfleet.observability.notices import alert
from jaxfleet.runtime.scalar_metrics import ScalarMetrics, StepScalars, value_of

STATISTICS = "jaxfleet/"  # before the names of a step's own statistics
_FLUSH_S = 5.0  # between writes to disk, for a board that watches and a process that is killed
_FILES = itertools.count()  # of this process, so that two logs of one second differ


class MetricsWriter(Protocol):
    """Receives metrics, as the writers of `clu.metric_writers` do. A method `flush` is optional."""

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None: ...


class TensorBoardWriter:
    """Writes event files that TensorBoard reads, one file for each writer.

    Args:
        folder: created if missing.

    Raises:
        StrategyError: tensorboardX is not installed.
        OSError: the file cannot be created.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder, self._board = Path(folder), _tensorboard()
        self.folder.mkdir(parents=True, exist_ok=True)
        suffix = f".{os.getpid()}.{next(_FILES)}"
        self._flushed = time.time()
        self._file = self._board.EventsWriter(str(self.folder.absolute() / "events"), suffix)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [
            self._board.Summary.Value(tag=name, simple_value=value)
            for name, value in scalars.items()
        ]
        now = time.time()
        summary = self._board.Summary(value=values)
        event = self._board.Event(step=step, wall_time=now, summary=summary)
        self._file.write_event(event)
        if now - self._flushed >= _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        self._flushed = time.time()
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __repr__(self) -> str:
        return f"TensorBoardWriter('{self.folder}')"


AnyWriter: TypeAlias = MetricsWriter | str | Path


class MetricsLog:
    """Writes a step's scalars to a writer, in the order of steps, and without waiting for a step.

    A step's scalars are written at the first call thereafter that finds them computed; `flush` and
    `close` wait for the last. The log is closed with its step, and when the process ends.

    Args:
        writer: receives the metrics; None to write nothing.
        every: steps between two that are written.
        statistics: returns more numbers, some of which may not be computed yet.
        on_close: called once, with the log.
        clock: the time in seconds.

    Attributes:
        failures: number of writes that the writer has failed.
    """

    def __init__(
        self,
        writer: MetricsWriter | None,
        *,
        every: int,
        statistics: Callable[[], Mapping[str, Any]] = dict,
        on_close: Callable[["MetricsLog"], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writer, self._every, self._clock = writer, every, clock
        self._statistics, self._on_close = statistics, on_close
        self._queue: deque[tuple[StepScalars, Mapping[str, Any]]] = deque()
        self._since: tuple[int, float] | None = None  # a step, and when it returned
        self._process = os.getpid()
        self._is_open = writer is not None
        self._told_of_left_out = False
        self.failures = 0
        if self._is_open:
            atexit.register(self.close)

    def note(self, scalars: StepScalars) -> None:
        """Records a step, and writes those that are computed."""
        if self._is_of_parent:
            return
        step, now = scalars.step, self._clock()
        if step % self._every == 0:
            self._queue.append((scalars, self._numbers(step, now)))
            self._since = step, now
            self._tell_left_out(scalars.named.left_out)
        elif self._since is None:  # the first call also compiles
            self._since = step, now
        while self._queue and self._queue[0][0].is_ready:
            self._write(*self._queue.popleft())

    def flush(self) -> None:
        """Writes all recorded steps, after waiting for them, and flushes the writer."""
        if self._is_of_parent:
            return
        while self._queue:
            self._write(*self._queue.popleft())
        flush = getattr(self._writer, "flush", None)
        if self._is_open and flush is not None:
            step = self._since[0] if self._since is not None else 0
            self._attempt(flush, f"could not flush after step {step}")

    def close(self) -> None:
        """Writes all recorded steps and ends the log; a second call does nothing."""
        if not self._is_open or self._is_of_parent:
            return
        self.flush()
        self._is_open = False
        atexit.unregister(self.close)
        if self._on_close is not None:
            self._on_close(self)
        if isinstance(self._writer, TensorBoardWriter):  # any other is its owner's to close
            self._attempt(self._writer.close, "could not be closed")
        if self.failures > 1:
            alert(f"{_shown(self._writer)} failed {self.failures} times; those metrics are lost")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _is_of_parent(self) -> bool:
        """Whether this process is a fork, which must not write into its parent's files."""
        return self._process != os.getpid()

    def _numbers(self, step: int, now: float) -> dict[str, Any]:
        numbers = dict(self._statistics())
        if self._since is not None and now > self._since[1]:
            numbers["steps_per_second"] = (step - self._since[0]) / (now - self._since[1])
        return numbers

    def _write(self, scalars: StepScalars, numbers: Mapping[str, Any]) -> None:
        values = {f"{STATISTICS}{name}": value_of(number) for name, number in numbers.items()}
        found = {name: value for name, value in values.items() if value is not None}
        found.update(scalars.read())  # a metric of such a name is the user's
        if found and self._writer is not None:
            writer, step = self._writer, scalars.step
            what = f"could not write the metrics of step {step}"
            self._attempt(lambda: writer.write_scalars(step, found), what)

    def _attempt(self, work: Callable[[], object], what: str) -> None:
        """Calls the writer, whose errors must not end the training; only the first is reported."""
        try:
            work()
        except Exception as error:  # noqa: BLE001  # it is the user's, or a full disk
            self.failures += 1
            if self.failures == 1:
                said = f"{type(error).__name__}: {error}"
                shown = _shown(self._writer)
                alert(f"{shown} {what}: {said}; the training goes on (warned of once)")

    def _tell_left_out(self, count: int) -> None:
        if count and not self._told_of_left_out:
            self._told_of_left_out = True
            alert(f"the step returns {count} more scalar metrics than can be kept")


def _shown(writer: object) -> str:
    try:
        return repr(writer)
    except Exception:  # noqa: BLE001  # an error of the user's `__repr__` must not hide the first
        return type(writer).__name__


class Logging(ABC):
    """A step whose metrics can be logged."""

    _scalars: ScalarMetrics

    def log_to(
        self,
        writer: AnyWriter,
        *,
        every: int = 1,
        statistics: bool = True,
        only_first: bool = True,
        start: int = 0,
    ) -> MetricsLog:
        """Writes the scalar metrics of the following steps, and some statistics, to a writer.

        Steps are counted from 1, or from the step of a restored checkpoint. Nothing waits for a
        step that is still running. A writer that fails is reported once, and the training goes on.

        Args:
            writer: a folder for TensorBoard, or a writer of `clu.metric_writers`, or any object
                with `write_scalars(step, scalars)` and, if it has one, `flush()`.
            every: writes the steps whose number is a multiple of it.
            statistics: write the step's own numbers too, as `jaxfleet/steps_per_second`.
            only_first: of several ranks or trainers only the first writes; otherwise each does, to
                a folder of its own.
            start: number of steps that led to the state, if the step did not restore it.

        Returns:
            The log; it ends by its `close`, by that of the step, or with the process.

        Raises:
            StrategyError: `writer` is no such object, `every` or `start` is invalid, or
                tensorboardX is missing.
            OSError: the folder cannot be written.
        """
        _check_count("every", every, least=1)
        _check_count("start", start, least=0)
        if not isinstance(writer, str | Path) and not hasattr(writer, "write_scalars"):
            what = f"log_to: {writer!r} is neither a folder nor has a method write_scalars"
            raise StrategyError(what, hint="pass a folder for TensorBoard, or a writer of clu's")
        self._scalars.step = max(self._scalars.step, start)
        if only_first and not self._is_first:
            return MetricsLog(None, every=every)
        own = WeakMethod(self._statistics)
        log = MetricsLog(
            TensorBoardWriter(writer) if isinstance(writer, str | Path) else writer,
            every=every,
            statistics=lambda: (own() or dict)() if statistics else {},
            on_close=self._scalars.listeners.remove,
        )
        self._scalars.listeners.append(log)
        return log

    def _close_logs(self) -> None:
        for log in tuple(self._scalars.listeners):
            log.close()

    @property
    @abstractmethod
    def _is_first(self) -> bool:
        """Whether this process is the first of those that run the step."""

    @abstractmethod
    def _statistics(self) -> Mapping[str, Any]:
        """Returns numbers about the step, some of which may not be computed yet."""


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        what = f"log_to: {name} is {value!r}"
        raise StrategyError(what, hint=f"pass an integer of at least {least}")


def _tensorboard() -> Any:
    """Returns what of tensorboardX writes event files."""
    try:
        from tensorboardX.event_file_writer import EventsWriter  # noqa: PLC0415  # an extra
        from tensorboardX.proto.event_pb2 import Event  # noqa: PLC0415
        from tensorboardX.proto.summary_pb2 import Summary  # noqa: PLC0415
    except ImportError as error:
        hint = "pip install 'jaxfleet[metrics]', or pass an object with write_scalars"
        raise StrategyError("event files of TensorBoard need tensorboardX", hint=hint) from error
    return SimpleNamespace(EventsWriter=EventsWriter, Event=Event, Summary=Summary)
