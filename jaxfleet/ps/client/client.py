"""A trainer's client: numbered requests to all servers, awaited together and repeated when due.

It is used by one thread. Requests return at once; `wait` receives until they are answered, passes
arrays to their sinks on arrival, and detects servers that fail, leave or restart.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from jaxfleet.errors import ConnectError, JaxfleetError, PeerLostError, ProgramError
from jaxfleet.observability import NO_SPANS, LongWait, Spans
from jaxfleet.observability.notices import alert
from jaxfleet.ps.client.bye_sender import ByeSender, MoveSender
from jaxfleet.ps.client.former_process import FormerProcess, find_former, lost_pushes_error
from jaxfleet.ps.client.heartbeat import Heartbeat
from jaxfleet.ps.client.membership_watch import MembershipWatch
from jaxfleet.ps.client.operation_names import OperationNames
from jaxfleet.ps.client.pending_request import PendingRequest
from jaxfleet.ps.client.replay_log import ReplayBudget, ReplayLog
from jaxfleet.ps.client.reply_receiver import ReplyReceiver
from jaxfleet.ps.client.request_sender import RequestSender
from jaxfleet.ps.client.server_recovery import ServerRecovery
from jaxfleet.ps.client.server_session import ServerSession
from jaxfleet.ps.client.server_watch import ServerWatch
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.membership import Membership, MembershipChangedError
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.transport.messages import Connections, Kind

_POLL_S = 0.25  # how often a wait checks heartbeats
_HELLO_AGAIN_S = 5.0  # a hello may have reached a previous process on the server's port
_CHECK_BYE_S = 0.5


class Client(RequestSender):
    """A trainer's client of the servers of its job.

    Args:
        heartbeat: detects lost servers; without one, only deadlines apply.
        replay_bytes: total bytes of pushes to keep for all servers until their recovery checkpoints
            contain them; 0 if servers are never restarted: pushes are then kept until applied.
    """

    def __init__(
        self,
        connections: Connections,
        me: TrainerIdentity,
        *,
        timeouts: Timeouts,
        heartbeat: Heartbeat | None = None,
        replay_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        spans: Spans = NO_SPANS,
    ) -> None:
        servers = [ServerSession(ReplayLog(replay_bytes > 0)) for _ in me.endpoints]
        replay = ReplayBudget(me.name, [each.replay for each in servers], replay_bytes, clock)
        super().__init__(connections, me, timeouts, servers, replay)
        self.spans = spans
        self.rewinds = 0
        self.former: FormerProcess | None = None
        self.entered: int | None = None  # the step after which it took a place in a changed job
        self.names = OperationNames()
        self._clock, self._heartbeat = clock, heartbeat
        self._watch = ServerWatch(self, heartbeat)
        self._hello_at = 0.0  # when to repeat it
        self._is_closed = False
        self.unsaved: list[int] = []  # servers without space for its last checkpoint
        self._looked = clock()
        self._moves_away = False  # of the servers, some may be what they were no more
        self.members = MembershipWatch(self)
        self._recovery = ServerRecovery(self, self.wait)
        self._byes = ByeSender(self, heartbeat, clock, self.wait, self._go_on)
        self._replies = ReplyReceiver(self, self.members, self._recovery)

    @property
    def received_bytes(self) -> int:
        return self._replies.received_bytes

    def next_step(self, rows: int) -> None:
        """Advances to the next step, whose global batch has `rows` rows."""
        self.step += 1
        self.rows = rows

    def rewind(self, step: int) -> None:
        """Discards pushes after a step, to whose state the servers return."""
        self.rewinds += 1
        self.entered = None
        self.leases.clear()
        self.own.clear()
        for known in self.servers:
            known.rewind(step)

    def restart(self, step: int) -> None:
        """Goes on after a step to whose state all servers have returned."""
        self.step = step
        for known in self.servers:
            known.applied = step
            known.replay.restart(step)
        if self._heartbeat is not None:
            self._heartbeat.forget_progress()

    def resume(self, step: int) -> None:
        """Goes on after a step of a former process."""
        self.step = step
        for known in self.servers:
            known.resume(step)

    def enter(self, step: int) -> None:
        """Goes on after a step that was made before the members of the job changed."""
        self.resume(step)
        self.entered = step

    def unique(self, what: str) -> str:
        """Returns a name for an operation of all trainers, which may repeat it at this step."""
        return self.names.next(self.step, what)

    def repeats_a_message(self) -> bool:
        """Whether a message of a former process, with several steps, ended with this step."""
        return self.former is not None and self.former.ended_at(self.step)

    def is_past(self) -> bool:
        """Whether a former process has begun a later step, so what all do at this one is done."""
        return self.former is not None and self.step < self.former.seen

    def may_repeat(self) -> bool:
        """Whether a former process may have done what this one does at this step."""
        return self.former is not None and self.step <= self.former.seen

    def has_pushed(self, step: int) -> bool:
        return any(known.pushed >= step for known in self.servers)

    def open(self) -> int:
        """Connects to all servers, and sends programs to those that have none.

        Returns the last step that they have applied; -1 if they have no state yet.

        Raises:
            ConnectError: a server does not answer.
            ProgramError: a server rejects this trainer.
        """
        servers = range(len(self.servers))
        hellos = [self.hello(server, is_first=True) for server in servers]
        self._hello_at = self._clock() + _HELLO_AGAIN_S
        is_again = self.me.membership.epoch > 0  # others may take a while to come
        limit_s = max(self.timeouts.connect_s, self._watch.longest_s if is_again else 0.0)
        self.wait(hellos, limit_s, ConnectError)
        for server, hello in enumerate(hellos):
            assert hello.answer is not None
            self.servers[server].welcome(hello.answer)
        self.me = replace(self.me, has_begun=True)
        if is_again and self._heartbeat is not None:
            self._heartbeat.forget_progress()  # of its former place
        steps = [server.step for server in self.servers]
        self.former = self._find_former()
        if not is_again and self.former is None and len({max(step, 0) for step in steps}) > 1:
            what = f"the servers go on from steps {', '.join(map(str, steps))}, which differ"
            hint = "give them empty folders for checkpoints, and restore a checkpoint of the job"
            raise ProgramError(what, hint=hint)
        if self.me.trainer == 0 and self.me.programs:
            self.wait([self.define(server) for server in servers])
        return min(steps)

    def _find_former(self) -> FormerProcess | None:
        """Returns the process whose place this one takes, if the job waits for lost trainers.

        Raises:
            PeerLostError: a server was restarted, and lacks pushes that only that process had.
        """
        if self.timeouts.trainer_return_s is None:
            return None
        former, lacking = find_former(self.servers, self.me)
        if lacking:
            error = lost_pushes_error(self.me, lacking[0], self.servers[lacking[0]].step)
            self.wait([self.request(at, Kind.ERROR, body={"what": error.what}) for at in lacking])
            raise error
        return former

    def leave(self) -> None:
        """Leaves the job between two steps; the others go on without this trainer.

        Raises:
            MembershipChangedError: it is to take another place first.
            ProgramError: the job cannot go on without it.
        """
        self._save_last()
        self.doing("leaving")
        try:
            answer = self.members.leave(self.wait)
        except PeerLostError as error:
            if not (self.members.is_left_out and self._watch.is_silent(0)):
                raise
            alert(f"{self.me.name} has left, and the job has ended since: {error}")
            answer = None
        if answer is not None and answer.body.get("ends"):
            self.close()
        else:
            self.abandon()

    def end_epoch(self, membership: Membership) -> None:
        """Waits until servers have in checkpoints what this trainer did, if they keep any.

        Among other members it cannot send it again.

        Raises:
            MembershipChangedError: servers have told of newer members than these.
            PeerLostError: a server is lost, or lacks what only a lost trainer had.
        """
        if self.me.is_sync:
            until = self._clock() + self._watch.longest_s
            self.members.end_epoch(
                membership, lambda asked: self.wait(asked, max(until - self._clock(), 0.0))
            )
            return
        try:
            self._save_last()
        except MembershipChangedError as change:
            if change.is_newer_than(membership):
                raise
            # Servers have begun another epoch since, so they have what it did in this place.

    def doing(self, text: str) -> None:
        if self._heartbeat is not None:
            self._heartbeat.doing(text)

    def publish(self, scalars: Callable[[], tuple[int, Mapping[str, float]]]) -> None:
        """Lets heartbeats report the scalar metrics that `scalars` returns, with their step."""
        if self._heartbeat is not None:
            self._heartbeat.scalars = scalars

    def begin_step(self) -> None:
        """Notifies servers without a push in this step that this trainer has reached it.

        They may then overwrite the values it has received with the updates of others.
        """
        for server, known in enumerate(self.servers):
            if known.pushed < self.step:
                self.push(server, ())

    def wait(
        self,
        requests: Sequence[PendingRequest],
        timeout_s: float | None = None,
        error: type[JaxfleetError] = PeerLostError,
    ) -> None:
        """Receives until the requests are answered.

        Raises:
            PeerLostError: a server, or a trainer that it waits for, left or timed out.
            ProgramError: a server rejects a request.
        """
        first = next((request for request in requests if not request.is_done), None)
        if first is None:
            return
        limit = timeout_s if timeout_s is not None else self._watch.longest_s
        began = self._clock()
        with self.spans.span(f"wait for {first.message.kind.value}", step=self.step):
            self._receive_until(requests, limit, error)
        if self.has_sent:
            self.has_sent = False
            self.spent(self._clock() - began)

    def _receive_until(
        self, requests: Sequence[PendingRequest], limit: float, error: type[JaxfleetError]
    ) -> None:
        deadline, wait = self._clock() + limit, LongWait(self._clock)
        while not all(request.is_done for request in requests):
            left = deadline - self._clock()
            if left <= 0:
                raise self._watch.late(requests, limit, error)
            self._look(requests, at_once=not self._replies.receive(min(left, _POLL_S)))
            self._bring_level()
            wait.look(lambda: self._watch.describe(requests, limit))

    def poll(self) -> None:
        """Handles received messages without waiting; regularly checks the servers."""
        while self._replies.receive(0.0):
            pass
        self._look(())
        self._bring_level()

    def _hear(self, timeout_s: float) -> None:
        """Handles a received message, whichever servers are lost or were started again."""
        self._replies.receive(timeout_s)
        self._replies.check_due(self._clock())

    def _go_on(self, timeout_s: float) -> None:
        """Handles a received message, whichever servers are lost."""
        self._hear(timeout_s)
        self._bring_level()

    def _look(self, requests: Sequence[PendingRequest], *, at_once: bool = False) -> None:
        now = self._clock()
        if at_once or now - self._looked >= _POLL_S:
            self._looked = now
            self._look_at_servers(requests)
            self._say_hello_again(requests)
            self._replies.check_due(now)

    def clock_s(self) -> float:
        """Returns the time in seconds; only differences matter."""
        return self._clock()

    @property
    def clock(self) -> int:
        """The step up to which the newest values include all trainers' pushes, if reported."""
        clocks = [known.clock for known in self.servers if known.clock >= 0]
        return min(clocks, default=self.step)

    def restart_clock(self) -> None:
        """Resets the age of values: all trainers restart."""
        for known in self.servers:
            known.clock = -1

    def ask_to_save(self, *, sends_every_step: bool) -> list[PendingRequest]:
        """Requests recovery checkpoints from servers without waiting for them.

        Unless a trainer `sends_every_step` completely, steps may still be merged.
        """
        asked = []
        for server, known in enumerate(self.servers):
            step = self.step if sends_every_step else known.sent_whole()
            if step >= 0:
                asked.append(self.request(server, Kind.SAVE, step=step))
        return asked

    def close(self) -> None:
        """Says bye to the servers and closes; a second call does nothing."""
        if self._is_closed:
            return
        try:
            # A lost server needs no bye, nor one whose job goes on without this trainer.
            try:
                self._save_last()
            except (JaxfleetError, MembershipChangedError) as error:
                self._alert_unsaved(str(error))
            self._replies.check_s = _CHECK_BYE_S
            with suppress(JaxfleetError, MembershipChangedError):
                self._byes.send()
        finally:
            self.abandon()

    def move_away(self) -> None:
        """Leaves the servers for others, with all trainers, and closes.

        Raises:
            PeerLostError: another trainer is lost or late, or a server is.
        """
        self._moves_away = True
        limit_s = self._watch.longest_s
        sender = MoveSender(self, self._heartbeat, self._clock, self._hear, self._watch.is_silent)
        if late := sender.send(limit_s):
            if lost := [bye.server for bye in late if self._watch.is_silent(bye.server)]:
                raise self._watch.lost(lost[0], late)
            raise self._watch.late(late, limit_s, PeerLostError)
        self.abandon()

    def abandon(self, why: str = "") -> None:
        """Closes without a bye, after a heartbeat that reports `why`; servers detect the loss."""
        if self._heartbeat is not None:
            self._heartbeat.close(last=why)
        self.connections.close()
        self._is_closed = True

    def _save_last(self) -> None:
        # In another place of the job it does not have what it pushed before, and no checkpoint may
        # be of the present members.
        self.doing("last checkpoint")
        self.unsaved = self._byes.save(all_lack=self.entered is not None)
        if self.unsaved:
            servers = ", ".join(map(str, self.unsaved))
            self._alert_unsaved(f"no space on the disk of server {servers}")

    def _alert_unsaved(self, why: str) -> None:
        if not self.me.is_sync:
            alert(f"{self.me.name} ends without a last checkpoint of all servers: {why}")

    def _bring_level(self) -> None:
        for server, known in enumerate(self.servers):
            if not (known.is_level or known.is_returning or known.is_past or self._moves_away):
                self._recovery.bring_level(server)
                self.members.tell_again(server)

    def _look_at_servers(self, requests: Sequence[PendingRequest]) -> None:
        """Detects restarted servers, and raises for lost ones."""
        if self._heartbeat is None or self._moves_away:
            return
        self.members.look(self._heartbeat.pulse(0).membership)
        for server, known in enumerate(self.servers):
            pulse = self._heartbeat.pulse(server)
            known.hear(pulse)
            if server == 0:
                self.leases.saved(pulse.saved)
            if known.is_unknown(pulse):
                self._recovery.see_new(server, str(pulse.incarnation))
            elif known.is_open and self._watch.is_silent(server):
                raise self._watch.lost(server, requests)

    def _say_hello_again(self, requests: Sequence[PendingRequest]) -> None:
        hellos = [r for r in requests if r.message.kind is Kind.HELLO and not r.is_done]
        if hellos and self._clock() >= self._hello_at:
            self._hello_at = self._clock() + _HELLO_AGAIN_S
            for hello in hellos:
                self.send(hello.server, hello.message)
