"""Execution of a server's program: assigns its state, takes gradients, starts blocks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.ps.server.execution_plan import ServerPlan
from jaxfleet.ps.server.job_checkpoint import load_stores
from jaxfleet.ps.server.maintenance import MaintenanceQueue
from jaxfleet.ps.server.options import ServerIdentity
from jaxfleet.ps.server.outbox import DeviceTask, Outbox, Request, RequestError, tensors_bytes
from jaxfleet.ps.server.pull_handler import valid_until
from jaxfleet.ps.server.push_handler import PushHandler, decompress
from jaxfleet.ps.server.recovery_checkpoints import RestoredServer
from jaxfleet.ps.server.recovery_saver import RecoverySaver
from jaxfleet.ps.server.row_requests import RowPushHandler, fit_push
from jaxfleet.ps.server.server_links import PartialSums, ServerLinks
from jaxfleet.ps.server.state import ServerState
from jaxfleet.tables import TableStore
from jaxfleet.transport.messages import Kind, Message, Plain, Tensor


@dataclass
class StateAssignment:
    """Assigns states sent by trainers.

    Attributes:
        own: recovery checkpoints; a state is visible only once it is in one.
        most_bytes: limit on the trainers' own state.
    """

    held: ServerState
    outbox: Outbox
    own: RecoverySaver
    most_bytes: int
    resume_work: Callable[[], None]
    _assigned: set[str] = field(default_factory=set)

    def check(self, message: Message) -> None:
        """Rejects values whose name, dtype or shape does not fit the program."""
        plan, extras = self.held.plan, self.held.extras.bytes
        if extras + tensors_bytes(message) > self.most_bytes:
            raise RequestError("bad_message", f"trainers' own state has {extras} bytes already")
        for tensor in message.tensors:
            if tensor.name not in plan.state:
                if plan.server != 0:
                    what = f"server {plan.server} does not hold '{tensor.name}'"
                    raise RequestError("bad_message", what)
                continue
            wanted, array = plan.types[tensor.name], tensor.array
            if array.dtype != wanted.dtype or array.shape != wanted.shape:
                found = f"{array.dtype}{list(array.shape)}"
                what = f"'{tensor.name}' is {found}, not {wanted.dtype}{list(wanted.shape)}"
                raise RequestError("bad_message", what)

    def assign(self, request: Request) -> None:
        """Assigns the initial state; an existing state is kept."""
        message, scheduler = request.message, self.held.scheduler
        self.check(message)

        def answer() -> None:
            self.outbox.answer(request.peer, message, Kind.OK)

        if scheduler.applied >= 0:
            scheduler.duplicates += len(message.tensors)
            if message.step == scheduler.applied:
                self.held.keep_extras(message.tensors, message.step)
            answer()
            return
        fresh = [tensor for tensor in message.tensors if tensor.name not in self._assigned]
        self._assigned.update(tensor.name for tensor in fresh)
        self.held.keep_extras(message.tensors, message.step)
        self._start(fresh, message.step, answer, replace=False)

    def replace(self, message: Message, answer: Callable[[], None]) -> None:
        """Replaces the state by one that all trainers sent."""
        self.held.keep_extras(message.tensors, message.step)
        self.own.is_outdated = True
        self._start(message.tensors, message.step, answer, replace=True)

    def _start(
        self, tensors: Sequence[Tensor], step: int, answer: Callable[[], None], *, replace: bool
    ) -> None:
        held, scheduler = self.held, self.held.scheduler
        own = {tensor.name: tensor.array for tensor in tensors if tensor.name in held.plan.state}

        def is_kept() -> None:
            scheduler.restart(step)
            answer()
            self.resume_work()

        def then(views: Mapping[str, np.ndarray]) -> None:
            held.host.update(views)
            if (replace or scheduler.applied < 0) and not held.executor.missing():
                self.own.save(held, step, is_kept)  # a visible state must be durable
            else:
                answer()

        self.outbox.tasks.append(
            DeviceTask("taking a state", lambda: held.executor.assign(own), then)
        )


@dataclass(frozen=True)
class ServerContext:
    """A server's components that do not depend on the program."""

    outbox: Outbox
    links: ServerLinks
    me: ServerIdentity
    own: RecoverySaver
    queued_bytes: int
    clock: Callable[[], float]


@dataclass(frozen=True)
class ProgramRunner:
    """Runs a program."""

    held: ServerState
    assignment: StateAssignment
    parts: PartialSums
    steps: PushHandler
    maintenance: MaintenanceQueue
    rows: RowPushHandler

    @classmethod
    def of(
        cls,
        plan: ServerPlan,
        context: ServerContext,
        *,
        resume_work: Callable[[], None],
        on_load: Callable[[], None],
    ) -> "ProgramRunner":
        held, outbox, most = ServerState.of(plan), context.outbox, context.queued_bytes
        parts = PartialSums(held, outbox, context.links, context.me, most, context.clock)
        return cls(
            held,
            StateAssignment(held, outbox, context.own, most, resume_work),
            parts,
            PushHandler(held, outbox, parts, most, resume_work),
            MaintenanceQueue(held, outbox, context.own, resume_work, on_load),
            RowPushHandler(held, outbox, most, resume_work),
        )

    def resume(self, restored: RestoredServer) -> None:
        held, retained = self.held, restored.retained
        held.host.update(held.executor.assign(restored.arrays))
        held.replace_stores(load_stores(restored.chain, held.plan))
        held.scheduler.resume(restored.step, restored.steps, restored.kinds)
        held.extras.arrays, held.extras.step = dict(retained.extras), retained.extras_step
        self.parts.keep(retained.parts)
        for name, said in retained.shrunk.items():
            held.tables[name].shrunk = said

    def begin(self, arrays: Mapping[str, np.ndarray], stores: Iterable[TableStore]) -> None:
        held = self.held
        held.compile()
        held.host.update(held.executor.assign(arrays))
        held.replace_stores(stores)
        held.scheduler.restart(0)

    def push(self, request: Request) -> None:
        plan = self.held.plan
        self.steps.push(fit_push(decompress(request, plan), plan))
        self.run()  # gradients alone do not make a value ready

    def push_rows(self, request: Request) -> None:
        self.rows.push(request)
        self.run()

    def take_parts(self, message: Message) -> None:
        self.parts.take(message)
        self.run()

    def run(self) -> None:
        """Starts the blocks that can run, except during maintenance."""
        if not self.maintenance.is_busy:
            self.rows.hand_out()
            self.steps.hand_out()

    def missing(self, request: Request) -> dict[str, list[str]]:
        """Returns the peers that a request waits for, with the missing names of each."""
        pulls = request.message.kind is Kind.PULL
        step = valid_until(request) if pulls else request.step
        return self.held.scheduler.missing(step=step, pulls=pulls)

    def stats(self) -> dict[str, Plain]:
        held = self.held
        counts, scheduler = held.executor.counts, held.scheduler
        return {
            "step": held.step,
            "received": counts.received,
            "copies_in": counts.copies_in,
            "copies_out": counts.copies_out,
            "rows": counts.rows,
            "block_s": counts.block_s,
            "duplicates": scheduler.duplicates + scheduler.tables.duplicates,
            "queued_bytes": scheduler.queued_bytes + scheduler.tables.queued_bytes,
            "tables": {name: dict(table.stats()) for name, table in held.tables.items()},
        }
