"""Writes a server's own checkpoints, with all that others may still ask it for."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxfleet.checkpoint import PartReceipt
from jaxfleet.ps.server.desk import Desk, Job
from jaxfleet.ps.server.held import Held
from jaxfleet.ps.server.identity import Identity
from jaxfleet.ps.server.links import Links
from jaxfleet.ps.server.own_checkpoints import Aside, OwnCheckpoints


@dataclass
class OwnSaves:
    """The own checkpoints of a server, if it keeps any.

    Attributes:
        series: where they are; None where it keeps none.
        desk: where work goes.
        links: what other servers may ask for.
        me: who it is.
        saved: the step of the last one.
    """

    series: OwnCheckpoints | None
    desk: Desk
    links: Links
    me: Identity
    saved: int | None = None

    def save(self, held: Held, step: int, after: Callable[[], None]) -> None:
        """Writes the state that was just taken in, where checkpoints are kept at all."""
        if self.series is None:
            after()
            return

        def then(_: object) -> None:
            self.saved = step
            after()

        self.desk.jobs.append(Job("saving", self.write(held, step), then))

    def write(self, held: Held, step: int) -> Callable[[], PartReceipt]:
        """Returns the work that writes one, of what is beside the state as it is now."""
        series, program, aside = self.series, self.me.program, self._aside(held)
        assert series is not None

        def run() -> PartReceipt:
            arrays = held.machine.views(held.plan.state)
            return series.save(held.plan, arrays, step, job_program=program, aside=aside)

        return run

    def _aside(self, held: Held) -> Aside:
        kept = self.links.kept()
        parts = {step: {t.name: t.array for t in m.tensors} for step, m in kept.items()}
        return Aside(dict(held.extras.arrays), held.extras.step, parts)
