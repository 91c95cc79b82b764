"""A server as a state machine: messages and time go in, messages and work come out.

It knows no sockets and no threads. Whoever runs it hands in messages and the results of the work,
and carries away what it answers (`jaxfleet.ps.server.loop`).
"""

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jaxfleet.checkpoint import CheckpointSeries
from jaxfleet.errors import JaxfleetError
from jaxfleet.lower import ExecutableCache
from jaxfleet.ps.messages import Kind, Message, Plain
from jaxfleet.ps.network import Peer
from jaxfleet.ps.server.deadlines import complaint
from jaxfleet.ps.server.desk import Desk, Job, RefusedError, Request, refusal_of, text_of
from jaxfleet.ps.server.holder import Holder
from jaxfleet.ps.server.meetings import Key, Meeting, Meetings, can_reduce, reduce_tensors
from jaxfleet.ps.server.options import ServerOptions
from jaxfleet.ps.server.peers import Trainers
from jaxfleet.ps.server.storage import OwnCheckpoints

Replies = list[tuple[Peer, Message]]


class ServerCore:
    """One server of a job.

    Args:
        endpoint: where it listens, as trainers call it.
        cache: where executables are kept.
        clock: tells the time in seconds; only differences count.
        options: which job, how long to wait, where to keep the state.

    Raises:
        CheckpointError: its last own checkpoint cannot be read.
    """

    def __init__(
        self,
        endpoint: str,
        cache: ExecutableCache,
        clock: Callable[[], float],
        options: ServerOptions | None = None,
    ) -> None:
        self.options = options or ServerOptions()
        self.endpoint = endpoint
        self.incarnation = secrets.token_hex(8)
        self.failure: Exception | None = None
        self.stopped = False
        self.rejected = 0  # frames that were no messages, as the listener counts them
        self.desk = Desk()
        self.trainers = Trainers(self.options)
        self._clock = clock
        self._lively = clock()
        self._counts: Counter[str] = Counter()
        self._meetings = Meetings()
        self._jobs: list[Job] = []
        self._server = self.options.server
        if self._server is not None:
            self.desk.name = f"server {self._server}"
        own = self._own_checkpoints()
        self._holder = Holder(self.desk, cache, clock, self.options.queued_bytes, own)
        self._holder.incarnation = self.incarnation
        self._holder.on_load = lambda: self._meetings.forget(1 << 62)
        if own is not None and (restored := own.restore()) is not None:
            self._holder.restore(restored)
            self.trainers.restored = restored.job_program

    # --- what a loop uses --------------------------------------------------------------------

    def handle(self, peer: Peer, message: Message) -> Replies:
        """Takes a message; returns the answers that are due."""
        self._counts[message.kind.value] += 1
        try:
            if message.sender.startswith("server "):
                self._from_server(message)
            elif message.kind is Kind.HELLO:
                self._hello(peer, message)
            else:
                self._from_trainer(peer, message)
        except RefusedError as refusal:
            self.desk.error(peer, message, refusal)
        except Exception as error:  # noqa: BLE001  # no message may end the server
            self.desk.error(peer, message, refusal_of("failed", error))
        return self._carried()

    def tick(self, now: float) -> Replies:
        """Looks at the time: who is lost, who waited for too long."""
        self._look_at_waits(now)
        if self._holder.job:  # else nobody has said yet where the others are
            body: dict[str, Plain] = {**self._word(now), "program": self._holder.job_program}
            self._holder.links.beat(body, self.desk.name, now, self.options.heartbeat_s)
        self._look_for_life(now)
        return self._carried()

    def forgive(self, seconds: float) -> None:
        """Counts no silence against others for a time in which this process stood still."""
        for known in (*self.trainers.by_id.values(), *self._holder.links.known.values()):
            known.heard = min(known.heard + seconds, self._clock())

    def take_jobs(self) -> list[Job]:
        """Returns the work that is to be done next, in order; each goes to `finish` or `fail`."""
        jobs, self.desk.jobs = self.desk.jobs, []
        self._jobs += jobs
        return jobs

    def finish(self, job: Job, result: Any) -> Replies:
        """Takes what a job gave."""
        self._jobs.remove(job)
        if self.failure is None:
            job.then(result)
        return self._carried()

    def fail(self, job: Job, error: Exception) -> Replies:
        """Takes a job's error: it ends the server, unless it concerns one request alone."""
        self._jobs.remove(job)
        if job.failed is not None:
            job.failed(error)
        elif self.failure is None:
            self._end(error)
        return self._carried()

    def run_jobs(self) -> Replies:
        """Does all work right here, and returns the answers."""
        replies: Replies = []
        while jobs := self.take_jobs():
            for job in jobs:
                try:
                    result = job.run()
                except Exception as error:  # noqa: BLE001  # whatever it is, the trainers hear of it
                    replies += self.fail(job, error)
                else:
                    replies += self.finish(job, result)
        return replies

    def take_links(self) -> list[tuple[int, Message]]:
        """Returns the messages for other servers, with the number of each."""
        out, self._holder.links.out = self._holder.links.out, []
        return out

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do: all trainers said bye, or the server failed."""
        if self.failure is not None:
            return True
        return self.stopped or (self.trainers.all_left() and not self._jobs and not self.desk.jobs)

    @property
    def servers(self) -> list[str]:
        """The endpoints of all servers, once a trainer named them."""
        servers = self.trainers.facts.get("servers", [])
        assert isinstance(servers, list)
        return [str(server) for server in servers]

    @property
    def step(self) -> int:
        """The last step applied, -1 without a state."""
        return self._holder.step

    # --- who comes and goes ------------------------------------------------------------------

    def _hello(self, peer: Peer, message: Message) -> None:
        refusal = self._place(message) or self.trainers.hello(peer, message, self._clock())
        if refusal is not None:
            hint = "start all trainers and servers with the same job, script and strategy"
            raise RefusedError("refused", refusal, hint=hint)
        self.options = self.trainers.options = self.options.after_hello(message.body)
        servers = self.servers
        if self._server is None:
            self._server = servers.index(self.endpoint)
        self.desk.name = f"server {self._server}"
        self._holder.job = str(self.trainers.facts.get("job"))
        self._holder.job_program = str(self.trainers.facts.get("program"))
        body: dict[str, Plain] = {
            "server": self._server,
            "incarnation": self.incarnation,
            "step": self._holder.step,
            "defined": self._holder.defined,
        }
        self.desk.answer(peer, message, Kind.WELCOME, body)

    def _place(self, message: Message) -> str | None:
        """Says why this server is none of those that a hello names, if it is not."""
        servers = message.body.get("servers")
        if not isinstance(servers, list):
            return None
        if self._server is None and self.endpoint not in servers:
            return f"{message.sender} names the servers {servers}, and this one is {self.endpoint}"
        if self._server is not None and self._server >= len(servers):
            return f"{message.sender} names {len(servers)} servers, and this is {self._server}"
        return None

    def _bye(self, request: Request) -> None:
        self.trainers.by_id[request.trainer].left = True
        self.desk.answer(request.peer, request.message, Kind.OK)
        now = self._clock()
        for meeting in self._meetings.waiting():
            self._complete(meeting)
        self._look_at_waits(now)

    def _word(self, now: float) -> dict[str, Plain]:
        lost: list[Plain] = list(self.trainers.lost(now))
        doing = self._jobs[0].what if self._jobs else f"after step {self._holder.step}"
        step = self._holder.step
        return {
            "doing": doing,
            "incarnation": self.incarnation,
            "step": step,
            "lost": lost,
            "saved": self._holder.saved,
        }

    # --- what comes --------------------------------------------------------------------------

    def _from_server(self, message: Message) -> None:
        number = self._holder.links.number_of(message.sender)
        program = message.body.get("program")
        if number is None or program != self._holder.job_program:
            raise RefusedError("refused", f"{message.sender} is no other server of this job")
        if message.kind is Kind.HEARTBEAT:
            self._holder.links.heard(number, message, self._clock())
        elif message.kind is Kind.PARTS:
            self._holder.parts(message)
        else:
            raise RefusedError("bad_message", f"a server sends no {message.kind.value}")

    def _from_trainer(self, peer: Peer, message: Message) -> None:
        trainer, now = self.trainers.id_of(peer), self._clock()
        if message.kind is Kind.HEARTBEAT:  # on lines of its own, which say no hello
            self.trainers.beat(message, now)
            self.desk.answer(peer, message, Kind.HEARTBEAT, self._word(now))
            return
        if trainer is None:
            what = f"{message.sender} sent {message.kind.value} before hello"
            raise RefusedError("stranger", what, hint="say hello first, and on a new connection")
        if message.sender != f"trainer {trainer}":
            what = f"trainer {trainer}'s connection says it is {message.sender}"
            raise RefusedError("bad_message", what)
        self.trainers.heard(peer, message, now)
        request = Request(peer, message, trainer, now)
        handlers: dict[Kind, Callable[[Request], None]] = {
            Kind.DEFINE: self._holder.define,
            Kind.ASSIGN: self._assign,
            Kind.PUSH: self._holder.push,
            Kind.PULL: self._holder.pull,
            Kind.REDUCE: self._reduce,
            Kind.BARRIER: self._barrier,
            Kind.SAVE: self._holder.save,
            Kind.LOAD: self._holder.load,
            Kind.STATS: self._stats,
            Kind.BYE: self._bye,
        }
        handler = handlers.get(message.kind)
        if handler is None:
            raise RefusedError("bad_message", f"a trainer sends no {message.kind.value}")
        handler(request)

    def _stats(self, request: Request) -> None:
        counts: dict[str, Plain] = dict(self._counts)
        refused: dict[str, Plain] = {"errors": self.desk.errors, "rejected": self.rejected}
        body = {**self._holder.stats(), **refused, "messages": counts}
        self.desk.answer(request.peer, request.message, Kind.OK, body)

    # --- what all do together ----------------------------------------------------------------

    def _assign(self, request: Request) -> None:
        if not request.message.body.get("replace"):
            self._holder.assign(request)
            return
        self._holder.check_assign(request.message)
        names = ",".join(sorted(tensor.name for tensor in request.message.tensors))
        self._join(("assign", request.step, names), request)

    def _reduce(self, request: Request) -> None:
        message = request.message
        key = ("reduce", message.step, text_of(message, "key"))
        how = text_of(message, "how")
        misfit = can_reduce(how, message) or self._meetings.fits(key, message)
        if misfit is not None:
            raise RefusedError("bad_message", f"'{key[2]}' of step {message.step}: {misfit}")
        self._join(key, request)

    def _barrier(self, request: Request) -> None:
        self._join(("barrier", request.step, text_of(request.message, "name")), request)

    def _join(self, key: Key, request: Request) -> None:
        self._meetings.check_room(key, request, self.options.queued_bytes)
        meeting = self._meetings.join(key, request)
        if meeting.answer is not None:
            self._answer(meeting, request)
        else:
            self._complete(meeting)

    def _complete(self, meeting: Meeting) -> None:
        """Ends a meeting if all came."""
        if not meeting.requests or not set(self._wanted(meeting)) <= meeting.requests.keys():
            return
        requests = meeting.in_order()
        if meeting.key[0] == "reduce" and not self._reduced(meeting):
            return
        meeting.answer = meeting.answer or ()
        if meeting.key[0] == "assign":
            self._holder.replace(requests[0], lambda: self._answer_all(meeting))
        else:
            self._answer_all(meeting)
        steps = [known.step for known in self.trainers.present()]
        self._meetings.forget(min(steps, default=0) - 1)

    def _reduced(self, meeting: Meeting) -> bool:
        """Reduces what all brought; tells them where it cannot be done."""
        requests = meeting.in_order()
        try:
            meeting.answer = reduce_tensors(str(requests[0].body["how"]), requests)
        except (TypeError, ValueError) as error:
            self._meetings.drop(meeting)
            for request in meeting.requests.values():
                self.desk.error(request.peer, request.message, refusal_of("failed", error))
            return False
        return True

    def _wanted(self, meeting: Meeting) -> Sequence[int]:
        """Returns who must come; at a barrier those that left are not waited for."""
        count = range(self.trainers.count)
        return self.trainers.staying() if meeting.key[0] == "barrier" else count

    def _answer_all(self, meeting: Meeting) -> None:
        for request in meeting.requests.values():
            self._answer(meeting, request)

    def _answer(self, meeting: Meeting, request: Request) -> None:
        kind = Kind.REDUCED if meeting.key[0] == "reduce" else Kind.OK
        self.desk.answer(request.peer, request.message, kind, {}, meeting.answer or ())

    # --- time --------------------------------------------------------------------------------

    def _look_at_waits(self, now: float) -> None:
        """Answers by errors those that wait for somebody who will not come."""
        holder = self._holder
        for pull in list(holder.pulls):
            if self._complain(pull.request, holder.missing(pull.request), now):
                holder.pulls.remove(pull)
        for request in list(holder.between):
            if self._complain(request, holder.missing(request), now):
                holder.between.remove(request)
        for meeting in self._meetings.waiting():
            self._look_at(meeting, now)

    def _look_at(self, meeting: Meeting, now: float) -> None:
        what, _, name = meeting.key
        absent = [n for n in self._wanted(meeting) if n not in meeting.requests]
        missing = {f"trainer {number}": [f"{what} '{name}'"] for number in absent}
        late = [self._complain(r, missing, now) for r in meeting.requests.values()]
        if any(late):
            self._meetings.drop(meeting)

    def _complain(self, request: Request, missing: dict[str, list[str]], now: float) -> bool:
        """Answers a request by an error where whom it waits for will not come."""
        found = complaint(
            request,
            missing,
            trainers=self.trainers,
            servers=self._holder.links.known,
            options=self.options,
            now=now,
        )
        if found is not None:
            self.desk.error(request.peer, request.message, found)
        return found is not None

    def _look_for_life(self, now: float) -> None:
        """Ends the server when nobody lived for long."""
        if not self.trainers.none_lives(now):
            self._lively = now
        elif not self.finished and now - self._lively > self.options.step_timeout_s:
            lost = ", ".join(self.trainers.lost(now)) or "no trainer ever came"
            self.failure = JaxfleetError(f"no trainer lives: {lost}")

    def _end(self, error: Exception) -> None:
        """Tells all trainers of a failure; the server ends."""
        self.failure = error
        refusal = refusal_of("failed", error)
        waiting = [pull.request for pull in self._holder.pulls] + self._holder.between
        for meeting in self._meetings.waiting():
            waiting += meeting.requests.values()
        for request in waiting:
            self.desk.error(request.peer, request.message, refusal)
        told = {request.peer for request in waiting}
        for known in self.trainers.present():
            if known.peer not in told:
                word = Message(Kind.ERROR, self.desk.name, max(self._holder.step, 0))
                self.desk.error(known.peer, word, refusal)

    def _carried(self) -> Replies:
        out, self.desk.out = self.desk.out, []
        return out

    def _own_checkpoints(self) -> OwnCheckpoints | None:
        folder = self.options.checkpoint_dir
        if folder is None:
            return None
        if self.options.server is None:
            what = "a server that keeps checkpoints must know its number"
            raise JaxfleetError(what, hint="ServerOptions(server=0, ...)")
        series = CheckpointSeries(folder / f"server{self.options.server}", keep=self.options.keep)
        return OwnCheckpoints(series)
