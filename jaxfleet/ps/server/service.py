"""All that a server does once it has a program: what takes messages in, runs blocks, saves."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxfleet.ps.messages import Kind, Message, Plain
from jaxfleet.ps.server.between import Between
from jaxfleet.ps.server.desk import Desk, Request
from jaxfleet.ps.server.encoded import in_full
from jaxfleet.ps.server.held import Held
from jaxfleet.ps.server.identity import Identity
from jaxfleet.ps.server.intake import Intake
from jaxfleet.ps.server.links import Links
from jaxfleet.ps.server.own_checkpoints import Restored
from jaxfleet.ps.server.own_saves import OwnSaves
from jaxfleet.ps.server.parts import Parts
from jaxfleet.ps.server.plan import ServerPlan
from jaxfleet.ps.server.pulls import until_of
from jaxfleet.ps.server.row_pushes import RowPushes
from jaxfleet.ps.server.rows import with_fitting_gradients
from jaxfleet.ps.server.steps import Steps
from jaxfleet.ps.server.storage import load_stores
from jaxfleet.tables import TableStore


@dataclass(frozen=True)
class Around:
    """What a server has besides a program.

    Attributes:
        desk: where answers and work go.
        links: to the other servers.
        me: who the server is.
        own: its own checkpoints.
        queued_bytes: the most bytes of gradients that wait.
        clock: tells the time in seconds.
    """

    desk: Desk
    links: Links
    me: Identity
    own: OwnSaves
    queued_bytes: int
    clock: Callable[[], float]


@dataclass(frozen=True)
class Service:
    """What serves a program.

    Attributes:
        held: the program, its values and its progress.
        intake: takes states in.
        parts: what crosses from server to server.
        steps: takes gradients, and runs blocks.
        between: saves and loads.
        rows: takes gradients of tables' rows, and applies them.
    """

    held: Held
    intake: Intake
    parts: Parts
    steps: Steps
    between: Between
    rows: RowPushes

    @classmethod
    def of(
        cls,
        plan: ServerPlan,
        around: Around,
        *,
        go_on: Callable[[], None],
        on_load: Callable[[], None],
    ) -> "Service":
        """Returns what serves a program that has no state yet.

        Args:
            plan: the program.
            around: what else the server has.
            go_on: is called when something can be answered, or run, that could not before.
            on_load: is called when a checkpoint was loaded: what came before it is void.
        """
        held, desk, most = Held.of(plan), around.desk, around.queued_bytes
        parts = Parts(held, desk, around.links, around.me, most, around.clock)
        return cls(
            held,
            Intake(held, desk, around.own, most, go_on),
            parts,
            Steps(held, desk, parts, most, go_on),
            Between(held, desk, around.own, go_on, on_load),
            RowPushes(held, desk, most, go_on),
        )

    def resume(self, restored: Restored) -> None:
        """Takes up what an own checkpoint holds."""
        held, aside = self.held, restored.aside
        held.host.update(held.machine.assign(restored.arrays))
        held.replace_stores(load_stores(restored.chain, held.plan))
        held.progress.resume(restored.step, restored.steps, restored.kinds)
        held.extras.arrays, held.extras.step = dict(aside.extras), aside.extras_step
        self.parts.keep(aside.parts)
        for name, said in aside.shrunk.items():
            held.tables[name].shrunk = said

    def begin(self, arrays: Mapping[str, np.ndarray], stores: Iterable[TableStore]) -> None:
        """Takes a whole state of this process.

        Raises:
            ProgramError: an operator fails where it is compiled.
        """
        held = self.held
        held.compile()
        held.host.update(held.machine.assign(arrays))
        held.replace_stores(stores)
        held.progress.restart(0)

    def push(self, request: Request) -> None:
        """Takes gradients.

        Raises:
            RefusedError: there is no state, or they are none of the program's.
        """
        plan = self.held.plan
        self.steps.push(with_fitting_gradients(in_full(request, plan), plan))
        self.run()  # gradients alone make no value ready

    def push_rows(self, request: Request) -> None:
        """Takes gradients of a table's rows.

        Raises:
            RefusedError: there is no state, they are none of the program's, or not finite.
        """
        self.rows.push(request)
        self.run()

    def take_parts(self, message: Message) -> None:
        """Takes what another server sent for a step.

        Raises:
            RefusedError: the program has no such parts.
        """
        self.parts.take(message)
        self.run()

    def run(self) -> None:
        """Hands out what can run, unless something is saved or loaded."""
        if not self.between.is_busy:
            self.rows.hand_out()
            self.steps.hand_out()

    def missing(self, request: Request) -> dict[str, list[str]]:
        """Returns who a request that waits here waits for, and what of each did not come."""
        pulls = request.message.kind is Kind.PULL
        step = until_of(request) if pulls else request.step
        return self.held.progress.missing(step=step, pulls=pulls)

    def stats(self) -> dict[str, Plain]:
        """Returns what was counted."""
        held = self.held
        counts, progress = held.machine.counts, held.progress
        return {
            "step": held.step,
            "received": counts.received,
            "copies_in": counts.copies_in,
            "copies_out": counts.copies_out,
            "rows": counts.rows,
            "block_s": counts.block_s,
            "duplicates": progress.duplicates + progress.tables.duplicates,
            "queued_bytes": progress.queued_bytes + progress.tables.queued_bytes,
            "tables": {name: dict(table.stats()) for name, table in held.tables.items()},
        }
