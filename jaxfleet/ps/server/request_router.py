"""Routing of trainers' requests to their handlers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.lower import ExecutableCache
from jaxfleet.ops import Array
from jaxfleet.ps.server.execution_plan import ServerPlan
from jaxfleet.ps.server.maintenance import SaveFolders
from jaxfleet.ps.server.options import ServerIdentity
from jaxfleet.ps.server.outbox import DeviceTask, Outbox, Request, RequestError, string_field
from jaxfleet.ps.server.program_loader import is_same_program, load_sent_program, read_plan
from jaxfleet.ps.server.program_runner import ProgramRunner, ServerContext
from jaxfleet.ps.server.pull_handler import PullHandler
from jaxfleet.ps.server.recovery_checkpoints import RecoveryCheckpoints, RestoredServer
from jaxfleet.ps.server.recovery_saver import RecoverySaver
from jaxfleet.ps.server.row_requests import RowLookupHandler
from jaxfleet.ps.server.server_links import ServerLinks
from jaxfleet.tables import TableStore
from jaxfleet.transport.messages import Kind, Message, Plain


@dataclass
class RequestRouter:
    """Routes requests, and owns the server's program and state."""

    outbox: Outbox
    me: ServerIdentity
    links: ServerLinks
    checkpoints: RecoveryCheckpoints | None
    cache: ExecutableCache
    clock: Callable[[], float]
    queued_bytes: int
    folders: SaveFolders = field(default_factory=SaveFolders)
    on_load: Callable[[], None] = lambda: None
    _text: str = ""
    _runner: ProgramRunner | None = None
    _own: RecoverySaver = field(init=False)
    _pulls: PullHandler = field(init=False)
    _look_ups: RowLookupHandler = field(init=False)

    def __post_init__(self) -> None:
        own = RecoverySaver(self.checkpoints, self.outbox, self.links, self.me, clock=self.clock)
        self._own = own
        self._pulls = PullHandler(self.outbox)
        self._look_ups = RowLookupHandler(self.outbox)

    @property
    def defined(self) -> bool:
        return self._runner is not None

    @property
    def step(self) -> int:
        """The last step applied, -1 without a state."""
        return self._runner.held.step if self._runner is not None else -1

    @property
    def waits(self) -> bool:
        return self._runner is None or self._runner.held.plan.waits

    def step_of(self, trainer: int) -> int:
        """Returns the last applied step of a trainer, -1 without a state."""
        return self._runner.held.scheduler.step_of(trainer) if self._runner is not None else -1

    def saved_of(self, trainer: int) -> int | None:
        """Returns the last step of a trainer in the last recovery checkpoint."""
        return self._own.saved.get(trainer)

    def restore(self, restored: RestoredServer) -> None:
        self.me.program = restored.job_program
        service = self._take(read_plan(restored.program, self.cache))
        service.resume(restored)
        self._own.goes_on(restored.step, restored.steps, len(restored.chain) - 1)
        # Compiles while trainers detect the restart; otherwise the first replayed step would wait.
        self.outbox.tasks.append(DeviceTask("compiling", service.held.compile, lambda _: None))

    def begin(
        self, plan: ServerPlan, arrays: Mapping[str, np.ndarray], stores: Iterable[TableStore]
    ) -> None:
        """Takes a program and its complete state from this process instead of from trainers."""
        self._take(plan).begin(arrays, stores)

    @property
    def stores(self) -> Mapping[str, TableStore]:
        """The rows of its tables, by name; empty before there is a program."""
        tables = self._runner.held.tables if self._runner is not None else {}
        return {name: table.rows for name, table in tables.items()}

    @property
    def state(self) -> Mapping[str, Array]:
        return self._runner.held.executor.state if self._runner is not None else {}

    def leave(self, trainer: int) -> None:
        if self._runner is not None:
            self._runner.held.scheduler.left.add(trainer)
            self.resume_work()

    def wait_for(self, trainer: int) -> None:
        """Waits again for a trainer: the one that left belonged to an earlier run."""
        if self._runner is not None:
            self._runner.held.scheduler.left.discard(trainer)

    def define(self, request: Request) -> None:
        """Loads the program; the same program again changes nothing."""
        text = string_field(request.message, "program")
        if self._runner is None:
            held = self._take(load_sent_program(text, request.message.tensors, self.cache)).held
            self._text = text
            self.outbox.tasks.append(DeviceTask("compiling", held.compile, lambda _: None))
        elif text != self._text and not is_same_program(text, self._runner.held.plan):
            what = f"trainer {request.trainer} defines another program than this server has"
            hint = "all trainers must run the same script, with the same strategy"
            raise RequestError("refused", what, hint=hint)
        self.outbox.answer(request.peer, request.message, Kind.OK)

    def _take(self, plan: ServerPlan) -> ProgramRunner:
        if plan.exchange is not None:
            self.links.others = plan.exchange.others
        self._runner = ProgramRunner.of(
            plan,
            ServerContext(
                self.outbox, self.links, self.me, self._own, self.queued_bytes, self.clock
            ),
            resume_work=self.resume_work,
            on_load=self.on_load,
        )
        return self._runner

    def _defined(self) -> ProgramRunner:
        if self._runner is None:
            hint = "send define first"
            raise RequestError("bad_message", "the server has no program", hint=hint)
        return self._runner

    def check_assign(self, message: Message) -> None:
        self._defined().assignment.check(message)

    def assign(self, request: Request) -> None:
        self._defined().assignment.assign(request)

    def replace(self, message: Message, answer: Callable[[], None]) -> None:
        self._defined().assignment.replace(message, answer)

    def push(self, request: Request) -> None:
        self._defined().push(request)

    def push_rows(self, request: Request) -> None:
        self._defined().push_rows(request)

    def look_up(self, request: Request) -> None:
        """Replies with rows once the previous step is applied."""
        self._look_ups.add(request, self._runner.held if self._runner is not None else None)
        self.resume_work()

    def parts(self, message: Message) -> None:
        self._defined().take_parts(message)

    def pull(self, request: Request) -> None:
        """Replies with values as they become ready."""
        self._pulls.add(request, self._runner.held if self._runner is not None else None)
        self.resume_work()

    def save(self, request: Request) -> None:
        self.folders.check(request.message)
        self._defined().maintenance.add_save(request)
        self.resume_work()

    def tend(self, request: Request) -> None:
        """Shrinks or exports a table."""
        self.folders.check(request.message)
        self._defined().maintenance.add_tending(request)
        self.resume_work()

    def load(self, request: Request) -> None:
        self.folders.check(request.message)
        self._defined().maintenance.add_load(request)
        self.resume_work()

    def resume_work(self) -> None:
        """Answers requests and starts tasks that have become possible."""
        service = self._runner
        if service is not None:
            self._pulls.serve(service.held)
            self._look_ups.serve(service.held)
            service.maintenance.serve()
            service.run()

    def waiting(self) -> list[Request]:
        maintenance = self._runner.maintenance.waiting if self._runner is not None else []
        return [*self._pulls.requests(), *self._look_ups.waiting, *maintenance]

    def drop(self, request: Request) -> None:
        self._pulls.drop(request)
        self._look_ups.drop(request)
        if self._runner is not None:
            self._runner.maintenance.drop(request)

    def missing(self, request: Request) -> dict[str, list[str]]:
        if self._runner is None or self.step < 0:
            return {"trainer 0": ["the state"]}
        return self._runner.missing(request)

    def lacks(self, request: Request) -> bool:
        """Whether a request waits for pushes of its own sender that have not arrived."""
        if self._runner is None:
            return False
        scheduler, trainer = self._runner.held.scheduler, request.trainer
        if scheduler.is_queued(trainer):
            return False
        own = f"trainer {trainer}" in self.missing(request)
        return own or not (self.waits or scheduler.has_applied(request.step, trainer))

    def stats(self) -> dict[str, Plain]:
        if self._runner is None:
            return {"step": -1}
        saved, compiled = self._own.saved.get(0), self.cache.compiled
        return {**self._runner.stats(), "saved": saved, "executables": compiled}
