"""Writes a server's own checkpoints, with all that others may still ask it for."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from jaxfleet.checkpoint import PartReceipt, is_disk_full
from jaxfleet.errors import CheckpointError
from jaxfleet.ps.server.desk import Desk, Job
from jaxfleet.ps.server.held import Held
from jaxfleet.ps.server.identity import Identity
from jaxfleet.ps.server.links import Links
from jaxfleet.ps.server.own_checkpoints import Aside, OwnCheckpoints
from jaxfleet.ps.server.save_schedule import SaveSchedule
from jaxfleet.watch.notices import alert


@dataclass
class OwnSaves:
    """The own checkpoints of a server, if it keeps any.

    Attributes:
        series: where they are; None where it keeps none.
        desk: where work goes.
        links: what other servers may ask for.
        me: who it is.
        saved: the steps that the last one holds, by trainer; none before the first.
        changes: how many, of tables, may hold only what changed since the one before them.
        is_outdated: the state has values that are not in the last one yet, of the same steps.
    """

    series: OwnCheckpoints | None
    desk: Desk
    links: Links
    me: Identity
    saved: Mapping[int, int] = field(default_factory=dict)
    changes: int = 9
    clock: Callable[[], float] = time.monotonic
    schedule: SaveSchedule = field(init=False)
    is_outdated: bool = False
    _last: int | None = None  # the one that the tables had everything of
    _length: int = 0  # how many it stands on

    def __post_init__(self) -> None:
        self.schedule = SaveSchedule(self.clock)

    def is_due(self, held: Held) -> bool:
        """Returns whether to write one unasked, where checkpoints are kept at all."""
        if self.series is None or held.progress.applied < 0:
            return False
        return self.schedule.is_due(held.progress.number, held.machine.counts.block_s)

    def put_off(self, error: Exception, *, unasked: bool = False) -> bool:
        """Logs that one could not be written, and is tried again; False where that does not help.

        Args:
            error: why.
            unasked: no trainer waits for it, so any trouble with the disk may pass.
        """
        if not is_disk_full(error) and not (unasked and isinstance(error, CheckpointError)):
            return False
        again_s = self.schedule.failed()
        alert(
            f"{self.desk.name} could not write its checkpoint: {error}; it is tried again in "
            f"{again_s:.0f} s, and trainers keep what it lacks: if this server dies now, they send "
            "it anew"
        )
        return True

    def give_up(self, error: Exception) -> None:
        """Ends the server by an error."""
        self.desk.jobs.append(Job("saving", partial(_raise, error), lambda _: None))

    def save(self, held: Held, step: int, after: Callable[[], None]) -> None:
        """Writes the state that was just taken in, where checkpoints are kept at all."""
        steps = dict.fromkeys(range(held.plan.trainers), step)
        number = step if held.plan.waits else sum(steps.values())
        self.save_now(held, number, steps, {}, after)

    def save_now(
        self,
        held: Held,
        number: int,
        steps: Mapping[int, int],
        kinds: Mapping[str, Mapping[int, int]],
        after: Callable[[], None],
    ) -> None:
        """Writes the state as it is, where checkpoints are kept at all; otherwise as `write`.

        It is put off only where there is no checkpoint yet. After a replacement, a server that
        starts again from an older one would go on with what was replaced: a failure ends it.
        """
        if self.series is None:
            after()
            return
        self.is_outdated = True

        def then(_: object) -> None:
            self.saved, self.is_outdated = steps, False
            after()

        def failed(error: Exception) -> None:
            if not self.saved and self.put_off(error):
                after()
            else:
                self.give_up(error)

        self.desk.jobs.append(Job("saving", self.write(held, number, steps, kinds), then, failed))

    def is_saved(self, steps: Mapping[int, int]) -> bool:
        """Returns whether the last one holds the state as it is after some steps."""
        return self.saved == steps and not self.is_outdated

    def write(
        self,
        held: Held,
        number: int,
        steps: Mapping[int, int],
        kinds: Mapping[str, Mapping[int, int]],
    ) -> Callable[[], PartReceipt]:
        """Returns the work that writes one, of what is beside the state as it is now.

        Args:
            held: what is written.
            number: what the checkpoint goes by.
            steps: the last step of each trainer that is in it.
            kinds: the same of parameters and of each table, where they are not all of one step.
        """
        series, program, aside = self.series, self.me.program, self._aside(held)
        assert series is not None

        def run() -> PartReceipt:
            began, block_s = self.clock(), held.machine.counts.block_s
            after = self._followed(number)  # only now: another one may have been under way
            arrays = held.machine.views(held.plan.state)
            receipt = series.save(
                held.plan,
                arrays,
                number,
                steps=steps,
                kinds=kinds,
                job_program=program,
                aside=aside,
                stores=held.stores,
                after=after,
                anew=self._last is None,
            )
            self._last, self._length = number, 0 if after is None else self._length + 1
            self.schedule.saved(number, block_s, self.clock() - began)
            return receipt

        return run

    def _followed(self, step: int) -> int | None:
        """Returns the one whose changes one of a step may hold, None where it must hold all."""
        last = self._last if self._length < self.changes else None
        return last if last is not None and last < step else None

    def goes_on(self, number: int, steps: Mapping[int, int], length: int) -> None:
        """Notes that the tables have what is in one of them.

        Args:
            number: what it goes by.
            steps: the last step of each trainer that is in it.
            length: how many others it stands on.
        """
        self.saved, self._last, self._length = steps, number, length
        self.schedule.saved(number, 0.0, 0.0)

    def begin_anew(self) -> None:
        """Notes that the tables have other rows than the last one: the next one holds all."""
        self._last = None

    def _aside(self, held: Held) -> Aside:
        kept = self.links.kept()
        parts = {step: {t.name: t.array for t in m.tensors} for step, m in kept.items()}
        shrunk = {name: table.shrunk for name, table in held.tables.items()}
        return Aside(dict(held.extras.arrays), held.extras.step, parts, shrunk, self.me.text)


def _raise(error: Exception) -> NoReturn:
    raise error
