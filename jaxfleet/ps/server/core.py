"""A server as a state machine: messages and time go in, messages and work come out.

It knows no sockets and no threads. Whoever runs it hands in messages and the results of the work,
and carries away what it answers (`jaxfleet.ps.server.loop`).
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxfleet.lower import ExecutableCache
from jaxfleet.ops import Array
from jaxfleet.ps.messages import Kind, Message, Plain
from jaxfleet.ps.network import Peer
from jaxfleet.ps.server.byes import Byes, Left
from jaxfleet.ps.server.desk import Desk, Job, RefusedError, Request, refusal_of
from jaxfleet.ps.server.entrance import Entrance
from jaxfleet.ps.server.figures import Figures, TrainerFigures
from jaxfleet.ps.server.holder import Holder
from jaxfleet.ps.server.identity import Identity
from jaxfleet.ps.server.links import Links
from jaxfleet.ps.server.options import ServerOptions
from jaxfleet.ps.server.own_checkpoints import own_checkpoints
from jaxfleet.ps.server.peers import Trainers
from jaxfleet.ps.server.plan import ServerPlan
from jaxfleet.ps.server.save_folders import SaveFolders
from jaxfleet.ps.server.together import Together
from jaxfleet.ps.server.watch import Watch
from jaxfleet.tables import TableStore
from jaxfleet.watch.notices import alert

Replies = list[tuple[Peer, Message]]

_MOST_PENDING = 1024  # requests that a trainer may ask about at once


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
        options = options or ServerOptions()
        self.failure: Exception | None = None
        self.stopped = False
        self.rejected = 0  # frames that were no messages, as the listener counts them
        self.desk = Desk()
        self.trainers = Trainers(options)
        self._clock = clock
        self._counts: Counter[Kind] = Counter()
        self._received_bytes = self._sent_bytes = 0
        self._jobs: list[Job] = []
        self._me = Identity(secrets.token_hex(8))
        self._links = Links()
        own, most = own_checkpoints(options), options.queued_bytes
        folders = SaveFolders(options.save_dirs)
        self._holder = Holder(self.desk, self._me, self._links, own, cache, clock, most, folders)
        self._together = Together(self.desk, self.trainers, self._holder, most)
        self._holder.on_load = self._together.forget
        self._entrance = Entrance(
            endpoint, self.desk, self.trainers, self._holder, self._me, options.server
        )
        self._entrance.on_strangers = self._together.forget_strangers
        self._entrance.on_new_process = self._together.forget_process
        self._watch = Watch(self.desk, self.trainers, self._holder, self._together, clock())
        self._handlers = self._requests()
        self._byes = Byes(own.series.root) if own is not None else None
        if own is not None and (restored := own.restore(self._entrance.note_damage)) is not None:
            self._holder.restore(restored)
            self.trainers.restored = restored.job_program
            self.trainers.text = self._me.text = restored.aside.text
            self._know_who_left()
        elif self._byes is not None:
            self._byes.clear()

    def _know_who_left(self) -> None:
        """Finds who said bye to the server whose place this one takes: they come no more."""
        self.trainers.gone = self._byes.read() if self._byes is not None else None
        for trainer in self.trainers.left():
            self._let_go(trainer)
        if self.trainers.all_left():
            alert(f"{self.desk.name} was started again when all trainers had ended: it ends, too")

    def _requests(self) -> Mapping[Kind, Callable[[Request], None]]:
        """Returns who does what trainers may ask for once they said hello."""
        return {
            Kind.DEFINE: self._holder.define,
            Kind.ASSIGN: self._together.assign,
            Kind.PUSH: self._holder.push,
            Kind.PULL: self._holder.pull,
            Kind.LOOK_UP: self._holder.look_up,
            Kind.PUSH_ROWS: self._holder.push_rows,
            Kind.REDUCE: self._together.reduce,
            Kind.BARRIER: self._together.barrier,
            Kind.SAVE: self._holder.save,
            Kind.LOAD: self._holder.load,
            Kind.SHRINK: self._holder.tend,
            Kind.EXPORT: self._holder.tend,
            Kind.STATS: self._stats,
            Kind.PENDING: self._pending,
            Kind.BYE: self._bye,
        }

    @property
    def options(self) -> ServerOptions:
        """What it was told, and how patient the first trainer said that the job is."""
        return self.trainers.options

    @property
    def incarnation(self) -> str:
        """Tells this server from the one before it."""
        return self._me.incarnation

    def begin(
        self,
        plan: ServerPlan,
        arrays: Mapping[str, np.ndarray],
        program: str,
        stores: Iterable[TableStore] = (),
    ) -> None:
        """Begins with a program and a state of this process; trainers define and assign none.

        Args:
            plan: the program.
            arrays: a value for every variable of its state.
            program: the hash of the job's program, which trainers must say too; any, if empty.
            stores: the rows that tables begin with; those of the others begin without rows.

        Raises:
            ProgramError: an operator fails where it is compiled.
        """
        self.trainers.restored = program or None
        self._holder.begin(plan, arrays, stores)

    @property
    def stores(self) -> Mapping[str, TableStore]:
        """The rows of its tables, by name; while no work is under way."""
        return self._holder.stores

    @property
    def state(self) -> Mapping[str, Array]:
        """What the variables of its state hold, on the device; while no work is under way."""
        return self._holder.state

    # --- what a loop uses --------------------------------------------------------------------

    def handle(self, peer: Peer, message: Message) -> Replies:
        """Takes a message; returns the answers that are due."""
        self._counts[message.kind] += 1
        self._received_bytes += _bytes_of(message)
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

    def knows(self, peer: Peer, message: Message) -> bool:
        """Whether a message that was handled is of somebody who takes part in the job.

        Heartbeats come on lines of their own, which say no hello: their session says whose.
        """
        if message.sender.startswith("server "):
            is_other = self._links.number_of(message.sender) is not None
            return is_other and message.body.get("program") == self._me.program
        if message.kind is Kind.HEARTBEAT:
            known = self.trainers.by_id.get(_number_of(message))
            return known is not None and known.session == message.body.get("session")
        return self.trainers.id_of(peer) is not None

    def tick(self, now: float) -> Replies:
        """Looks at the time: who is lost, who waited for too long."""
        self._watch.look_at_waits(now)
        if self._me.job:  # else nobody has said yet where the others are
            body: dict[str, Plain] = {**self._word(now), "program": self._me.program}
            self._links.beat(body, self.desk.name, now, self.options.heartbeat_s)
        lifeless = self._watch.look_for_life(now)
        if lifeless is not None and not self.finished:
            self.failure = lifeless
        return self._carried()

    def figures(self, now: float) -> Figures:
        """Returns what was counted, for who watches."""
        return Figures(
            self.desk.name,
            self._counted(),
            {kind.value: count for kind, count in self._counts.items()},
            self._received_bytes,
            self._sent_bytes,
            tuple(
                TrainerFigures(n, one.step, now - one.heard, one.late_s, one.doing, one.left)
                for n, one in sorted(self.trainers.by_id.items())
            ),
        )

    def forgive(self, seconds: float) -> None:
        """Counts no silence against others for a time in which this process stood still."""
        for known in (*self.trainers.by_id.values(), *self._links.known.values()):
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
            self.failure = error
            self._watch.tell_all(refusal_of("failed", error))
        return self._carried()

    def run_jobs(self) -> Replies:
        """Does all work right here, and returns the answers."""
        replies: Replies = []
        while jobs := self.take_jobs():
            for job in jobs:
                result, error = job.attempt()
                replies += self.fail(job, error) if error else self.finish(job, result)
        return replies

    def take_links(self) -> list[tuple[int, Message]]:
        """Returns the messages for other servers, with the number of each."""
        out, self._links.out = self._links.out, []
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
        return self._entrance.servers

    @property
    def step(self) -> int:
        """The last step applied, -1 without a state."""
        return self._holder.step

    # --- who comes and goes ------------------------------------------------------------------

    def _hello(self, peer: Peer, message: Message) -> None:
        gone = self.trainers.gone
        self._entrance.hello(peer, message, self._clock())
        if self._byes is not None and self.trainers.gone is not gone:
            self._byes.clear()

    def _bye(self, request: Request) -> None:
        self.trainers.by_id[request.trainer].left = True
        if self._byes is not None:
            self._byes.write(Left(self.trainers.count, self.trainers.left()))
        self.desk.answer(request.peer, request.message, Kind.OK)
        now = self._clock()
        self._together.one_left()
        self._let_go(request.trainer)
        self._watch.look_at_waits(now)

    def _let_go(self, trainer: int) -> None:
        if self.options.may_leave or not self._holder.waits:
            self._holder.leave(trainer)

    def end(self) -> None:
        """Forgets who left, once all did: who starts this server again begins another run."""
        if self._byes is not None and self.failure is None and self.trainers.all_left():
            self._byes.clear()

    def _word(self, now: float, trainer: int = 0) -> dict[str, Plain]:
        lost: list[Plain] = list(self.trainers.lost(now))
        step = self._holder.step
        return {
            "doing": self._jobs[0].what if self._jobs else f"after step {step}",
            "incarnation": self.incarnation,
            "step": step,
            "lost": lost,
            "saved": self._holder.saved_of(trainer),
        }

    # --- what comes --------------------------------------------------------------------------

    def _from_server(self, message: Message) -> None:
        number = self._links.number_of(message.sender)
        if number is None or message.body.get("program") != self._me.program:
            raise RefusedError("refused", f"{message.sender} is no other server of this job")
        if message.kind is Kind.HEARTBEAT:
            self._links.heard(number, message, self._clock())
        elif message.kind is Kind.PARTS:
            self._holder.parts(message)
        else:
            raise RefusedError("bad_message", f"a server sends no {message.kind.value}")

    def _from_trainer(self, peer: Peer, message: Message) -> None:
        trainer, now = self.trainers.id_of(peer), self._clock()
        if message.kind is Kind.HEARTBEAT:  # on lines of its own, which say no hello
            self.trainers.beat(message, now)
            self.desk.answer(peer, message, Kind.HEARTBEAT, self._word(now, _number_of(message)))
            return
        if trainer is None:
            what = f"{message.sender} sent {message.kind.value} before hello"
            raise RefusedError("stranger", what, hint="say hello first, and on a new connection")
        if message.sender != f"trainer {trainer}":
            what = f"trainer {trainer}'s connection says it is {message.sender}"
            raise RefusedError("bad_message", what)
        self.trainers.heard(peer, message, now)
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise RefusedError("bad_message", f"a trainer sends no {message.kind.value}")
        log = self.trainers.by_id[trainer].log
        if log.begin(message):
            handler(Request(peer, message, trainer, now))
        elif (answer := log.answer(message.number)) is not None:
            self.desk.out.append((peer, answer))

    def _pending(self, request: Request) -> None:
        """Reports which requests of a trainer are not here, and whether its pushes are.

        Raises:
            RefusedError: the message has no list of numbers.
        """
        numbers = request.message.body.get("numbers")
        if not isinstance(numbers, list) or len(numbers) > _MOST_PENDING:
            raise RefusedError("bad_message", "a pending needs 'numbers', a short list")
        trainer, log = request.trainer, self.trainers.by_id[request.trainer].log
        mine = [r for r in self._holder.waiting() if r.trainer == trainer]
        others = [r for r in self._together.requests() if r.trainer == trainer]
        here = {r.message.number for r in (*mine, *others)} | log.pending
        missing: list[Plain] = []
        for number in numbers:
            answer = log.answer(number) if isinstance(number, int) else None
            if answer is not None:
                self.desk.out.append((request.peer, answer))
            elif number not in here:
                missing.append(number)
        body: dict[str, Plain] = {
            "missing": missing,
            "lacks": any(map(self._holder.lacks, mine)),
            "step": self._holder.step_of(trainer),
        }
        self.desk.answer(request.peer, request.message, Kind.PENDING, body)

    def _stats(self, request: Request) -> None:
        counts: dict[str, Plain] = {kind.value: count for kind, count in self._counts.items()}
        body = {**self._counted(), "messages": counts}
        self.desk.answer(request.peer, request.message, Kind.OK, body)

    def _counted(self) -> dict[str, Plain]:
        refused: dict[str, Plain] = {"errors": self.desk.errors, "rejected": self.rejected}
        return {**self._holder.stats(), **refused}

    def _carried(self) -> Replies:
        out, self.desk.out = self.desk.out, []
        self._sent_bytes += sum(_bytes_of(message) for _, message in out)
        return [self._logged(peer, message) for peer, message in out]

    def _logged(self, peer: Peer, message: Message) -> tuple[Peer, Message]:
        """Keeps an answer for a request that may come again; returns the connection it goes to."""
        if message.body.get("error") == "stranger":
            return peer, message
        peer = self.trainers.newest(peer)
        trainer = self.trainers.id_of(peer)
        if trainer is not None:
            self.trainers.by_id[trainer].log.end(message)
        return peer, message


def _bytes_of(message: Message) -> int:
    return sum(tensor.array.nbytes for tensor in message.tensors)


def _number_of(message: Message) -> int:
    """Returns the number of the trainer who says that it sent a message, -1 where it is none."""
    number = message.sender.removeprefix("trainer ")
    return int(number) if number.isascii() and number.isdigit() and len(number) < 8 else -1
