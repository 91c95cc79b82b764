"""What a server holds, and all requests that are about it: each goes to who does it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.lower import ExecutableCache
from jaxfleet.ops import Array
from jaxfleet.ps.messages import Kind, Message, Plain
from jaxfleet.ps.server.between import Between
from jaxfleet.ps.server.desk import Desk, Job, RefusedError, Request, text_of
from jaxfleet.ps.server.encoded import in_full
from jaxfleet.ps.server.held import Held
from jaxfleet.ps.server.identity import Identity
from jaxfleet.ps.server.intake import Intake
from jaxfleet.ps.server.links import Links
from jaxfleet.ps.server.look_ups import LookUps
from jaxfleet.ps.server.own_checkpoints import OwnCheckpoints, Restored
from jaxfleet.ps.server.own_saves import OwnSaves
from jaxfleet.ps.server.parts import Parts
from jaxfleet.ps.server.plan import ServerPlan
from jaxfleet.ps.server.plan_reader import read_plan
from jaxfleet.ps.server.pulls import Pulls, until_of
from jaxfleet.ps.server.row_pushes import RowPushes
from jaxfleet.ps.server.rows import with_whole_gradients
from jaxfleet.ps.server.sent_program import parse_sent, read_sent
from jaxfleet.ps.server.steps import Steps
from jaxfleet.ps.server.storage import load_stores


@dataclass(frozen=True)
class _Program:
    """What there is once the server has a program.

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
        on_load: is called when a checkpoint was loaded: what came before it is void.
    """

    desk: Desk
    me: Identity
    links: Links
    checkpoints: OwnCheckpoints | None
    cache: ExecutableCache
    clock: Callable[[], float]
    queued_bytes: int
    on_load: Callable[[], None] = lambda: None
    _text: str = ""
    _program: _Program | None = None
    _own: OwnSaves = field(init=False)
    _pulls: Pulls = field(init=False)
    _look_ups: LookUps = field(init=False)

    def __post_init__(self) -> None:
        self._own = OwnSaves(self.checkpoints, self.desk, self.links, self.me)
        self._pulls = Pulls(self.desk)
        self._look_ups = LookUps(self.desk)

    @property
    def defined(self) -> bool:
        """Whether there is a program."""
        return self._program is not None

    @property
    def step(self) -> int:
        """The last step applied, -1 without a state."""
        return self._program.held.step if self._program is not None else -1

    @property
    def waits(self) -> bool:
        """Whether a step waits for all trainers."""
        return self._program is None or self._program.held.plan.waits

    def step_of(self, trainer: int) -> int:
        """Returns the last of a trainer's steps that is applied, -1 without a state."""
        return self._program.held.progress.step_of(trainer) if self._program is not None else -1

    def saved_of(self, trainer: int) -> int | None:
        """Returns the last of a trainer's steps that is in the last own checkpoint."""
        return self._own.saved.get(trainer)

    def restore(self, restored: Restored) -> None:
        """Takes up what an own checkpoint holds."""
        self.me.program = restored.job_program
        program = self._take(read_plan(restored.program, self.cache))
        held, aside = program.held, restored.aside
        held.host.update(held.machine.assign(restored.arrays))
        held.replace_stores(load_stores(restored.chain, held.plan))
        held.progress.resume(restored.step, restored.steps, restored.kinds)
        self._own.goes_on(restored.step, restored.steps, len(restored.chain) - 1)
        held.extras.arrays, held.extras.step = dict(aside.extras), aside.extras_step
        program.parts.keep(aside.parts)

    def begin(self, plan: ServerPlan, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes a program and its whole state from this process, in the place of trainers'.

        Raises:
            ProgramError: an operator fails where it is compiled.
        """
        held = self._take(plan).held
        held.compile()
        held.host.update(held.machine.assign(arrays))
        held.progress.restart(0)

    @property
    def state(self) -> Mapping[str, Array]:
        """What the variables of the state hold, on the device."""
        return self._program.held.machine.state if self._program is not None else {}

    def leave(self, trainer: int) -> None:
        """Goes on without what a trainer would have sent."""
        if self._program is not None:
            self._program.held.progress.left.add(trainer)
            self.go_on()

    def define(self, request: Request) -> None:
        """Takes the program; the same one again changes nothing.

        Raises:
            RefusedError: it is none, or another than before.
        """
        text = text_of(request.message, "program")
        if self._program is None:
            held = self._take(read_sent(text, request.message.tensors, self.cache)).held
            self._text = text
            self.desk.jobs.append(Job("compiling", held.compile, lambda _: None))
        elif text != self._text and parse_sent(text) != self._program.held.plan.program:
            what = f"trainer {request.trainer} defines another program than this server has"
            hint = "all trainers must run the same script, with the same strategy"
            raise RefusedError("refused", what, hint=hint)
        self.desk.answer(request.peer, request.message, Kind.OK)

    def _take(self, plan: ServerPlan) -> _Program:
        held, most, go_on = Held.of(plan), self.queued_bytes, self.go_on
        parts = Parts(held, self.desk, self.links, self.me, most, self.clock)
        intake = Intake(held, self.desk, self._own, most, go_on)
        steps = Steps(held, self.desk, parts, most, go_on)
        between = Between(held, self.desk, self._own, go_on, self.on_load)
        rows = RowPushes(held, self.desk, most, go_on)
        if plan.exchange is not None:
            self.links.others = plan.exchange.others
        self._program = _Program(held, intake, parts, steps, between, rows)
        return self._program

    def _defined(self) -> _Program:
        if self._program is None:
            hint = "send define first"
            raise RefusedError("bad_message", "the server has no program", hint=hint)
        return self._program

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
        program = self._defined()
        plan = program.held.plan
        program.steps.push(with_whole_gradients(in_full(request, plan), plan))
        self._run(program)  # gradients alone make no value ready

    def push_rows(self, request: Request) -> None:
        """Takes gradients of a table's rows.

        Raises:
            RefusedError: there is no program or no state, they are none of the program's, or not
                finite.
        """
        program = self._defined()
        program.rows.push(request)
        self._run(program)

    def look_up(self, request: Request) -> None:
        """Answers by rows when they are as the step before left them.

        Raises:
            RefusedError: the server has no such table, or not those keys.
        """
        self._look_ups.add(request, self._program.held if self._program is not None else None)
        self.go_on()

    def parts(self, message: Message) -> None:
        """Takes what another server sent for a step.

        Raises:
            RefusedError: there is no program, or it has no such parts.
        """
        program = self._defined()
        program.parts.take(message)
        self._run(program)

    def pull(self, request: Request) -> None:
        """Answers by what is ready, and by the rest when it is.

        Raises:
            RefusedError: the server holds no such thing, or not of that step any more.
        """
        self._pulls.add(request, self._program.held if self._program is not None else None)
        self.go_on()

    def save(self, request: Request) -> None:
        """Writes a checkpoint once its step is applied."""
        self._defined().between.add_save(request)
        self.go_on()

    def load(self, request: Request) -> None:
        """Takes the state of a checkpoint, between two steps."""
        self._defined().between.add_load(request)
        self.go_on()

    def go_on(self) -> None:
        """Answers what can be answered, and hands out what can run."""
        program = self._program
        if program is not None:
            self._pulls.serve(program.held)
            self._look_ups.serve(program.held)
            program.between.serve()
            self._run(program)

    def _run(self, program: _Program) -> None:
        if not program.between.is_busy:
            program.rows.hand_out()
            program.steps.hand_out()

    def waiting(self) -> list[Request]:
        """Returns the requests that wait here."""
        between = self._program.between.waiting if self._program is not None else []
        return [*self._pulls.requests(), *self._look_ups.waiting, *between]

    def drop(self, request: Request) -> None:
        """Forgets a request that waits, since it was answered by an error."""
        self._pulls.drop(request)
        self._look_ups.drop(request)
        if self._program is not None:
            self._program.between.drop(request)

    def missing(self, request: Request) -> dict[str, list[str]]:
        """Returns who a request that waits here waits for, and what of each did not come."""
        if self._program is None or self.step < 0:
            return {"trainer 0": ["the state"]}
        pulls = request.message.kind is Kind.PULL
        step = until_of(request) if pulls else request.step
        return self._program.held.progress.missing(step=step, pulls=pulls)

    def stats(self) -> dict[str, Plain]:
        """Returns what was counted."""
        if self._program is None:
            return {"step": -1}
        held = self._program.held
        counts, progress = held.machine.counts, held.progress
        return {
            "step": self.step,
            "saved": self._own.saved.get(0),
            "received": counts.received,
            "copies_in": counts.copies_in,
            "copies_out": counts.copies_out,
            "block_s": counts.block_s,
            "duplicates": progress.duplicates + progress.tables.duplicates,
            "queued_bytes": progress.queued_bytes + progress.tables.queued_bytes,
            "executables": self.cache.compiled,
            "tables": {name: dict(table.stats()) for name, table in held.tables.items()},
        }
