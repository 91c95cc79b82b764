"""A server as a state machine: messages and time in, messages and device tasks out.

It has no sockets and no threads. Its caller passes in messages and results of tasks, and sends its
replies (`jaxfleet.ps.server.event_loop`).
"""

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxfleet.env import MOVING
from jaxfleet.lower import ExecutableCache
from jaxfleet.ops import Array
from jaxfleet.ps.membership import Membership
from jaxfleet.ps.server.checkpoints import RecoveryCheckpoints
from jaxfleet.ps.server.collectives import CollectiveHandler
from jaxfleet.ps.server.execution_plan import ServerPlan
from jaxfleet.ps.server.lease_requests import LeaseHandler
from jaxfleet.ps.server.liveness import LivenessMonitor
from jaxfleet.ps.server.members import Members
from jaxfleet.ps.server.membership_changes import MembershipChanges
from jaxfleet.ps.server.membership_requests import MembershipRequests
from jaxfleet.ps.server.metrics import ServerMetrics
from jaxfleet.ps.server.options import SaveFolders, ServerIdentity, ServerOptions
from jaxfleet.ps.server.outbox import (
    DeviceTask,
    Outbox,
    Request,
    RequestError,
    request_error,
    string_field,
)
from jaxfleet.ps.server.request_router import RequestRouter
from jaxfleet.ps.server.server_counters import ServerCounters
from jaxfleet.ps.server.server_links import ServerLinks
from jaxfleet.ps.server.server_moves import ServerMoves
from jaxfleet.ps.server.trainer_registry import TrainerRegistry
from jaxfleet.ps.server.trainer_sessions import DepartureRecord, TrainerSessions
from jaxfleet.tables import TableStore
from jaxfleet.transport.messages import Kind, Message, Peer, Plain

Replies = list[tuple[Peer, Message]]


class ServerCore:
    """One server of a job.

    Args:
        endpoint: its endpoint, as trainers name it.
        cache: cache of executables.
        clock: the time in seconds; only differences matter.
        options: the job, timeouts and checkpoints.

    Raises:
        CheckpointError: its last recovery checkpoint cannot be read.
    """

    def __init__(
        self,
        endpoint: str,
        cache: ExecutableCache,
        clock: Callable[[], float],
        options: ServerOptions | None = None,
    ) -> None:
        options = options or ServerOptions()
        self.failure: Exception | None = None
        self.stopped = False
        self.outbox = Outbox()
        self.trainers = TrainerRegistry(options)
        self._clock = clock
        self._tasks: list[DeviceTask] = []
        self._me = ServerIdentity(secrets.token_hex(8))
        self._links = ServerLinks()
        own, most = RecoveryCheckpoints.of(options), options.queued_bytes
        self._router = RequestRouter(self.outbox, self._me, self._links, own, cache, clock, most)
        moving = None if options.checkpoint_dir is None else options.checkpoint_dir / MOVING
        self._router.folders = SaveFolders(options.save_dirs, moving)
        self.counters = ServerCounters(self.outbox, self.trainers, self._router)
        self._collectives = CollectiveHandler(self.outbox, self.trainers, self._router, most)
        self._leases = LeaseHandler(self.outbox, self.trainers, self._router, clock)
        self._router.on_load = self._loaded
        self._router.on_progress = self._leases.serve
        record = DepartureRecord(own.series.root, options.launch_id) if own is not None else None
        common = self.outbox, self.trainers, self._router, self._collectives
        self._sessions = TrainerSessions(endpoint, *common, self._me, options.server, record)
        self._liveness = LivenessMonitor(*common, clock())
        self._moves = ServerMoves(self.outbox, self.trainers)
        self._members = members = Members(self.trainers)
        sessions, moves = self._sessions, self._moves
        self._changes = MembershipChanges(*common, sessions, self._links, moves, members)
        self._requested = MembershipRequests(
            self.outbox, self.trainers, self._router, sessions, moves, members
        )
        self._changes.on_begin = self._leases.regroup
        self._handlers = self._requests()
        if own is not None and (restored := own.restore(self._sessions.note_damage)) is not None:
            self._router.restore(restored)
            self.trainers.restored = restored.job_program
            self.trainers.expect(self._router.loaded.held.plan.trainers)
            self.trainers.text = self._me.text = restored.retained.text
            self._sessions.resume()
            self._changes.restored()
            self._leases.restarted(trainers=self._router.loaded.held.plan.trainers)
        elif record is not None:
            record.clear()

    def _requests(self) -> Mapping[Kind, Callable[[Request], None]]:
        """Returns the handlers of requests after a hello."""
        return {
            Kind.DEFINE: self._define,
            Kind.ASSIGN: self._collectives.assign,
            Kind.PUSH: self._router.push,
            Kind.PULL: self._router.pull,
            Kind.LEASE: self._leases.lease,
            Kind.LOOK_UP: self._router.look_up,
            Kind.PUSH_ROWS: self._router.push_rows,
            Kind.REDUCE: self._collectives.reduce,
            Kind.BARRIER: self._collectives.barrier,
            Kind.KEEP: self._router.keep,
            Kind.RECALL: self._router.recall,
            Kind.ERROR: self._give_up,
            Kind.SAVE: self._router.maintain,
            Kind.LOAD: self._router.maintain,
            Kind.SHRINK: self._router.maintain,
            Kind.EXPORT: self._router.maintain,
            Kind.STATS: self.counters.answer,
            Kind.PENDING: self._liveness.pending,
            Kind.BYE: self._bye,
            Kind.LEAVE: self._changes.decisions.leave,
            Kind.MEMBERS: self._changes.told,
        }

    @property
    def options(self) -> ServerOptions:
        """The options, with the timeouts of the first trainer if configured."""
        return self.trainers.options

    @property
    def incarnation(self) -> str:
        """Distinguishes this process from its predecessor."""
        return self._me.incarnation

    def begin(
        self,
        plan: ServerPlan,
        arrays: Mapping[str, np.ndarray],
        program: str,
        stores: Iterable[TableStore] = (),
    ) -> None:
        """Starts with a program and a state of this process; trainers send neither.

        Args:
            plan: the program.
            arrays: a value for every state variable.
            program: hash of the job's program, which trainers must match; any, if empty.
            stores: initial rows of tables; other tables start empty.

        Raises:
            ProgramError: compiling an operator fails.
        """
        self.trainers.restored = program or None
        self._router.begin(plan, arrays, stores)

    @property
    def stores(self) -> Mapping[str, TableStore]:
        """The rows of its tables, by name; valid while no task is running."""
        return self._router.stores

    @property
    def state(self) -> Mapping[str, Array]:
        """The values of the state variables, on the device; valid while no task is running."""
        return self._router.state

    # --- event loop interface ----------------------------------------------------------------

    def handle(self, peer: Peer, message: Message) -> Replies:
        """Handles a message; returns the replies that are due."""
        self.counters.received(message)
        try:
            if message.sender.startswith("server "):
                self._from_server(message)
            elif message.kind is Kind.HELLO:
                self._changes.hello(peer, message, self._clock())
                if self.trainers.id_of(peer) is not None:
                    self._leases.greeted(message)
            elif message.kind is Kind.JOIN:
                self._requested.join(peer, message, self._clock())
            elif message.kind is Kind.MOVE:
                self._requested.move(peer, message, self._clock())
            else:
                self._from_trainer(peer, message)
        except RequestError as refusal:
            self.outbox.error(peer, message, refusal)
        except Exception as error:  # noqa: BLE001  # no message may end the server
            self.outbox.error(peer, message, request_error("failed", error))
        self._advance()
        return self._carried()

    def _advance(self) -> None:
        """Goes on with a change of the job's members, unless a task runs."""
        is_idle = not self._tasks and not self.outbox.tasks
        self._changes.advance(self._clock(), is_idle=is_idle)

    def knows(self, peer: Peer, message: Message) -> bool:
        """Whether a handled message is from a participant in the job.

        Heartbeats use separate connections without a hello: their session identifies the trainer.
        """
        if message.sender.startswith("server "):
            is_other = self._links.number_of(message.sender) is not None
            return is_other and message.body.get("program") == self._me.program
        if message.kind is Kind.HEARTBEAT:
            return self.trainers.of_session(message) is not None
        return self.trainers.id_of(peer) is not None

    def disconnected(self, peers: Iterable[Peer]) -> None:
        """Records the ends of connections: who does not return times out.

        If the job then goes on without it, nobody has its gradients but this server.
        """
        for peer in peers:
            self.trainers.disconnected(peer, self._clock())
            if self.options.goes_on and self.trainers.id_of(peer) is not None:
                self._router.save_soon()

    def tick(self, now: float) -> Replies:
        """Handles the passage of time: lost peers and timeouts."""
        self._router.look()
        self._moves.look(now)
        self._changes.look(now)
        self._advance()
        self._liveness.look_at_waits(now)
        self._leases.look(now)
        if self._me.job:  # before the first hello, the others are unknown
            body: dict[str, Plain] = {**self._word(now), "program": self._me.program}
            self._links.beat(body, self.outbox.name, now, self.options.heartbeat_s)
        lifeless = self._liveness.look_for_life(now)
        if lifeless is not None and self._sessions.awaits_rerun:
            self._sessions.awaits_rerun = False
        elif lifeless is not None and not self.finished:
            self.failure = lifeless
        return self._carried()

    def metrics(self, now: float) -> ServerMetrics:
        is_failed = self.counters.is_ended and self.failure is not None
        return self.counters.metrics(now, is_failed=is_failed)

    def forgive(self, seconds: float) -> None:
        """Discounts silence of peers, and waits for them, while this process was suspended."""
        now = self._clock()
        for known in (*self.trainers.by_id.values(), *self._links.known.values()):
            known.heard = min(known.heard + seconds, now)
            if known.ended is not None:
                known.ended = min(known.ended + seconds, now)
        self._liveness.forgive(seconds, now)
        self._leases.forgive(seconds, now)
        self._moves.forgive(seconds, now)
        self._changes.forgive(seconds, now)

    def take_tasks(self) -> list[DeviceTask]:
        """Returns the next tasks, in order; each is passed to `finish` or `fail`."""
        tasks, self.outbox.tasks = self.outbox.tasks, []
        self._tasks += tasks
        return tasks

    def finish(self, job: DeviceTask, result: Any) -> Replies:
        self._tasks.remove(job)
        if self.failure is None:
            job.then(result)
        self._advance()
        return self._carried()

    def fail(self, job: DeviceTask, error: Exception) -> Replies:
        """Takes a task's error, which ends the server unless it concerns only one request."""
        self._tasks.remove(job)
        if job.failed is not None:
            job.failed(error)
        elif self.failure is None:
            self.failure = error
            self._liveness.tell_all(request_error("failed", error))
        return self._carried()

    def run_tasks(self) -> Replies:
        """Runs all tasks synchronously, and returns the replies."""
        replies: Replies = []
        while tasks := self.take_tasks():
            for job in tasks:
                result, error = job.attempt()
                replies += self.fail(job, error) if error else self.finish(job, result)
        return replies

    def take_links(self) -> list[tuple[int, Message]]:
        """Returns the messages for other servers, with their numbers."""
        out, self._links.out = self._links.out, []
        return out

    @property
    def finished(self) -> bool:
        if self.failure is not None:
            return True
        has_work = self._tasks or self.outbox.tasks or self._sessions.awaits_rerun
        is_over = self._moves.is_done or self.trainers.all_left()
        return self.stopped or (is_over and not has_work)

    @property
    def servers(self) -> list[str]:
        return self._sessions.servers

    @property
    def step(self) -> int:
        return self._router.step

    @property
    def next_members(self) -> Membership | None:
        """The members with which this process begins anew; None if it ends.

        Its trainers have moved to other servers, and it is one of those, without what it was.
        """
        members, server = self._members.current, self._sessions.server or 0
        if not self._moves.is_done or self.failure is not None:
            return None
        if self._moves.moved is not None:
            return self._moves.moved
        if members.move is None or server >= len(members.move.servers):
            return None
        return members.moved()

    def expect(self, members: Membership) -> None:
        """Expects the trainers that have moved here; others are refused."""
        self._members.current = members

    def end(self) -> None:
        """Ends: a restart then begins another run, if all trainers have left."""
        self.counters.is_ended = True
        if self.failure is None:
            self._sessions.end()
        if self._moves.is_done:  # another server has this state
            self._router.forget_checkpoints()

    def _loaded(self) -> None:
        self._collectives.forget()
        self._leases.forget()

    def _define(self, request: Request) -> None:
        self._router.define(request)
        self._changes.defined()

    def _bye(self, request: Request) -> None:
        if request.message.body.get("moves") is True:
            if self._members.current.move is None:
                raise RequestError("refused", "the job does not move to other servers")
            self._moves.bye(request)
            return
        self._sessions.bye(request)
        self._changes.decisions.left(request)
        self._leases.left(request.trainer)
        self._liveness.look_at_waits(self._clock())

    def _give_up(self, request: Request) -> None:
        """Passes the error of a trainer that cannot return on to all: the job cannot go on."""
        what = string_field(request.message, "what")
        self.outbox.reply(request, Kind.OK)
        self._liveness.tell_all(RequestError("peer_lost", what))

    def _word(self, now: float, trainer: int = 0) -> dict[str, Plain]:
        lost: list[Plain] = list(self.trainers.lost(now))
        step, awaited = self._router.step, self.trainers.awaited(now)
        idle = f"after step {step}" + (f", {awaited}" if awaited else "")
        return {
            "doing": next((j.what for j in self._tasks if not j.is_beside), idle),
            "incarnation": self.incarnation,
            "step": step,
            "lost": lost,
            "saved": self._router.saved_of(trainer),
            **self._members.plain(),
        }

    # --- incoming messages ---------------------------------------------------------------------

    def _from_server(self, message: Message) -> None:
        number = self._links.number_of(message.sender)
        if number is None or message.body.get("program") != self._me.program:
            raise RequestError("refused", f"{message.sender} is not another server of this job")
        if message.kind is Kind.HEARTBEAT:
            self._links.heard(number, message, self._clock())
        elif message.kind is Kind.PARTS:
            self._router.take_parts(message)
        else:
            raise RequestError("bad_message", f"a server sends no {message.kind.value}")

    def _from_trainer(self, peer: Peer, message: Message) -> None:
        trainer, now = self.trainers.id_of(peer), self._clock()
        if message.kind is Kind.HEARTBEAT:  # on a separate connection, without a hello
            self.trainers.beat(peer, message, now)
            self._changes.beat(message, now)
            word = self._word(now, self.trainers.place_of(message))
            self.outbox.answer(peer, message, Kind.HEARTBEAT, word)
            return
        if trainer is None:
            what = f"{message.sender} sent {message.kind.value} before hello"
            raise RequestError(
                "stranger", what, hint="send a hello first, also on a new connection"
            )
        if message.sender != f"trainer {trainer}":
            what = f"trainer {trainer}'s connection claims to be {message.sender}"
            raise RequestError("bad_message", what)
        self.trainers.heard(peer, message, now)
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise RequestError("bad_message", f"a trainer sends no {message.kind.value}")
        log = self.trainers.by_id[trainer].log
        if log.begin(message):
            handler(Request(peer, message, trainer, now))
            if message.kind is Kind.PUSH:
                self._changes.decisions.pushed(message, now)
        elif (answer := log.answer(message.number)) is not None:
            self.outbox.out.append((peer, answer))

    def _carried(self) -> Replies:
        out, self.outbox.out = self.outbox.out, []
        return [self._logged(peer, message) for peer, message in out]

    def _logged(self, peer: Peer, message: Message) -> tuple[Peer, Message]:
        """Logs a reply in case the request is repeated; returns it with its current connection."""
        self.counters.sent(message)
        if message.body.get("error") == "stranger":
            return peer, message
        peer = self.trainers.newest(peer)
        trainer = self.trainers.id_of(peer)
        if trainer is not None:
            known = self.trainers.by_id[trainer]
            known.answered = self._clock()
            known.log.end(message)
        return peer, message
