"""How a process of fluid's reaches the others: serves, or is a trainer with lines to servers."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from jaxfleet.env import read_job
from jaxfleet.errors import ClosedError
from jaxfleet.fluid.flags import get_flags
from jaxfleet.fluid.pserver.facts import Facts
from jaxfleet.fluid.pserver.ready_file import ReadyFile
from jaxfleet.lower import ExecutableCache
from jaxfleet.passes.fl_average import MODE as AVERAGED
from jaxfleet.ps.allocation import keep_freed_memory
from jaxfleet.ps.client import Client
from jaxfleet.ps.heartbeat import Heartbeat
from jaxfleet.ps.membership import Membership
from jaxfleet.ps.options import Patience
from jaxfleet.ps.serve import network_of, serve
from jaxfleet.ps.server import ServerCore, ServerOptions
from jaxfleet.watch import spans_of

_DEADLINE = "FLAGS_rpc_deadline"
_LOST_AFTER_S = 10.0


class Wires(Protocol):
    """What carries messages; a test may put a network in memory in its place."""

    def serve(self, facts: Facts, begin: Callable[[ServerCore], None]) -> None:
        """Serves until all trainers have closed."""

    def connect(self, facts: Facts) -> Client:
        """Returns a trainer's lines to its servers, which it has not said hello on."""


class ZmqWires:
    """Wires between processes."""

    def serve(self, facts: Facts, begin: Callable[[ServerCore], None]) -> None:
        """Serves until all trainers have closed.

        Raises:
            ConnectError: the endpoint is taken, or may not be bound.
            StrategyError: the job has no secret, and is not meant to be insecure.
            JaxfleetError: a block failed, or no trainer lives.
        """
        job = read_job()
        with _handlers_given_back(), ReadyFile() as ready:
            serve(
                facts.endpoint,
                replace(
                    server_options(facts, patience(), job=job.name),
                    save_dirs=job.save_dirs or None,
                ),
                secret_file=job.secret_file,
                insecure=job.insecure,
                begin=begin,
                on_listening=ready.announce,
            )

    def connect(self, facts: Facts) -> Client:
        """Returns a trainer's lines to its servers."""
        job, waits = read_job(), patience()
        keep_freed_memory()
        network = network_of(job.secret_file)
        me = member(facts, job=job.name)
        heartbeat = Heartbeat(
            network,
            facts.endpoints,
            sender=me.name,
            session=me.session,
            every_s=min(1.0, waits.lost_after_s / 5),
        )
        lines, spans = network.connect(facts.endpoints), spans_of(me.name)
        return Client(lines, me, patience=waits, heartbeat=heartbeat, spans=spans)


def patience() -> Patience:
    """Returns how long to wait, by fluid's flag."""
    deadline_s = float(get_flags(_DEADLINE)[_DEADLINE]) / 1e3
    return Patience(
        lost_after_s=min(_LOST_AFTER_S, deadline_s),
        step_timeout_s=deadline_s,
        connect_s=deadline_s,
    )


def server_options(facts: Facts, waits: Patience, *, job: str) -> ServerOptions:
    """Returns what a server is told."""
    return ServerOptions(
        server=facts.number,
        job=job,
        trainers=facts.trainers,
        lost_after_s=waits.lost_after_s,
        step_timeout_s=waits.step_timeout_s,
        may_leave=facts.mode != AVERAGED,  # zeros in the place of parameters would halve them
    )


def member(facts: Facts, *, job: str) -> Membership:
    """Returns who a trainer is."""
    return Membership(job, facts.number, facts.trainers, facts.endpoints, facts.digest, ())


@dataclass
class Connection:
    """A trainer's lines to its servers, once it has said hello.

    Attributes:
        facts: whose they are.
        client: they.
        ended: why there are none any more.
    """

    facts: Facts
    client: Client
    ended: str = ""
    _process: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        atexit.register(self._at_exit)

    def check(self) -> None:
        """Refuses to be used when it has ended.

        Raises:
            ClosedError: it has.
        """
        if self.ended:
            hint = "start the job again; exe.close() is the last thing that a trainer does"
            raise ClosedError(f"{self.client.me.name} {self.ended}", hint=hint)

    def close(self) -> None:
        """Says bye to servers, so that the others go on."""
        if self._ends("has closed"):
            self.client.close()

    def fail(self, error: Exception) -> None:
        """Ends without a bye: servers will miss it, and say why it went."""
        if self._ends(how := f"gave up: {error}"):
            self.client.abandon(how)

    def _ends(self, how: str) -> bool:
        if self.ended or self._process != os.getpid():  # a fork has the lines in name only
            return False
        atexit.unregister(self._at_exit)
        self.ended = how
        return True

    def _at_exit(self) -> None:
        """Ends as the script does."""
        failed = getattr(sys, "last_value", None)  # set where a script ends by an exception
        if failed is not None and not hasattr(sys, "ps1"):
            self.fail(failed)
        else:
            self.close()


class Connections:
    """The connections of a process, which its executors share.

    Attributes:
        wires: what they go over.
        cache: where executables are kept, of servers and of trainers.
    """

    def __init__(self, wires: Wires | None = None, cache: ExecutableCache | None = None) -> None:
        self.wires = wires if wires is not None else ZmqWires()
        self.cache = cache if cache is not None else ExecutableCache()
        self._open: dict[Facts, Connection] = {}

    def get(self, facts: Facts) -> Connection:
        """Returns a trainer's connection; says hello where there is none.

        Raises:
            ConnectError: a server does not answer.
            ProgramError: a server refuses this trainer.
        """
        known = self._open.get(facts)
        if known is None or known.ended:
            client = self.wires.connect(facts)
            try:
                client.step = max(client.open(), 0)
            except BaseException:
                client.abandon()
                raise
            known = self._open[facts] = Connection(facts, client)
        return known

    def find(self, endpoints: Iterable[str]) -> Connection | None:
        """Returns the connection of a trainer that has spoken with servers, if any has."""
        wanted = set(endpoints)
        live = [known for known in self._open.values() if not known.ended]
        return next((one for one in live if wanted.issubset(one.client.me.endpoints)), None)


PROCESS = Connections()


@contextmanager
def _handlers_given_back() -> Iterator[None]:
    """Sets again what signals did before, since the script may go on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
