"""The server's program, and the routing of requests to its handlers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.lower import ExecutableCache
from jaxfleet.ops import Array
from jaxfleet.ps.server.checkpoints import RecoveryCheckpoints, RestoredServer, load_stores
from jaxfleet.ps.server.execution_plan import ServerPlan
from jaxfleet.ps.server.lease_record import LeaseRecord, pushed_positions
from jaxfleet.ps.server.maintenance import MaintenanceQueue
from jaxfleet.ps.server.options import SaveFolders, ServerIdentity
from jaxfleet.ps.server.outbox import (
    DeviceTask,
    Outbox,
    Request,
    RequestError,
    string_field,
)
from jaxfleet.ps.server.own_state import OwnStateHandler
from jaxfleet.ps.server.program_loader import is_same_program, load_sent_program, read_plan
from jaxfleet.ps.server.recovery_saver import RecoverySaver
from jaxfleet.ps.server.row_requests import RowLookupHandler, RowPushHandler
from jaxfleet.ps.server.server_links import PartialSums, ServerLinks
from jaxfleet.ps.server.state import ServerState
from jaxfleet.ps.server.state_assignment import StateAssignment
from jaxfleet.ps.server.value_requests import PullHandler, PushHandler, valid_until
from jaxfleet.tables import TableStore
from jaxfleet.transport.messages import Kind, Message, Plain


@dataclass(frozen=True)
class LoadedProgram:
    """The state of a program, and the handlers that need one."""

    held: ServerState
    assignment: StateAssignment
    parts: PartialSums
    values: PushHandler
    rows: RowPushHandler
    maintenance: MaintenanceQueue


@dataclass
class RequestRouter:
    """Routes requests, and owns the server's program and state.

    Attributes:
        on_load: called when a checkpoint was loaded, which voids all earlier messages.
        on_progress: called when blocks may have run.
        leases: the job's ledger of samples, on server 0.
        is_restored: the state is that of a recovery checkpoint; what came later was lost.
        is_frozen: no block may run until there is a program for the new members of the job.
    """

    outbox: Outbox
    me: ServerIdentity
    links: ServerLinks
    checkpoints: RecoveryCheckpoints | None
    cache: ExecutableCache
    clock: Callable[[], float]
    queued_bytes: int
    folders: SaveFolders = field(default_factory=SaveFolders)
    on_load: Callable[[], None] = lambda: None
    on_progress: Callable[[], None] = lambda: None
    leases: LeaseRecord = field(default_factory=LeaseRecord)
    is_restored: bool = False
    is_frozen: bool = False
    _awaits_program: bool = False
    _keeps_past: bool = False
    _keeps_rows: bool = False
    _text: str = ""
    _loaded: LoadedProgram | None = None
    _own: RecoverySaver = field(init=False)
    _pulls: PullHandler = field(init=False)
    _look_ups: RowLookupHandler = field(init=False)
    _own_state: OwnStateHandler = field(init=False)

    def __post_init__(self) -> None:
        own = RecoverySaver(self.checkpoints, self.outbox, self.links, self.me, clock=self.clock)
        self._own = own
        self._pulls = PullHandler(self.outbox)
        self._look_ups = RowLookupHandler(self.outbox)
        self._own_state = OwnStateHandler(self.outbox, self.queued_bytes)

    # The program and its state.

    @property
    def defined(self) -> bool:
        return self._loaded is not None

    @property
    def held(self) -> ServerState | None:
        return self._loaded.held if self._loaded is not None else None

    @property
    def step(self) -> int:
        """The last step applied, -1 without a state."""
        return self.held.step if self.held is not None else -1

    @property
    def base(self) -> int:
        """The step of the state that the job began with, -1 without a state."""
        return self.held.base if self.held is not None and self.step >= 0 else -1

    @property
    def waits(self) -> bool:
        return self.held is None or self.held.plan.waits

    @property
    def takes_pushes(self) -> bool:
        """Whether trainers send gradients to this server."""
        return self.held is None or bool(self.held.plan.merges or self.held.plan.tables)

    def step_of(self, trainer: int) -> int:
        """Returns the last applied step of a trainer, -1 without a state."""
        return self.held.scheduler.step_of(trainer) if self.held is not None else -1

    def rows_of(self, trainer: int) -> int | None:
        """Returns the last step of which this server has all that a trainer pushed to tables."""
        return self.held.scheduler.rows_of(trainer) if self.held is not None else None

    def saved_of(self, trainer: int) -> int | None:
        """Returns the last step of a trainer in the last recovery checkpoint."""
        return self._own.saved.get(trainer)

    @property
    def stores(self) -> Mapping[str, TableStore]:
        """The rows of its tables, by name; empty before there is a program."""
        tables = self.held.tables if self.held is not None else {}
        return {name: table.rows for name, table in tables.items()}

    @property
    def state(self) -> Mapping[str, Array]:
        return self.held.executor.state if self.held is not None else {}

    def restore(self, restored: RestoredServer) -> None:
        self.me.program, self.is_restored = restored.job_program, True
        self.me.epoch = restored.retained.epoch
        loaded, retained = self._load(read_plan(restored.program, self.cache)), restored.retained
        held = loaded.held
        held.host.update(held.executor.assign({**restored.arrays, **retained.results}))
        held.replace_stores(load_stores(restored.chain, held.plan))
        held.scheduler.resume(restored.progress)
        held.extras.arrays, held.extras.step = dict(retained.extras), retained.extras_step
        held.own.update({trainer: state.copy() for trainer, state in retained.own.items()})
        held.base = retained.base
        self.leases.load(retained.data)
        loaded.parts.keep(retained.parts)
        for name, said in retained.shrunk.items():
            held.tables[name].shrunk = said
        for name, past in retained.past.items():
            held.tables[name].past = past
        self._own.resume(restored.progress, len(restored.chain) - 1)
        # Compiles while trainers detect the restart; otherwise the first replayed step would wait.
        self.outbox.tasks.append(DeviceTask("compiling", held.compile, lambda _: None))

    def begin(
        self, plan: ServerPlan, arrays: Mapping[str, np.ndarray], stores: Iterable[TableStore]
    ) -> None:
        """Takes a program and its complete state from this process instead of from trainers."""
        held = self._load(plan).held
        held.compile()
        held.host.update(held.executor.assign(arrays))
        held.replace_stores(stores)
        held.scheduler.restart(0)

    def close_epoch(self) -> None:
        """Lets the trainers end what they do, before others take their places.

        Where they wait for each other, no block runs any more: inputs that come later do not count.
        Otherwise none waits for another any more, and what arrives is applied.
        """
        if self.waits:
            self.is_frozen = True
        elif self.held is not None:
            self.held.scheduler.unbind()
            self.resume_work()

    def save_end(self) -> bool:
        """As `MaintenanceQueue.save_end`; true without a state."""
        return self._loaded is None or self.step < 0 or self._loaded.maintenance.save_end()

    @property
    def awaits_program(self) -> bool:
        """Whether it waits for the program for other trainers."""
        return self._awaits_program

    @property
    def is_drained(self) -> bool:
        """Whether what trainers that do not wait for each other have sent is applied."""
        return self.held is None or self.held.scheduler.is_drained

    def begin_epoch(self, former: Mapping[int, int | None]) -> None:
        """Waits for the program for other trainers, which replaces this one.

        `former` has the number that each of them had before; None if it is new.
        """
        self._awaits_program = True
        self._own_state.states.clear()
        self._own.saved = {}  # it has the former numbers
        if self.held is not None:
            self.held.scheduler.renumber(former)

    def _replace(self, plan: ServerPlan) -> None:
        """Goes on with a program for other trainers, from the values and the step of this one."""
        old = self.loaded
        held = self._load(plan).held
        try:
            held.take_over(old.held)
        except ProgramError as error:
            self._loaded = old
            raise RequestError("refused", error.what, hint=error.hint) from error
        self.is_frozen = self._awaits_program = False
        self._own.begin_epoch(held, is_saved=old.maintenance.has_saved_end)
        self.outbox.tasks.append(DeviceTask("compiling", held.compile, lambda _: None))

    def define(self, request: Request) -> None:
        """Loads the program; the same program again changes nothing."""
        text = string_field(request.message, "program")
        if self._awaits_program and self.defined:
            self._replace(load_sent_program(text, request.message.tensors, self.cache))
            self._text = text
            self.outbox.reply(request, Kind.OK)
            self.resume_work()
            return
        if self.held is None:
            self.is_frozen = self._awaits_program = False
            held = self._load(load_sent_program(text, request.message.tensors, self.cache)).held
            self._text = text
            self.outbox.tasks.append(DeviceTask("compiling", held.compile, lambda _: None))
        elif text != self._text and not is_same_program(text, self.held.plan):
            what = f"trainer {request.trainer} defines another program than this server has"
            hint = "all trainers must run the same script, with the same strategy"
            raise RequestError("refused", what, hint=hint)
        self.outbox.reply(request, Kind.OK)

    def _load(self, plan: ServerPlan) -> LoadedProgram:
        if plan.exchange is not None:
            self.links.others = plan.exchange.others
        held, outbox = ServerState.of(plan, self.clock), self.outbox
        own, resume = self._own, self.resume_work
        held.own, held.keeps_past = self._own_state.states, self._keeps_past
        held.keeps_rows = self._keeps_rows
        held.leases = self.leases
        most = self.queued_bytes
        parts = PartialSums(held, outbox, self.links, self.me, most, self.clock)
        self._loaded = LoadedProgram(
            held,
            StateAssignment(held, outbox, own, most, resume),
            parts,
            PushHandler(held, outbox, parts, most, resume),
            RowPushHandler(held, outbox, most, resume),
            MaintenanceQueue(held, outbox, own, resume, self.on_load),
        )
        return self._loaded

    @property
    def loaded(self) -> LoadedProgram:
        """The program, for requests that need one."""
        if self._loaded is None:
            hint = "send define first"
            raise RequestError("bad_message", "the server has no program", hint=hint)
        return self._loaded

    # Requests.

    def push(self, request: Request) -> None:
        positions = pushed_positions(request.message)
        self.loaded.values.push(request)
        if positions is not None:
            self.leases.push(request, positions, self.step_of(request.trainer))
        self._note_exchange(request)
        if request.message.body.get("idle"):
            self.resume_work()
        self._run()  # gradients alone do not make a value ready

    def push_rows(self, request: Request) -> None:
        self.loaded.rows.push(request)
        self._note_exchange(request)
        self._run()

    def _note_exchange(self, request: Request) -> None:
        self.loaded.held.note_exchange(request.trainer, request.message.body.get("took_s"))

    def take_parts(self, message: Message) -> None:
        self.loaded.parts.take(message)
        self._run()

    def pull(self, request: Request) -> None:
        """Replies with values as they become ready."""
        self._pulls.add(request, self.held)
        self.resume_work()

    def look_up(self, request: Request) -> None:
        """Replies with rows once the previous step is applied."""
        self._look_ups.add(request, self.held)
        self.resume_work()

    def maintain(self, request: Request) -> None:
        """Saves or loads the state, or shrinks or exports a table."""
        self.folders.check(request.message)
        self.loaded.maintenance.add(request)
        self.resume_work()

    def keep(self, request: Request) -> None:
        """Keeps the trainers' own state for a trainer that returns."""
        self._check_own_state()
        self._own_state.keep(request)

    def recall(self, request: Request) -> None:
        """Replies with the trainers' own state once it is kept."""
        self._check_own_state()
        self._own_state.recall(request)

    def _check_own_state(self) -> None:
        if self.loaded.held.plan.server != 0:
            what = f"{self.outbox.name} keeps no state of trainers; server 0 does"
            raise RequestError("bad_message", what)

    def keep_past(self, *, keeps: bool) -> None:
        """Sets whether values of the previous step are kept, for a trainer that returns."""
        self._keeps_past = keeps
        if self.held is not None:
            self.held.keeps_past = keeps

    def keep_rows(self, *, keeps: bool) -> None:
        """Sets whether rows of the previous step are kept, for trainers that repeat it."""
        self._keeps_rows = keeps
        if self.held is not None:
            self.held.keeps_rows = keeps

    def forget_checkpoints(self) -> None:
        """Removes the recovery checkpoints: this state is not gone on from."""
        if self.checkpoints is not None:
            self.checkpoints.forget()

    def look(self) -> None:
        """Goes on with what waits for time to pass."""
        self._own.look()

    def go_on_with(self, trainer: int) -> None:
        """Goes on with another process of a trainer; writes a recovery checkpoint soon, if enabled.

        Only the former process has its pushes before this step.
        """
        if self.held is not None:
            self.held.scheduler.forget_parts_of(trainer)
        self.save_soon()

    def save_soon(self) -> None:
        """Writes a recovery checkpoint as soon as no block runs, if enabled."""
        self._own.is_wanted = self.step >= 0
        self.resume_work()

    def leave(self, trainer: int) -> None:
        if self.held is not None:
            self.held.scheduler.left.add(trainer)
            self.resume_work()

    def wait_for(self, trainer: int) -> None:
        """Waits again for a trainer: the one that left belonged to an earlier run."""
        if self.held is not None:
            self.held.scheduler.left.discard(trainer)

    def resume_work(self) -> None:
        """Answers requests and starts tasks that have become possible."""
        if self._loaded is not None:
            self._loaded.held.scheduler.settle()
            self._pulls.serve(self._loaded.held)
            self._look_ups.serve(self._loaded.held)
            if not self._awaits_program:
                self._loaded.maintenance.serve()
            self._run()
            self.on_progress()

    def _run(self) -> None:
        """Starts the blocks that can run, except during maintenance."""
        loaded = self.loaded
        if not loaded.maintenance.is_busy and not self.is_frozen:
            loaded.rows.hand_out()
            loaded.values.hand_out()

    # Waiting requests.

    def waiting(self) -> list[Request]:
        maintenance = self._loaded.maintenance.waiting if self._loaded is not None else []
        pulls, own_state = self._pulls.requests(), self._own_state.waiting
        return [*pulls, *self._look_ups.waiting, *own_state, *maintenance]

    def drop(self, request: Request) -> None:
        self._pulls.drop(request)
        self._look_ups.drop(request)
        self._own_state.drop(request)
        if self._loaded is not None:
            self._loaded.maintenance.drop(request)

    def missing(self, request: Request) -> dict[str, list[str]]:
        """Returns the peers that a request waits for, with the missing names of each."""
        if self.held is None or self.step < 0:
            return {"trainer 0": ["the state"]}
        if request.message.kind is Kind.RECALL:
            return {"trainer 0": [f"the trainers' own state after step {request.step}"]}
        pulls = request.message.kind is Kind.PULL
        step = valid_until(request) if pulls else request.step
        return self.held.scheduler.missing(step=step, pulls=pulls)

    def lacks(self, request: Request) -> bool:
        """Whether a request waits for pushes of its own sender that have not arrived."""
        if self.held is None:
            return False
        scheduler, trainer = self.held.scheduler, request.trainer
        if scheduler.is_queued(trainer) or request.message.kind is Kind.RECALL:
            return False
        own = f"trainer {trainer}" in self.missing(request)
        return own or not (self.waits or scheduler.has_applied(request.step, trainer))

    def lacks_push(self, trainer: int, step: int) -> bool:
        """Whether some push of a trainer, the last of which is of a step, has not arrived."""
        if self.held is None or self.step < 0 or self.held.scheduler.is_queued(trainer):
            return False
        return f"trainer {trainer}" in self.held.scheduler.missing(step=step, pulls=False)

    def stats(self) -> dict[str, Plain]:
        if self.held is None:
            return {"step": -1}
        own: dict[str, Plain] = {
            "saved": self._own.saved.get(0),
            "saves": self.loaded.maintenance.saves,
            "executables": self.cache.compiled,
        }
        return {**self.held.stats(), **own}
