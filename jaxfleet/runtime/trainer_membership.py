"""A trainer's place in a job whose trainers change: they are lost, leave or join at a step.

An operation of the step (a call, a save, a pull) that the change interrupts is begun again in the
new place. It is interrupted on all trainers or on none, so all begin the same one again.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.errors import FeedError, JaxfleetError, PeerLostError, ProgramError, StrategyError
from jaxfleet.lower.host_transfer import to_device
from jaxfleet.observability.notices import alert
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.membership import Membership, MembershipChangedError
from jaxfleet.runtime.checkpointing import on_host
from jaxfleet.runtime.leaving import LeaveRequest
from jaxfleet.runtime.pserver_job import JobPrograms
from jaxfleet.runtime.remote_state import RemoteState
from jaxfleet.runtime.step_state import Handle, NewestState
from jaxfleet.runtime.trainer_batches import Programs
from jaxfleet.runtime.trainer_connection import TrainerConnection, TrainerSync
from jaxfleet.strategy import DistributedStrategy
from jaxfleet.transport.messages import Kind, Tensor

_Result = TypeVar("_Result")
_NEW = -1  # the step that a process reports which joins
_START_AGAIN = (
    "`jaxfleet launch --max-restarts N --save-every 5m` starts such a job again, from its last "
    "checkpoint, which step.resume returns"
)


class Departure(SystemExit):
    """This trainer has left its job, which goes on without it: its process ends, with code 0."""


class Scaling(Protocol):
    """Makes what a process needs for another place in its job."""

    @property
    def joins(self) -> bool:
        """Whether this process is no trainer of the job yet."""
        ...

    def programs(self, trainer: int, trainers: int) -> Programs:
        """Returns what makes the programs of a trainer, of a number of trainers."""
        ...

    def connect(self, job: JobPrograms, membership: Membership, session: str) -> Client:
        """Returns the client of a member."""
        ...

    def move_to(self, endpoints: tuple[str, ...]) -> None:
        """Makes programs for other servers from now on, and connects to those."""
        ...

    def join(self, session: str, digest: Callable[[int], str]) -> Membership | None:
        """Waits until the job has this process as a member; None if it begins the job instead.

        Args:
            session: identifies it.
            digest: returns the hash of the programs for a number of trainers.
        """
        ...


def why_fixed(strategy: DistributedStrategy) -> str:
    """Returns why the trainers of a job cannot change while it runs; empty if they can."""
    how = strategy.communication
    if how in {"fl", "local_sgd"}:
        return f"in communication '{how}' all of them average their values"
    if how == "sync" and strategy.batch == "local":
        return "with batch='local' the whole batch would change with their number"
    if how != "sync" and strategy.batch != "local":
        return f"in communication '{how}' they can with batch='local', where each has its own rows"
    if strategy.on_trainer_lost == "wait":
        return "with on_trainer_lost='wait' lost trainers are waited for"
    if "compress_sends" in strategy.passes:
        return "trainers keep what compressed gradients leave out"
    return ""


def check_trainer_lost(strategy: DistributedStrategy) -> None:
    """Rejects a reaction to lost trainers that a job cannot have.

    Raises:
        StrategyError: it is to continue without them, and its trainers cannot change.
    """
    how = strategy.on_trainer_lost
    if how == "continue" and (why := why_fixed(strategy)):
        raise StrategyError(f"on_trainer_lost='continue': {why}", hint=_START_AGAIN)


def _check_level(client: Client) -> None:
    """Rejects servers that have lost steps: they were started again when the trainers changed."""
    for number, known in enumerate(client.servers):
        counts = client.me.is_sync or known.takes_pushes
        if counts and known.step < client.step:
            what = f"{client.me.server_name(number)} was started again while the trainers changed"
            what = f"{what}, and is at step {known.step} of {client.step}"
            raise PeerLostError(what, hint="start the job again from its last checkpoint")


class ChangingTrainer(ABC):
    """What a `TrainerStep` does when the trainers of its job change."""

    captured: Captured
    strategy: DistributedStrategy
    _job: JobPrograms
    _lines: TrainerConnection
    _pace: TrainerSync
    _newest: NewestState
    _served: RemoteState
    _scaling: Scaling | None
    _compares: bool
    _leaving: LeaveRequest
    _sent: tuple[list[Any], list[Any]] | None  # a state as given, and as servers have it
    _joined: Mapping[str, Any] | None  # the state that a process receives which joins
    _epoch_step: int  # after which the members of the job were those that they are

    @property
    @abstractmethod
    def client(self) -> Client: ...

    @abstractmethod
    def _take_programs(self, programs: Programs, trainers: int) -> None:
        """Replaces the programs, and all that is made of them."""

    @abstractmethod
    def _prepared(self, client: Client) -> Client:
        """Returns a client that reports what this step knows."""

    def leave(self) -> None:
        """Lets this trainer leave the job before its next step; the others go on without it.

        That step raises `SystemExit`, which ends the script with code 0. The batch is cut over the
        trainers that stay. May be called in the handler of a signal. With
        `on_trainer_lost="continue"`, SIGTERM does the same (`strategy.sigterm_grace_s`).
        """
        self._leaving.make()

    def _leave(self) -> None:
        """Leaves the job, which must be able to go on without this trainer."""
        me, done = self.client.me.name, self.client.step
        try:
            self._through_changes(self._say_that_it_leaves)
        except ProgramError as refusal:
            if not self._leaving.by_signal:
                raise
            alert(f"{refusal}; SIGTERM ends it after step {done}")
            self._leaving.end()
            raise
        if self._leaving.by_signal:
            alert(f"{me} leaves the job after step {done}, because of SIGTERM")
        self._lines.abandon()
        self._leaving.stop()
        raise Departure(0)

    def _step_back(self) -> None:
        """Leaves a job that this process has joined and cannot train in: the others go on."""
        with suppress(ProgramError):
            self._say_that_it_leaves()
        self._lines.abandon()
        self._leaving.stop()

    def _say_that_it_leaves(self) -> None:
        if not self._pace.is_sync:
            self._pace.drain(self.client)
        self.client.leave()  # the client of the place that it has then

    def _as_member(self, client: Client) -> Client:
        """Returns a client that reports how the members of the job can change."""
        fixed = why_fixed(self.strategy)
        if self._scaling is None:
            fixed = "all its processes run in one"
        goes_on = self.strategy.on_trainer_lost == "continue"
        leaves = goes_on and not fixed and self._leaving.listen()
        is_sync = self.strategy.communication in {"sync", "fl"}  # at each step of the client
        client.me = replace(client.me, fixed=fixed, goes_on=goes_on, leaves=leaves, is_sync=is_sync)
        return client

    def _through_changes(
        self, operation: Callable[[], _Result], *, trains: bool = False
    ) -> _Result:
        """Runs an operation, again in a new place if the members of the job change meanwhile.

        Begun again it has the same name: some servers may have done their part of it. A trainer
        that has been told of other members changes places before it; where trainers wait for each
        other, only before an operation that `trains`, since others may have ended.
        """
        self._take_place(trains=trains)
        names = self.client.names.copy()
        while True:
            try:
                return operation()
            except MembershipChangedError as change:
                self._change(change.membership)
            self.client.names = names.copy()

    def _take_place(self, *, trains: bool = False) -> None:
        """Takes a place among other members, between two steps, if servers have told of some."""
        following = self.client.members.following
        if following is not None and (trains or not self._pace.is_sync):
            self._change(following)

    def _current_client(self) -> Client:
        """Returns the client of the place that this trainer has, between two steps."""
        self._take_place()
        return self.client

    def _change(self, membership: Membership | None) -> None:
        while membership is not None:
            try:
                self._move(membership)
            except MembershipChangedError as again:
                membership = again.membership
            else:
                return
        what = "the trainers of the job change, and no server named the new ones"
        raise PeerLostError(what, hint="all processes must run one version of jaxfleet")

    def _move(self, membership: Membership) -> None:
        """Takes this trainer's place among other members, after the step that it has done."""
        old = self.client
        number = membership.number_of(old.me.session)
        if number is None:
            self._end(membership, old)
        assert number is not None
        assert self._scaling is not None
        old.doing(f"becoming trainer {number} of {len(membership.sessions)}")
        if number != old.me.trainer:
            alert(f"{old.me.name} is trainer {number} from step {old.step + 1} on")
        self._drain(membership)
        old.end_epoch(membership)
        count = len(membership.sessions)
        self._take_programs(self._scaling.programs(number, count), count)
        client = self._prepared(self._scaling.connect(self._job, membership, old.me.session))
        client.leases, client.names = old.leases, old.names.copy()
        former, epoch = old.me.trainer, old.me.membership.epoch
        client.me = replace(client.me, former=former, former_epoch=epoch, done=old.step)
        try:
            client.open()
            client.enter(old.step)
            _check_level(client)
            self._meet(client, old.step)
            self._lines.replace(client, self._pace)
        except BaseException:
            client.abandon()
            raise
        self._epoch_step = client.step
        old.abandon()

    def _drain(self, membership: Membership) -> None:
        """Completes the updates of trainers that do not wait for each other, in the old place."""
        try:
            self._lines.drain()
        except MembershipChangedError as again:
            if again.is_newer_than(membership):
                raise
            what = "a server was started again while the trainers changed, and lacks their pushes"
            raise PeerLostError(what, hint=_START_AGAIN) from None

    def _end(self, membership: Membership, old: Client) -> None:
        """Ends this trainer, which is not among the members of the job any more."""
        is_dismissed = old.me.session in membership.dismissed
        if is_dismissed:
            with suppress(JaxfleetError, MembershipChangedError):
                old.end_epoch(membership)
        self._lines.abandon()
        if is_dismissed:
            alert(f"{old.me.name} leaves after step {old.step}: the job has fewer trainers")
            raise Departure(0)
        what = f"{old.me.name} was taken out of the job after step {old.step}: it had been silent"
        raise PeerLostError(what, hint="lost_after_s says how long a trainer may be silent")

    def _enter(self, connect: Callable[[JobPrograms], Client]) -> Client:
        """Returns the client of this process, which joins the job first if it is not in it yet."""
        scaling = self._scaling
        if scaling is None or not scaling.joins:
            return self._prepared(connect(self._job))
        session = secrets.token_hex(8)

        def digest(trainers: int) -> str:
            self._take_programs(scaling.programs(0, trainers), trainers)
            return self._job.digest

        membership: Membership | None = None
        while True:
            number = membership.number_of(session) if membership is not None else None
            if membership is None or number is None:
                membership = scaling.join(session, digest)
                if membership is None:
                    return self._prepared(connect(self._job))
                continue
            count = len(membership.sessions)
            self._take_programs(scaling.programs(number, count), count)
            client = self._prepared(scaling.connect(self._job, membership, session))
            try:
                client.open()
                self._joined = self._meet(client, _NEW)
            except MembershipChangedError as again:
                client.abandon()
                membership = again.membership
            except BaseException:
                client.abandon()
                raise
            else:
                self._compares = False
                self._epoch_step = client.step
                return client

    def _meet(self, client: Client, step: int) -> Mapping[str, Any] | None:
        """Waits for all members; gives the state to those that are new.

        Returns the state for a process that is, by name.
        """
        steps = Tensor("steps", np.array([step], np.int64))
        body = {"key": f"epoch {client.me.membership.epoch}", "how": "gather"}
        met = client.request(0, Kind.REDUCE, step=0, body=body, tensors=[steps])
        client.wait([met])
        assert met.answer is not None
        found = {int(each) for each in np.ravel(met.answer.tensors[0].array)}
        if not (steps_here := found - {_NEW}) or (self._pace.is_sync and len(steps_here) > 1):
            what = f"the trainers go on after steps {', '.join(map(str, sorted(found)))}"
            raise PeerLostError(f"{what}, which differ", hint="start the job again")
        done = min(steps_here)
        client.servers[0].replay.add_together(met.message, max(done, step))  # so far, of any step
        if _NEW in found and client.me.trainer == 0:
            pairs = self._served.held(self._state()).items()
            tensors = [Tensor(n, on_host(x)) for n, x in pairs if not isinstance(x, Handle)]
            kept = client.request(0, Kind.KEEP, step=done, tensors=tensors)
            client.servers[0].replay.add(kept.message, max(done, step) + 1)
            client.wait([kept])
        if step != _NEW:
            return None
        client.enter(done)
        if any(known.takes_pushes and known.step < done for known in client.servers):
            client.idle()  # servers know of an earlier step: of one that did not come to join
        asked = client.request(0, Kind.RECALL)
        client.wait([asked])
        assert asked.answer is not None
        variables = self.captured.program.variables
        return {
            tensor.name: to_device(np.array(tensor.array), variables[tensor.name].dtype)[0]
            for tensor in asked.answer.tensors
            if tensor.name in variables
        }

    def _state(self) -> list[Any]:
        """Returns the leaves of the newest state, which no step may have returned yet."""
        if self._sent is not None:
            return self._sent[1]
        if not self._newest.leaves:
            what = "the trainers of the job change before its servers have its first state"
            raise PeerLostError(what, hint="let a process join once the job has begun to train")
        return self._newest.leaves

    def _take_joined(self) -> list[Any]:
        """Returns the leaves of the state with which this process joined."""
        assert self._joined is not None
        values, self._joined = self._joined, None
        if missing := self._served.held_names() - values.keys():
            what = f"the state of the job lacks {', '.join(sorted(missing))}"
            raise FeedError(what, hint="start it with the same script and strategy")
        if self._pace.is_sync:
            return self._served.leaves(values)
        # Trainer 0 has sent what it has, which servers may have newer.
        pulled = self._served.pull(self.client, self._served.params)
        leaves = self._served.leaves({**values, **pulled})
        self._pace.restart(self._served.held(leaves), self.client.clock)
        return leaves
