"""Requests for leases of samples, which server 0 answers from its ledger.

A trainer leases positions, and the push that contains their effect acknowledges them. Leases of a
trainer that leaves, is lost, or gives way to a new process are leased again. A restarted server
gives none out until every trainer has declared those that it has from the server's earlier life.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.observability.notices import alert
from jaxfleet.ps.server.data_ledger import DataLedger, DataOrder
from jaxfleet.ps.server.lease_record import LeaseRecord, read_spans
from jaxfleet.ps.server.outbox import Outbox, Request, RequestError, is_new
from jaxfleet.ps.server.position_set import PositionSet
from jaxfleet.ps.server.request_router import RequestRouter
from jaxfleet.ps.server.state import ServerState
from jaxfleet.ps.server.trainer_registry import TrainerRegistry
from jaxfleet.transport.messages import Kind, Message, Plain

_ANSWER_S = 1.0  # the longest wait without an answer; the trainer then asks again
_MOST_CHUNKS = 256  # of one request
_ONE_LOADER = "a job leases the samples of one loader, which all trainers create alike"


@dataclass
class LeaseHandler:
    """Leases samples to trainers, and takes leases back."""

    outbox: Outbox
    trainers: TrainerRegistry
    router: RequestRouter
    clock: Callable[[], float]
    _waiting: list[Request] = field(default_factory=list)
    _sessions: dict[int, Plain] = field(default_factory=dict)
    _undeclared: set[int] = field(default_factory=set)
    _replaced: set[int] = field(default_factory=set)  # whose former process may have leases
    _since: float = field(init=False)  # when this server was started
    _is_restarted: bool = False

    def __post_init__(self) -> None:
        self._since = self.clock()

    @property
    def _record(self) -> LeaseRecord:
        return self.router.leases

    # Sessions.

    def restarted(self, trainers: int) -> None:
        """Waits for the trainers to declare what they have from this server's earlier life."""
        self._undeclared, self._is_restarted = set(range(trainers)), True

    def _is_absent(self, trainer: int, now: float) -> bool:
        """Whether a trainer has left, is lost, or has not come for as long as it may take."""
        options = self.trainers.options
        if trainer not in self.trainers.by_id and trainer not in self.trainers.left():
            heard = max(self._since, self.trainers.heard_before_hello(trainer))
            is_silent = self._is_restarted and now - heard > options.lost_after_s
            return is_silent or now - self._since > options.step_timeout_s
        return trainer in self.trainers.left() or self.trainers.is_lost(trainer, now)

    def greeted(self, message: Message) -> None:
        """Takes the hello of a trainer: another process has no leases of the former one.

        Raises:
            RequestError: what it declares is malformed.
        """
        trainer, session = message.body["trainer"], message.body.get("session")
        assert isinstance(trainer, int)
        is_first = trainer not in self._sessions
        if self._sessions.get(trainer, session) != session:
            self._waiting = [other for other in self._waiting if other.trainer != trainer]
            self._replaced.add(trainer)
            self._release(trainer, "which another process replaces")
        self._sessions[trainer] = session
        declared = message.body.get("data")
        if is_first and declared is not None:
            if self._record.ledger is None:  # killed before there was a checkpoint
                self.restarted(self.trainers.count)
                self._undeclared -= self._sessions.keys()
            self._adopt(trainer, declared, self.router.step_of(trainer))
        self._undeclared.discard(trainer)
        self.serve()

    def _adopt(
        self, trainer: int, declared: Plain, applied: int | None, *, alone: bool = False
    ) -> None:
        """Records what a trainer has leased, without what it has pushed up to an applied step.

        If `applied` is None, all that it has pushed is applied.
        """
        if not isinstance(declared, dict):
            raise RequestError("bad_message", "'data' of a hello describes leases")
        self._open(declared)
        ledger = self._record.ledger
        assert ledger is not None
        holds = declared.get("holds")
        for each in holds if isinstance(holds, list) else []:
            if not isinstance(each, list) or len(each) != 3:
                raise RequestError("bad_message", "'holds' has intervals with the step of a push")
            positions, pushed = read_spans([each[:2]]), each[2]
            last = pushed if isinstance(pushed, int) else -1
            if last < 0 or (applied is not None and last > applied):
                ledger.adopt(trainer, positions, alone=alone)

    def regroup(
        self,
        hellos: Mapping[int, Message],
        former: Mapping[int, int | None],
        again: bool,  # noqa: FBT001  # a callback's
    ) -> None:
        """Takes other trainers, each with the leases that its hello declares, and no others.

        All that they have pushed is applied, unless they have gone on when this server, which was
        started `again`, goes on after the steps that they did in their `former` places.
        """
        self._waiting.clear()
        self._sessions = {n: message.body.get("session") for n, message in hellos.items()}
        self._undeclared, self._replaced = set(), set()
        held, ledger = self.router.held, self._record.ledger
        if ledger is None or held is None:
            return
        self._record.settle(held.scheduler.step_of)
        for trainer in ledger.holders():
            ledger.release(trainer)
        for trainer, message in hellos.items():
            if not isinstance(declared := message.body.get("data"), dict):
                continue
            place = former[trainer]
            applied = self.router.step_of(place) if again and place is not None else None
            try:
                self._adopt(trainer, declared, applied, alone=True)
            except RequestError as error:
                alert(f"{self.outbox.name}: the leases of trainer {trainer} are void: {error.what}")

    def left(self, trainer: int) -> None:
        self._undeclared.discard(trainer)
        self._release(trainer, "which has left")
        self.serve()

    def look(self, now: float) -> None:
        """Takes the leases of lost trainers back, and answers requests that have waited."""
        if self._record.ledger is None and not self._waiting:
            return
        trainers = self.trainers
        self._undeclared = {n for n in self._undeclared if not self._is_absent(n, now)}
        if self._record.ledger is not None:
            for trainer in self._record.ledger.holders():
                if trainers.is_lost(trainer, now):
                    self._release(trainer, "which is lost")
        self.serve()

    def forget(self) -> None:
        """Answers all requests with nothing: a checkpoint was loaded, with a ledger of its own."""
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._answer(request, [], level=0)

    def forgive(self, seconds: float, now: float) -> None:
        """Discounts the time while this process was suspended."""
        self._since = min(self._since + seconds, now)

    def _release(self, trainer: int, why: str) -> None:
        held, ledger = self.router.held, self._record.ledger
        if ledger is None or held is None:
            return
        if held.scheduler.is_queued(trainer):
            return  # what arrived completely is applied; `look` and `serve` try again
        self._replaced.discard(trainer)
        self._record.settle(held.scheduler.step_of)
        if again := ledger.release(trainer):
            alert(
                f"{self.outbox.name}: {len(again)} samples that trainer {trainer}, {why}, had "
                "leased are leased again"
            )

    # Requests.

    def lease(self, request: Request) -> None:
        """Answers with leases, at once or when there are any.

        Raises:
            RequestError: it is malformed, or the loader is not the job's.
        """
        body = request.message.body
        order = self._open(body)
        rows, chunks, epochs = body.get("rows"), body.get("chunks"), body.get("epochs")
        for name, value, most in (("rows", rows, order.batch_size), ("chunks", chunks, None)):
            if type(value) is not int or not 1 <= value <= (most or _MOST_CHUNKS):
                raise RequestError("bad_message", f"'{name}' of a lease is {value!r}")
        if epochs is not None and (type(epochs) is not int or epochs < 1):
            raise RequestError("bad_message", f"'epochs' of a lease is {epochs!r}")
        if is_new(request, self._waiting):
            self._waiting.append(request)
        self.serve()

    def _check_job(self, held: ServerState) -> None:
        if held.plan.waits:
            what = "trainers that wait for each other lease no samples: steps determine them"
            raise RequestError("refused", what, hint="read with loader.from_step(done)")
        if held.plan.server != 0:
            raise RequestError("bad_message", f"{self.outbox.name} leases nothing; server 0 does")
        if not held.plan.merges:
            what = "server 0 has none of the parameters, so no push to it acknowledges samples"
            hint = "use fewer servers, or a smaller min_block_size, so that each has a slice"
            raise RequestError("refused", what, hint=hint)

    def _open(self, body: Mapping[str, Plain]) -> DataOrder:
        """Returns the order of a request, with which the job's ledger begins if there is none."""
        done = body.get("done")
        try:
            order = DataOrder.read(body)
        except ValueError as error:
            raise RequestError("bad_message", str(error)) from error
        ledger = self._record.ledger
        if ledger is None:
            if type(done) is not int or done < 0:
                raise RequestError("bad_message", f"'done' of a lease is {done!r}")
            self._record.ledger = DataLedger.after(order, done)
        elif (found := ledger.order.difference(order)) is not None:
            what = f"the loader has {found}, with which the job or its checkpoint began"
            raise RequestError("refused", what, hint=_ONE_LOADER)
        return order

    def serve(self) -> None:
        """Answers the requests that can be answered."""
        held = self.router.held
        if not self._waiting or held is None or self._record.ledger is None:
            return
        for trainer in sorted(self._replaced):
            self._release(trainer, "which another process replaces")
        self._record.settle(held.scheduler.step_of)
        self._waiting = [r for r in self._waiting if not self._is_answered(r, held)]

    def _is_answered(self, request: Request, held: ServerState) -> bool:
        try:
            self._check_job(held)
        except RequestError as refusal:
            self.outbox.refuse(request, refusal)
            return True
        ledger, body = self._record.ledger, request.message.body
        assert ledger is not None
        rows, chunks, epochs = body["rows"], body["chunks"], body.get("epochs")
        assert isinstance(rows, int)
        assert isinstance(chunks, int)
        assert epochs is None or isinstance(epochs, int)
        found: list[PositionSet] = []
        # Trainer 0 sends the state that all others wait for in their first step.
        may_lease = not self._undeclared and (held.step >= 0 or request.trainer == 0)
        may_lease &= request.trainer not in self._replaced  # its own would be released, too
        while may_lease and len(found) < chunks and self._is_spare(request.trainer, rows, epochs):
            positions = ledger.lease(request.trainer, rows, epochs)
            if not positions:
                break
            found.append(positions)
        has_ended = may_lease and not found and ledger.has_ended(epochs)
        level = max(known.step for known in self.trainers.present()) if may_lease else 0
        is_due = level > request.step or self.clock() - request.since >= _ANSWER_S
        if not (found or has_ended or is_due):
            return False
        self._answer(request, found, level=level, ended=has_ended)
        return True

    def _is_spare(self, trainer: int, rows: int, epochs: int | None) -> bool:
        """Whether there is more than the first batch of each trainer that has had none yet.

        A trainer that makes no step at all has no state to save or to pull.
        """
        ledger, trainers, now = self._record.ledger, self.trainers, self.clock()
        assert ledger is not None
        if (left := ledger.left(epochs)) is None:
            return True
        holders = ledger.holders()
        present = [n for n in range(trainers.count) if not self._is_absent(n, now)]
        new = [n for n in present if n not in trainers.by_id or trainers.by_id[n].step == 0]
        new = [n for n in new if n not in holders]
        return trainer in new or left >= rows * (len(new) + 1)

    def _answer(
        self, request: Request, found: Sequence[PositionSet], *, level: int, ended: bool = False
    ) -> None:
        leases: list[Plain] = [[list(span) for span in one.spans] for one in found]
        holders = self._record.ledger.holders() if self._record.ledger is not None else ()
        others: list[Plain] = sorted({*holders, *self._undeclared} - {request.trainer})
        body: dict[str, Plain] = {"leases": leases, "ended": ended, "level": level}
        self.outbox.reply(request, Kind.OK, {**body, "holders": others})
