"""The trainers of a launch that change while the job runs: some die, some are added, some leave.

What the job allows is the servers' to decide (docs/parameter-servers.md, "Trainers that join and
leave"): server 0 is asked before anything is changed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxfleet.errors import ConnectError, ProgramError, StrategyError
from jaxfleet.launch.job_spec import MOST_PROCESSES, Job, check_range
from jaxfleet.launch.members import Members
from jaxfleet.launch.output import counted
from jaxfleet.launch.requests import Requests
from jaxfleet.launch.starter import Starter

_SERVER_S = 10.0  # server 0 answers within
_DEATH_S = 3.0  # likewise while the launch waits, since a trainer has died


@dataclass(frozen=True)
class JobNow:
    """What server 0 reports about the trainers of its job.

    Attributes:
        trainers: their number; 0 before their first step.
        rows: of the whole batch; 0 if unknown.
        leaves: a SIGTERM lets each of them leave.
        goes_on: the others go on without one that is lost.
    """

    trainers: int
    rows: int
    leaves: bool
    goes_on: bool


def ask_server(job: Job, endpoint: str, within_s: float) -> JobNow:
    """Asks server 0, as a process that would join.

    Raises:
        ConnectError: it does not answer.
        StrategyError: the trainers of the job cannot change.
    """
    answer = ask_a_server(job, endpoint, within_s)
    if answer is None:
        raise _silent(endpoint, within_s)
    if "trainers" not in answer:
        raise _waiting(endpoint)
    trainers, rows = answer["trainers"], answer.get("rows")
    return JobNow(
        trainers=trainers if isinstance(trainers, int) else 0,
        rows=rows if isinstance(rows, int) else 0,
        leaves=answer.get("leaves") is True,
        goes_on=answer.get("goes_on") is True,
    )


def ask_to_move(
    job: Job, endpoints: Sequence[str], folder: str, *, peek: bool = False, within_s: float
) -> Mapping[str, object]:
    """Asks server 0 to have the job move to other servers; returns its answer.

    Args:
        job: the job.
        endpoints: of all servers that it is to have; server 0 stays.
        folder: through which the state travels.
        peek: only ask whether it can.
        within_s: how long server 0 may take.

    Raises:
        ConnectError: it does not answer.
        StrategyError: the servers of the job cannot change.
    """
    body = {"moves_to": list(endpoints), "moves_through": folder, "peek": peek}
    answer = ask_a_server(job, endpoints[0], within_s, kind="move", body=body)
    if answer is None:
        raise _silent(endpoints[0], within_s)
    if "moved" not in answer:
        raise _waiting(endpoints[0])
    return answer


def _waiting(endpoint: str) -> ConnectError:
    what = f"server 0 at {endpoint} waits for its trainers, as at a start"
    return ConnectError(what, hint="try again in a moment")


def _silent(endpoint: str, within_s: float) -> ConnectError:
    what = f"server 0 at {endpoint} did not answer within {within_s:g} s"
    return ConnectError(what, hint="it may be about to come back: try again")


def ask_a_server(
    job: Job,
    endpoint: str,
    within_s: float,
    *,
    kind: str = "join",
    body: Mapping[str, Any] | None = None,
) -> Mapping[str, object] | None:
    """Sends a server a request without a hello, by default `join`; None if it does not answer.

    Raises:
        StrategyError: it refuses.
    """
    # Not before the first request: a launch itself needs no network.
    from jaxfleet.ps.client.joining import ask_first  # noqa: PLC0415
    from jaxfleet.transport.messages import Kind  # noqa: PLC0415
    from jaxfleet.transport.secret import read_secret  # noqa: PLC0415
    from jaxfleet.transport.zmq.network import ZmqNetwork  # noqa: PLC0415

    secret = None if job.secret is None else read_secret(job.secret)
    lines = ZmqNetwork(secret=secret, share_memory=False).connect([endpoint])
    try:
        answer = ask_first(
            lines, Kind(kind),
            {"job": job.name, "session": "jaxfleet scale", "trainers": 0, **(body or {})},
            number=1, clock=time.monotonic, within_s=within_s,
        )  # fmt: skip
    except ProgramError as refusal:
        raise StrategyError(f"job '{job.name}': {refusal}", hint=refusal.hint) from refusal
    finally:
        lines.close()
    return answer


class TrainerScaling:
    """Decides which trainers a launch goes on without, and which it starts or lets leave.

    Args:
        job: the job.
        members: its processes on this machine.
        starter: prints messages, and has the queue of events.
        endpoint: of server 0.
        requests: has the launch's thread carry out what is asked.
        is_due: whether a dead trainer, by its number, is about to be started again.
    """

    def __init__(
        self,
        job: Job,
        members: Members,
        starter: Starter,
        *,
        endpoint: str,
        requests: Requests,
        is_due: Callable[[int], bool],
    ) -> None:
        self._job, self._members = job, members
        self._endpoint, self._is_due, self._requests = endpoint, is_due, requests
        self._console = starter.console
        self._leaving: set[int] = set()

    def begin(self) -> None:
        """Begins anew, with a start of the whole job."""
        self._leaving.clear()

    # --- requests, in the thread of the control socket ------------------------------------------

    def ask(self, trainers: int) -> str:
        """Has the launch change the number of trainers; returns what it does.

        Raises:
            ConnectError: server 0 does not answer.
            StrategyError: the job cannot have this number of trainers.
        """
        job = self._job
        check_range("trainers", trainers, 1, MOST_PROCESSES)
        if trainers < (job.min_trainers or 1):
            what = f"job '{job.name}' has at least {job.min_trainers} trainers"
            raise StrategyError(what, hint="set by its launch: --trainers MIN:N")
        if job.nodes.several:
            what = f"job '{job.name}' runs on several machines, and each launch has only its own"
            hint = "start trainers with JAXFLEET_JOINS=1; SIGTERM lets one leave"
            raise StrategyError(what, hint=hint)
        self._requests.check()
        now = ask_server(job, self._endpoint, _SERVER_S)
        if not now.trainers:
            what = f"job '{job.name}' has not begun its first step"
            raise StrategyError(what, hint="try again in some seconds")
        if now.rows % trainers:
            what = f"a batch of {now.rows} rows cannot be divided among {trainers} trainers"
            raise StrategyError(what, hint="choose a number that divides it")
        return self._requests.carry_out(lambda: self._scale(trainers, may_leave=now.leaves))

    # --- changes, in the thread of the launch ----------------------------------------------------

    def _scale(self, trainers: int, *, may_leave: bool) -> str:
        job, members = f"job '{self._job.name}'", self._members
        present = self._present
        if trainers == len(present):
            return f"{job} has {counted(trainers, 'trainer')} already"
        if trainers > len(present):
            names = [members.add_trainer().name for _ in range(trainers - len(present))]
            done = f"{_listed(names)} to join {job} at a step"
        else:
            if not may_leave:
                what = f"SIGTERM would kill the trainers of {job}, not let them leave"
                hint = (
                    "it lets them with strategy.on_trainer_lost='continue', a sigterm_grace_s, and "
                    "no handler of the script's own"
                )
                raise StrategyError(what, hint=hint)
            leaving = present[trainers:]
            names = [members.trainers[number].name for number in leaving]
            for number in reversed(leaving):
                members.trainers[number].ask_to_end()
            self._leaving.update(leaving)
            done = f"{_listed(names)} to leave {job} at the next step"
        members.planned = range(trainers)  # if the whole job starts again
        self._console.say(f"asked for {counted(trainers, 'trainer')}: {done}")
        return done

    @property
    def _present(self) -> list[int]:
        """The trainers that run or are about to, without those that are to leave."""
        return [
            number
            for number, process in sorted(self._members.trainers.items())
            if number not in self._leaving and (process.status is None or self._is_due(number))
        ]

    def has_left(self, number: int) -> bool:
        """Whether a trainer that has ended, or is due, was to leave; it is forgotten then."""
        if number not in self._leaving:
            return False
        self._leaving.discard(number)
        process = self._members.forget(number)
        self._console.say(f"{process.name} {process.ending}: it has left the job")
        return True

    def came_too_late(self, number: int) -> bool:
        """Whether a dead trainer was to join a job that is done; it is forgotten then."""
        if not self._members.have_served or number not in self._members.joined:
            return False
        self._forget(number, "the job was done")
        return True

    def is_last(self, number: int) -> bool:
        """Whether a dead trainer leaves none with which it could go on."""
        return self._members.joins_again(number) and not self._others(number)

    def goes_on_without(self, number: int) -> bool:
        """Whether the job goes on without a dead trainer; it is forgotten then."""
        least = self._job.min_trainers
        if least is None:
            least = 1 if number in self._members.joined else None
        others = self._others(number)
        if least is None or others < least:
            return False
        if self._job.min_trainers is not None and (why := self._why_not()):
            name = self._members.trainers[number].name
            self._console.complain(f"the job cannot go on without {name}: {why}")
            return False
        self._forget(number, f"the job goes on with {counted(others, 'trainer')}")
        return True

    def _forget(self, number: int, so: str) -> None:
        process = self._members.forget(number)
        self._console.complain(
            f"{process.name} {process.ending} after {process.seconds:.1f} s; {so}"
        )

    def _why_not(self) -> str:
        """Returns why the job cannot go on without a trainer; empty if it can."""
        try:
            now = ask_server(self._job, self._endpoint, _DEATH_S)
        except StrategyError as refusal:
            return str(refusal)
        except ConnectError:
            return ""  # server 0 is away for a while
        if not now.trainers:
            return "its first step has not begun"
        return "" if now.goes_on else "its strategy.on_trainer_lost is not 'continue'"

    def _others(self, number: int) -> int:
        running = [at for at in self._present if self._members.trainers[at].status is None]
        return len({*running} - {number})


def _listed(names: Sequence[str]) -> str:
    """Returns names with their verb: `trainer 2 and trainer 3 are`."""
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"{listed} {'are' if len(names) > 1 else 'is'}"
