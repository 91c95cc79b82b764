"""Scheduling and writing of a server's recovery checkpoints."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import numpy as np

from jaxfleet.checkpoint import PartReceipt, is_disk_full
from jaxfleet.errors import CheckpointError
from jaxfleet.observability.notices import alert
from jaxfleet.ps.server.checkpoints import RecoveryCheckpoints, RetainedValues
from jaxfleet.ps.server.options import ServerIdentity
from jaxfleet.ps.server.outbox import DeviceTask, Outbox
from jaxfleet.ps.server.scheduler import Progress
from jaxfleet.ps.server.server_links import ServerLinks
from jaxfleet.ps.server.state import ServerState

_REPLAY_S = 1.0  # estimated replay time after a restart: half of the 2 s that are aimed for
_STEP_S = 0.01  # least overhead of a replayed step beside its blocks: messages and waiting
_EVERY_S = 30.0
_MOST_REPLAY_S = 1.5  # beyond this saves may cost more, so that replay stays below 2 s
_SHARE = 20  # times the cost of the last save: a twentieth of the time goes to saves
_SHARE_THEN = 4  # the same if replay would take too long
_BESIDE = 0.25  # fraction of a concurrent save's time that it costs the steps: CPU and disk
_AGAIN_S, _MOST_AGAIN_S = 5.0, 60.0  # after a failed save
_WAITED_AGAIN_S, _MOST_WAITED_S = 2.0, 10.0  # the same while the job waits for it; for how long


@dataclass
class SaveSchedule:
    """Decides when to save, from the times and costs of earlier saves."""

    clock: Callable[[], float]
    _number: int = -1
    _block_s: float = 0.0  # spent in blocks by then
    _exchange_s: float = 0.0  # spent by trainers in exchanges by then
    _of_s: float = 0.0  # time of the saved state
    _saved_at: float = 0.0  # time of completion
    _took_s: float = 0.0
    _retry_at: float = 0.0
    _again_s: float = _AGAIN_S

    def is_due(
        self, number: int, block_s: float, exchange_s: float = 0.0, *, beside: bool = False
    ) -> bool:
        """Whether to save now.

        `number` steps are applied; the server has spent `block_s` in blocks, and every trainer at
        least `exchange_s` on sending pushes and waiting for their values, which includes blocks and
        messages of any size. If steps continue `beside` the save, the server may fail before it is
        complete, so steps during that time count too.
        """
        now, steps = self.clock(), number - self._number
        cost_s = self._took_s
        exchanged_s = exchange_s - self._exchange_s - (0.0 if beside else cost_s)
        replay_s = max(steps * _STEP_S + block_s - self._block_s, exchanged_s)
        if beside:
            cost_s *= _BESIDE
            replay_s *= 1.0 + self._took_s / max(now - self._of_s, self._took_s, 1e-9)
        share = _SHARE if replay_s < _MOST_REPLAY_S else _SHARE_THEN
        if steps <= 0 or now < self._retry_at or now - self._saved_at < share * cost_s:
            return False
        return replay_s >= _REPLAY_S or now - self._saved_at >= _EVERY_S

    @property
    def is_waiting(self) -> bool:
        """Whether a save failed and it is too early to retry."""
        return self.clock() < self._retry_at

    def saved(self, number: int, block_s: float, took_s: float, exchange_s: float = 0.0) -> None:
        """Records a save, or the checkpoint that a server starts from."""
        self._number, self._block_s, self._took_s = number, block_s, took_s
        self._exchange_s = exchange_s
        self._saved_at, self._retry_at, self._again_s = self.clock(), 0.0, _AGAIN_S
        self._of_s = self._saved_at - took_s

    def failed(self) -> float:
        """Records a failed save; returns the seconds until the next attempt."""
        again_s = self._again_s
        self._retry_at = self.clock() + again_s
        self._again_s = min(2 * again_s, _MOST_AGAIN_S)
        return again_s


_MOST_DELTAS = 9  # consecutive incremental checkpoints of tables
_MOST_COPIED = 2 << 30  # largest state in bytes of which a copy fits in memory


@dataclass(frozen=True)
class Written:
    """A complete recovery checkpoint, and the time in blocks and exchanges when it began."""

    receipt: PartReceipt
    progress: Progress
    block_s: float
    exchange_s: float
    took_s: float


@dataclass
class RecoverySaver:
    """Writes a server's recovery checkpoints, if enabled.

    Attributes:
        saved: the last saved step by trainer; empty before the first save.
        is_outdated: the state has changed at the same steps since the last save.
        is_writing: a save runs concurrently with steps; no other may begin.
        is_wanted: save without waiting until it is due.
    """

    series: RecoveryCheckpoints | None
    outbox: Outbox
    links: ServerLinks
    me: ServerIdentity
    saved: Mapping[int, int] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    schedule: SaveSchedule = field(init=False)
    is_outdated: bool = False
    is_writing: bool = False
    is_wanted: bool = False
    _later: list[Callable[[], None]] = field(default_factory=list)
    _again: tuple[float, Callable[[], None]] | None = None  # when to try a failed save again
    _last: int | None = None  # the checkpoint that the tables include completely
    _length: int = 0  # number of checkpoints it is incremental to
    _ended: int = -1  # number of the checkpoint that former trainers have left

    def __post_init__(self) -> None:
        self.schedule = SaveSchedule(self.clock)

    def is_due(self, held: ServerState) -> bool:
        """Whether to save without a request, if enabled."""
        if self.series is None or held.scheduler.applied < 0:
            return False
        block_s, beside = held.executor.counts.clocked_s, self.may_write_beside(held)
        number = held.scheduler.number
        is_wanted = self.is_wanted and not self.schedule.is_waiting
        if is_wanted and max(self.saved.values(), default=self._ended) < number:
            return True
        return self.schedule.is_due(number, block_s, held.exchange_s, beside=beside)

    def put_off(self, error: Exception, *, unasked: bool = False) -> bool:
        """Logs a failed save that will be retried; returns False if retrying does not help.

        If no trainer waits for it (`unasked`), any disk error may be transient.
        """
        if not is_disk_full(error) and not (unasked and isinstance(error, CheckpointError)):
            return False
        again_s = self.schedule.failed()
        alert(
            f"{self.outbox.name} could not write its checkpoint: {error}; it is tried again in "
            f"{again_s:.0f} s, and trainers keep what it lacks: if this server dies now, they send "
            "it anew"
        )
        return True

    def give_up(self, error: Exception) -> None:
        self.outbox.tasks.append(DeviceTask("saving", partial(_raise, error), lambda _: None))

    def save(self, held: ServerState, step: int, after: Callable[[], None]) -> None:
        """Saves a newly assigned state, if enabled."""
        steps = dict.fromkeys(range(held.plan.trainers), step)
        number = step if held.plan.waits else sum(steps.values())
        self.save_now(held, Progress(number, steps), after)

    def save_now(self, held: ServerState, progress: Progress, after: Callable[[], None]) -> None:
        """Saves the current state, if enabled; otherwise as `write`.

        It is postponed only if there is no checkpoint yet. After a replacement of the state, a
        server restarted from an older checkpoint would continue with the replaced state: the job
        waits a while for space on a full disk, and any other failure ends the server.
        """
        self._save_until(self.clock() + _MOST_WAITED_S, held, progress, after)

    def _save_until(
        self, until: float, held: ServerState, progress: Progress, after: Callable[[], None]
    ) -> None:
        def again() -> None:
            self._save_until(until, held, progress, after)

        if self.series is None:
            after()
            return
        self.is_outdated = True
        if self.is_writing:
            self._later.append(again)
            return

        def then(written: Written) -> None:
            self.is_outdated = False
            self.wrote(written)
            after()

        def failed(error: Exception) -> None:
            if not self.saved and self.put_off(error):
                after()
            elif is_disk_full(error) and self.clock() < until:
                self._again = self.clock() + _WAITED_AGAIN_S, again
                alert(f"{self.outbox.name} waits for space on its disk: {error}")
            else:
                self.give_up(error)

        self.outbox.tasks.append(DeviceTask("saving", self.write(held, progress), then, failed))

    def look(self) -> None:
        """Tries a failed save again once it is due."""
        if self._again is not None and self.clock() >= self._again[0]:
            (_, again), self._again = self._again, None
            again()

    def has(self, step: int, trainer: int) -> bool:
        return self.saved.get(trainer, -1) >= step and not self.is_outdated

    def may_write_beside(self, held: ServerState) -> bool:
        """Whether steps may continue during a save, which then writes a copy of the state.

        Tables are too large to copy, and only their changes are written.
        """
        return not held.tables and held.plan.state_bytes <= _MOST_COPIED

    def copy(self, held: ServerState, progress: Progress) -> Callable[[], Callable[[], Written]]:
        """Returns a task that copies the state; its result writes the copy, like `write`.

        A copy of 100 MB takes 10 to 20 ms, while writing takes 0.2 to 1 s.
        """
        arrays: dict[str, np.ndarray] = {}
        write = self.write(held, progress, arrays)

        def run() -> Callable[[], Written]:
            views = held.executor.views(held.plan.state)
            arrays.update((name, array.copy()) for name, array in views.items())
            return write

        return run

    def wrote(self, written: Written) -> None:
        self.saved, self.is_wanted = written.progress.steps, False
        number = written.progress.number
        self.schedule.saved(number, written.block_s, written.took_s, written.exchange_s)
        self.end_writing()

    def end_writing(self) -> None:
        """Runs the actions that waited for the end of a concurrent save."""
        self.is_writing = False
        later, self._later = self._later, []
        for action in later:
            action()

    def write(
        self,
        held: ServerState,
        progress: Progress,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> Callable[[], Written]:
        """Returns a task that saves the state, with the retained values as of now.

        `arrays` are the state's values; those at the time of the task by default.
        """
        series, program, retained = self.series, self.me.program, self._retained(held)
        block_s, exchange_s = held.executor.counts.clocked_s, held.exchange_s
        assert series is not None

        def run() -> Written:
            began = self.clock()
            # Only now, as another save may have been running.
            last = self._last if self._length < _MOST_DELTAS else None
            after = last if last is not None and last < progress.number else None
            values = held.executor.views(held.plan.state) if arrays is None else arrays
            receipt = series.save(
                held.plan,
                values,
                progress,
                job_program=program,
                retained=retained,
                stores=held.stores,
                after=after,
                anew=self._last is None,
            )
            self._last = progress.number
            self._length = 0 if after is None else self._length + 1
            return Written(receipt, progress, block_s, exchange_s, self.clock() - began)

        return run

    def resume(self, progress: Progress, length: int) -> None:
        """Records that the tables include a checkpoint, of a chain of incremental ones."""
        self.saved, self._last, self._length = progress.steps, progress.number, length
        self.schedule.saved(progress.number, 0.0, 0.0)

    def begin_anew(self) -> None:
        """Records that tables were replaced: the next checkpoint is a full one."""
        self._last = None

    def begin_epoch(self, held: ServerState, *, is_saved: bool) -> None:
        """Goes on with other trainers; `is_saved` if a checkpoint has what the others have done.

        That one is of the former trainers, so none of the new ones may end before there is another.
        Where trainers do not wait for each other, the number of the next one may be smaller.
        """
        number = held.scheduler.number
        self.saved, self.is_wanted, self._ended = {}, True, number if is_saved else -1
        if self._last is not None and number < self._last:
            self.begin_anew()

    def has_all(self, held: ServerState) -> bool:
        """Whether a checkpoint has what was applied, and no block has run since."""
        is_saved = min(self.saved.values(), default=-1) >= held.scheduler.applied
        return is_saved and not (self.is_outdated or held.scheduler.is_running)

    def _retained(self, held: ServerState) -> RetainedValues:
        kept = self.links.kept()
        parts = {step: {t.name: t.array for t in m.tensors} for step, m in kept.items()}
        shrunk = {name: table.shrunk for name, table in held.tables.items()}
        past = {name: table.past for name, table in held.tables.items() if table.past is not None}
        return RetainedValues(
            dict(held.extras.arrays),
            held.extras.step,
            parts,
            shrunk,
            self.me.text,
            {trainer: state.copy() for trainer, state in held.own.items()},
            held.base,
            held.leases.position(held.scheduler.step_of),
            self.me.epoch,
            held.executor.results() if held.plan.waits and held.scheduler.is_running else {},
            past,
        )


def _raise(error: Exception) -> NoReturn:
    raise error
