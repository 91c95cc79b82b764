"""What a server holds, and all requests that are about it: each goes to who does it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.lower import ExecutableCache
from jaxfleet.ops import Array
from jaxfleet.ps.messages import Kind, Message, Plain
from jaxfleet.ps.server.desk import Desk, Job, RefusedError, Request, text_of
from jaxfleet.ps.server.identity import Identity
from jaxfleet.ps.server.links import Links
from jaxfleet.ps.server.look_ups import LookUps
from jaxfleet.ps.server.own_checkpoints import OwnCheckpoints, Restored
from jaxfleet.ps.server.own_saves import OwnSaves
from jaxfleet.ps.server.plan import ServerPlan
from jaxfleet.ps.server.plan_reader import read_plan
from jaxfleet.ps.server.pulls import Pulls
from jaxfleet.ps.server.save_folders import SaveFolders
from jaxfleet.ps.server.sent_program import is_same, read_sent
from jaxfleet.ps.server.service import Around, Service
from jaxfleet.tables import TableStore


@dataclass
class Holder:
    """What a server holds, and the requests that wait for it.

    Attributes:
        desk: where answers and work go.
        me: who the server is.
        links: to the other servers.
        checkpoints: the server's own, if it keeps any.
        cache: where executables are kept.
        clock: tells the time in seconds.
        queued_bytes: the most bytes of gradients that wait.
        folders: below which trainers may have it write and read checkpoints.
        on_load: is called when a checkpoint was loaded: what came before it is void.
    """

    desk: Desk
    me: Identity
    links: Links
    checkpoints: OwnCheckpoints | None
    cache: ExecutableCache
    clock: Callable[[], float]
    queued_bytes: int
    folders: SaveFolders = field(default_factory=SaveFolders)
    on_load: Callable[[], None] = lambda: None
    _text: str = ""
    _service: Service | None = None
    _own: OwnSaves = field(init=False)
    _pulls: Pulls = field(init=False)
    _look_ups: LookUps = field(init=False)

    def __post_init__(self) -> None:
        own = OwnSaves(self.checkpoints, self.desk, self.links, self.me, clock=self.clock)
        self._own = own
        self._pulls = Pulls(self.desk)
        self._look_ups = LookUps(self.desk)

    @property
    def defined(self) -> bool:
        """Whether there is a program."""
        return self._service is not None

    @property
    def step(self) -> int:
        """The last step applied, -1 without a state."""
        return self._service.held.step if self._service is not None else -1

    @property
    def waits(self) -> bool:
        """Whether a step waits for all trainers."""
        return self._service is None or self._service.held.plan.waits

    def step_of(self, trainer: int) -> int:
        """Returns the last of a trainer's steps that is applied, -1 without a state."""
        return self._service.held.progress.step_of(trainer) if self._service is not None else -1

    def saved_of(self, trainer: int) -> int | None:
        """Returns the last of a trainer's steps that is in the last own checkpoint."""
        return self._own.saved.get(trainer)

    def restore(self, restored: Restored) -> None:
        """Takes up what an own checkpoint holds."""
        self.me.program = restored.job_program
        service = self._take(read_plan(restored.program, self.cache))
        service.resume(restored)
        self._own.goes_on(restored.step, restored.steps, len(restored.chain) - 1)

    def begin(
        self, plan: ServerPlan, arrays: Mapping[str, np.ndarray], stores: Iterable[TableStore]
    ) -> None:
        """Takes a program and its whole state from this process, in the place of trainers'.

        Raises:
            ProgramError: an operator fails where it is compiled.
        """
        self._take(plan).begin(arrays, stores)

    @property
    def stores(self) -> Mapping[str, TableStore]:
        """The rows of its tables, by name; none before there is a program."""
        tables = self._service.held.tables if self._service is not None else {}
        return {name: table.rows for name, table in tables.items()}

    @property
    def state(self) -> Mapping[str, Array]:
        """What the variables of the state hold, on the device."""
        return self._service.held.machine.state if self._service is not None else {}

    def leave(self, trainer: int) -> None:
        """Goes on without what a trainer would have sent."""
        if self._service is not None:
            self._service.held.progress.left.add(trainer)
            self.go_on()

    def define(self, request: Request) -> None:
        """Takes the program; the same one again changes nothing.

        Raises:
            RefusedError: it is none, or another than before.
        """
        text = text_of(request.message, "program")
        if self._service is None:
            held = self._take(read_sent(text, request.message.tensors, self.cache)).held
            self._text = text
            self.desk.jobs.append(Job("compiling", held.compile, lambda _: None))
        elif text != self._text and not is_same(text, self._service.held.plan):
            what = f"trainer {request.trainer} defines another program than this server has"
            hint = "all trainers must run the same script, with the same strategy"
            raise RefusedError("refused", what, hint=hint)
        self.desk.answer(request.peer, request.message, Kind.OK)

    def _take(self, plan: ServerPlan) -> Service:
        if plan.exchange is not None:
            self.links.others = plan.exchange.others
        self._service = Service.of(
            plan,
            Around(self.desk, self.links, self.me, self._own, self.queued_bytes, self.clock),
            go_on=self.go_on,
            on_load=self.on_load,
        )
        return self._service

    def _defined(self) -> Service:
        if self._service is None:
            hint = "send define first"
            raise RefusedError("bad_message", "the server has no program", hint=hint)
        return self._service

    def check_assign(self, message: Message) -> None:
        """Refuses values that the server cannot hold.

        Raises:
            RefusedError: a name, a dtype or a shape is wrong.
        """
        self._defined().intake.check(message)

    def assign(self, request: Request) -> None:
        """Takes the first state; where there is one, it stays."""
        self._defined().intake.assign(request)

    def replace(self, message: Message, answer: Callable[[], None]) -> None:
        """Takes a state that all trainers sent, in the place of what there was."""
        self._defined().intake.replace(message, answer)

    def push(self, request: Request) -> None:
        """Takes gradients.

        Raises:
            RefusedError: there is no program or no state, or they are none of the program's.
        """
        self._defined().push(request)

    def push_rows(self, request: Request) -> None:
        """Takes gradients of a table's rows.

        Raises:
            RefusedError: there is no program or no state, they are none of the program's, or not
                finite.
        """
        self._defined().push_rows(request)

    def look_up(self, request: Request) -> None:
        """Answers by rows when they are as the step before left them.

        Raises:
            RefusedError: the server has no such table, or not those keys.
        """
        self._look_ups.add(request, self._service.held if self._service is not None else None)
        self.go_on()

    def parts(self, message: Message) -> None:
        """Takes what another server sent for a step.

        Raises:
            RefusedError: there is no program, or it has no such parts.
        """
        self._defined().take_parts(message)

    def pull(self, request: Request) -> None:
        """Answers by what is ready, and by the rest when it is.

        Raises:
            RefusedError: the server holds no such thing, or not of that step any more.
        """
        self._pulls.add(request, self._service.held if self._service is not None else None)
        self.go_on()

    def save(self, request: Request) -> None:
        """Writes a checkpoint once its step is applied.

        Raises:
            RefusedError: it lies outside the folders for checkpoints, or there is no program.
        """
        self.folders.check(request.message)
        self._defined().between.add_save(request)
        self.go_on()

    def tend(self, request: Request) -> None:
        """Takes rows of a table out that have had their time, or gives them out.

        Raises:
            RefusedError: rows shall come from outside the folders for checkpoints, or there is no
                program or no such table.
        """
        self.folders.check(request.message)
        self._defined().between.add_tending(request)
        self.go_on()

    def load(self, request: Request) -> None:
        """Takes the state of a checkpoint, between two steps.

        Raises:
            RefusedError: it lies outside the folders for checkpoints, or there is no program.
        """
        self.folders.check(request.message)
        self._defined().between.add_load(request)
        self.go_on()

    def go_on(self) -> None:
        """Answers what can be answered, and hands out what can run."""
        service = self._service
        if service is not None:
            self._pulls.serve(service.held)
            self._look_ups.serve(service.held)
            service.between.serve()
            service.run()

    def waiting(self) -> list[Request]:
        """Returns the requests that wait here."""
        between = self._service.between.waiting if self._service is not None else []
        return [*self._pulls.requests(), *self._look_ups.waiting, *between]

    def drop(self, request: Request) -> None:
        """Forgets a request that waits, since it was answered by an error."""
        self._pulls.drop(request)
        self._look_ups.drop(request)
        if self._service is not None:
            self._service.between.drop(request)

    def missing(self, request: Request) -> dict[str, list[str]]:
        """Returns who a request that waits here waits for, and what of each did not come."""
        if self._service is None or self.step < 0:
            return {"trainer 0": ["the state"]}
        return self._service.missing(request)

    def lacks(self, request: Request) -> bool:
        """Returns whether a request waits for pushes of its own sender that have not arrived."""
        if self._service is None:
            return False
        progress, trainer = self._service.held.progress, request.trainer
        if progress.is_queued(trainer):
            return False
        own = f"trainer {trainer}" in self.missing(request)
        return own or not (self.waits or progress.has_applied(request.step, trainer))

    def stats(self) -> dict[str, Plain]:
        """Returns what was counted."""
        if self._service is None:
            return {"step": -1}
        saved, compiled = self._own.saved.get(0), self.cache.compiled
        return {**self._service.stats(), "saved": saved, "executables": compiled}
