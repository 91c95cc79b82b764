"""The servers of a launch that change while the job runs: some are added, or the last ones leave.

New servers are started first; then server 0 is asked to have the job move to them, which its
trainers do between two steps (docs/parameter-servers.md, "Servers that are added or removed").
"""

import signal
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from jaxfleet.errors import ConnectError, StrategyError
from jaxfleet.launch.job_spec import MOST_PROCESSES, SERVE, Job, check_range
from jaxfleet.launch.members import Members
from jaxfleet.launch.output import counted
from jaxfleet.launch.placement import Ports
from jaxfleet.launch.process import Process
from jaxfleet.launch.requests import Requests
from jaxfleet.launch.scaling import ask_a_server, ask_to_move
from jaxfleet.launch.starter import Asked, Starter

_SERVER_S = 10.0  # server 0 answers within
_DECISION_S = 30.0  # likewise, once new servers wait for the job
_START_S = 60.0  # a new server listens within
_END_S = 10.0  # servers that the trainers have left end within
_FOLLOW_S = 0.5  # how often server 0 is asked whether the job has moved


class ServerScaling:
    """Decides which servers a launch adds, and which it lets go.

    Args:
        job: the job.
        members: its processes on this machine.
        starter: prints messages, and has the queue of events.
        requests: has the launch's thread carry out what is asked.
    """

    def __init__(self, job: Job, members: Members, starter: Starter, requests: Requests) -> None:
        self._job, self._members, self._requests = job, members, requests
        self._console, self._events = starter.console, starter.events
        self.begin()

    def begin(self) -> None:
        """Begins anew, with a start of the whole job."""
        self._is_moving = self._is_asked = False
        self._leaving: set[int] = set()  # servers that are to end when the job has moved
        self._unused: set[int] = set()  # servers to which it has not moved yet

    # --- requests, in the thread of the control socket ------------------------------------------

    def ask(self, servers: int) -> str:
        """Has the job go on with another number of servers; returns what is done.

        Raises:
            ConnectError: server 0, or a new server, does not answer.
            StrategyError: the job cannot have this number of servers.
        """
        job, members = self._job, self._members
        check_range("servers", servers, 1, MOST_PROCESSES)
        self._check_launch()
        before, start = tuple(members.endpoints), members.start_number
        if servers == len(before):
            return f"job '{job.name}' has {counted(servers, 'server')} already"
        ports = Ports(max(servers - len(before), 0), host=job.nodes.own)
        endpoints = (*before[:servers], *ports.endpoints)
        try:
            self._ask_to_move(endpoints, peek=True)
            self._requests.carry_out(lambda: self._add(ports, start))
            until = time.monotonic() + _START_S
            for number in range(len(before), servers):
                self._wait_for(number, endpoints[number], until)
            self._requests.carry_out(lambda: self._need(start))
            self._ask_to_move(endpoints, within_s=_DECISION_S)
            self._requests.carry_out(lambda: self._begin(len(before), servers, start))
        except BaseException:
            with suppress(StrategyError):
                self._requests.carry_out(lambda: self._drop(len(before), start))
            ports.close()
            raise
        follow = threading.Thread(target=self._follow, args=(endpoints, start), daemon=True)
        follow.start()
        return f"job '{job.name}' is to go on with {counted(servers, 'server')} after its next step"

    def _check_launch(self) -> None:
        job, hint = self._job, None
        if job.nodes.several:
            what = "runs on several machines, and each launch has only its own"
            hint = "save a checkpoint, and start the job again with other servers"
        elif job.server != SERVE:
            what = "has servers that run a script, whose number is fixed"
            hint = "leave --servers-run-script out"
        elif job.server_endpoints:
            what = "was given the endpoints of its servers"
            hint = "start it with a number of servers: jaxfleet launch --servers N"
        elif self._is_moving:
            what, hint = "is about to move to other servers already", "try again when it has"
        else:
            self._requests.check()
            return
        raise StrategyError(f"job '{job.name}' {what}", hint=hint)

    def _ask_to_move(
        self, endpoints: Sequence[str], *, peek: bool = False, within_s: float = _SERVER_S
    ) -> Mapping[str, object]:
        return ask_to_move(
            self._job, endpoints, str(self._members.moving_folder), peek=peek, within_s=within_s
        )

    def _wait_for(self, number: int, endpoint: str, until: float) -> None:
        """Waits until a new server listens."""
        while time.monotonic() < until:
            self._requests.check()
            if number not in self._members.servers:
                raise _ended_early(number)
            try:
                if ask_a_server(self._job, endpoint, 1.0) is not None:
                    return
            except StrategyError:
                return  # it refuses, so it is there
        raise ConnectError(
            f"server {number} at {endpoint} was started, and did not answer within {_START_S:g} s",
            hint="the job goes on as before; see the output of that server",
        )

    def _follow(self, endpoints: Sequence[str], start: int) -> None:
        """Asks server 0 again until the job has moved: it may have been started again meanwhile."""
        members = self._members
        while self._requests.is_open and members.start_number == start:
            time.sleep(_FOLLOW_S)
            with suppress(ConnectError, StrategyError, OSError):
                if self._ask_to_move(endpoints, within_s=3.0).get("moved") is True:
                    moved = partial(self._has_moved, len(endpoints), start)
                    self._events.put(Asked(moved, Future()))
                    return

    # --- changes, in the thread of the launch ----------------------------------------------------

    def _add(self, ports: Ports, start: int) -> None:
        self._check_start(start)
        before = len(self._members.endpoints)
        self._unused = {*range(before, before + len(ports.endpoints))}  # also if one cannot start
        self._members.add_servers(ports)

    def _need(self, start: int) -> None:
        """Has dead servers that were added started again: the job may move to them from now on."""
        self._check_start(start)
        if ended := self._unused - self._members.servers.keys():
            raise _ended_early(min(ended))
        self._is_asked = True

    def _check_start(self, start: int) -> None:
        """Rejects what was asked of a start of the job that is over."""
        if self._members.start_number != start:
            what = f"job '{self._job.name}' was started again meanwhile"
            raise StrategyError(what, hint="ask again when it has begun")

    def _drop(self, before: int, start: int) -> None:
        """Ends servers that were added, since the job does not move to them."""
        self._check_start(start)
        self._is_asked = False
        self.end_unused("the job does not move to it")
        self._members.drop_places(before)

    def failed_to_start(self, number: int) -> bool:
        """Whether a dead server was just added, and the job goes on as before; it is forgotten."""
        if self._is_moving or self._is_asked or number not in self._unused:
            return False
        process = self._members.forget_server(number)
        self._console.complain(f"{process.name} {process.ending}; the job goes on without it")
        return True

    def _begin(self, before: int, servers: int, start: int) -> None:
        self._check_start(start)
        self._is_moving, self._is_asked = True, False
        self._leaving, self._unused = {*range(servers, before)}, {*range(before, servers)}
        self._members.planned_servers = servers  # if the whole job starts again
        self._console.say(
            f"asked for {counted(servers, 'server')}: the job moves after its next step"
        )

    def _has_moved(self, servers: int, start: int) -> None:
        members = self._members
        if members.start_number != start:
            return
        self._unused.clear()
        self._console.say(f"the job has {counted(servers, 'server')} now")
        late = [members.forget_server(n) for n in sorted(self._leaving & members.servers.keys())]
        for process in late:
            self._console.say(f"{process.name} has left the job")
        self._leaving.clear()
        members.drop_places(servers)
        members.end_move()
        self._is_moving = False  # from now on another request may read the places
        self._events.put_later(Asked(lambda: _end(late), Future()), _END_S)

    def has_left(self, number: int) -> bool:
        """Whether a server that has ended, or is due, was to leave; it is forgotten then."""
        process = self._members.servers.get(number)
        if process is None:
            return True
        if number not in self._leaving or process.status != 0:
            return False
        self._leaving.discard(number)
        self._members.forget_server(number)
        self._console.say(f"{process.name} {process.ending}: it has left the job")
        return True

    def end_unused(self, why: str = "the job is done") -> None:
        """Ends servers to which the job has not moved."""
        for number in sorted(self._unused & self._members.servers.keys()):
            process = self._members.forget_server(number)
            process.tell(signal.SIGTERM)
            self._console.say(f"{process.name} is stopped: {why}")
        self._unused.clear()


def _end(processes: Sequence[Process]) -> None:
    """Ends servers that have not ended by themselves, since they were started again."""
    for process in processes:
        if process.status is None:
            process.tell(signal.SIGTERM)


def _ended_early(server: int) -> StrategyError:
    what = f"server {server} ended before it served the job"
    return StrategyError(what, hint="the job goes on as before; see its output")
