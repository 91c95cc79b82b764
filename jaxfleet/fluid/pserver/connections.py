"""Connections of a process, which either serves its program or is a trainer of servers.

A transpiler wrote the job into the program's attributes: role, endpoints, trainers, digest.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from jaxfleet.env import read_job
from jaxfleet.errors import ClosedError, FeedError, ProgramError
from jaxfleet.fluid.flags import get_flags
from jaxfleet.fluid.pserver.normalization import normalize_server
from jaxfleet.fluid.transpiler.config import DistributedMode
from jaxfleet.fluid.transpiler.pserver_job import DIGEST
from jaxfleet.ir import Attr, Program
from jaxfleet.lower import ExecutableCache
from jaxfleet.observability import spans_of
from jaxfleet.passes.fluid.local_training import AVERAGED
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.connected_client import connected_client
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.server import ServerCore, ServerOptions
from jaxfleet.ps.server.execution_plan import ServerPlan
from jaxfleet.ps.server.process import job_network, serve
from jaxfleet.ps.server.program_loader import read_plan
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.runtime.scope import Scope
from jaxfleet.transport.buffers import keep_freed_memory


@dataclass(frozen=True)
class JobInfo:
    """The job and role of a program."""

    role: str  # `trainer` or `pserver`
    trainers: int  # the number of trainers
    number: int  # the trainer's, or the server's
    endpoints: tuple[str, ...]  # of all servers, in order
    digest: str = ""  # common to all programs derived from one step; empty if not recorded
    mode: str = "sync"  # the communication mode

    @property
    def endpoint(self) -> str:
        """The address on which a server listens."""
        return self.endpoints[self.number]


def job_info_of(program: Program) -> JobInfo:
    """Returns the job of a program; ProgramError if it has none."""
    attrs = program.attrs
    role, trainers, endpoints = (attrs.get(name) for name in ("role", "trainers", "endpoints"))
    number = attrs.get("trainer_id" if role == "trainer" else "pserver_id")
    is_known = role in {"trainer", "pserver"} and isinstance(endpoints, tuple)
    if not (is_known and isinstance(trainers, int) and isinstance(number, int)):
        what = "the program sends or receives, and does not say who it is in which job"
        hint = "run what DistributeTranspiler.get_trainer_program() or get_pserver_programs() gave"
        raise ProgramError(what, hint=f"{hint}, not a copy read from text")
    digest, mode = str(attrs.get(DIGEST, "")), str(attrs.get("mode", "sync"))
    return JobInfo(str(role), trainers, number, _texts(endpoints), digest, mode)


def with_server_info(program: Program) -> Program:
    """Returns a server's program with its job, derived from its operator if a script wrote it.

    Such a server is the only one of its job. The program is in the IR, `listen_and_serv` first.
    """
    if "role" in program.attrs:
        return program
    serve = program.root.ops[0].attrs
    is_sync = serve.get("distributed_mode", DistributedMode.SYNC) == DistributedMode.SYNC
    attrs = program.attrs.updated(
        role="pserver",
        trainers=serve.get("Fanin", 1),
        pserver_id=0,
        endpoint=serve["endpoint"],
        endpoints=(serve["endpoint"],),
        mode="sync" if is_sync else "async",
    )
    return replace(program, attrs=attrs)


def _texts(items: Attr) -> tuple[str, ...]:
    assert isinstance(items, Sequence)
    return tuple(str(item) for item in items)


class ReadyFile:
    """A file with the port of this process's server while it serves."""

    def __init__(self, folder: Path = Path("/tmp")) -> None:  # noqa: S108  # fluid's
        self._path = folder / f"paddle.{os.getpid()}.port"
        self._is_written = False

    def announce(self, endpoint: str) -> None:
        """Writes the port of an endpoint.

        A file of another user is neither replaced nor followed: the server then runs without one.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            self._path.unlink(missing_ok=True)  # of an earlier process with this number
            descriptor = os.open(self._path, flags, 0o644)
        except OSError:
            return
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(endpoint.rpartition(":")[2])
        self._is_written = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_written:
            self._path.unlink(missing_ok=True)


_DEADLINE = "FLAGS_rpc_deadline"


class Transport(Protocol):
    """Carries messages; a test may substitute an in-memory network."""

    def serve(self, facts: JobInfo, begin: Callable[[ServerCore], None]) -> None:
        """Serves until all trainers have closed."""

    def connect(self, facts: JobInfo) -> Client:
        """Returns a trainer's client of its servers, before the handshake."""


class ZmqTransport:
    """Connections between processes by ZeroMQ."""

    def serve(self, facts: JobInfo, begin: Callable[[ServerCore], None]) -> None:
        """Serves until all trainers have closed.

        Raises:
            ConnectError: the endpoint is in use, or cannot be bound.
            StrategyError: the job has no secret, and insecure connections are not allowed.
            JaxfleetError: a block failed, or no trainer is left.
        """
        job = read_job()
        with _handlers_given_back(), ReadyFile() as ready:
            serve(
                facts.endpoint,
                replace(
                    server_options(facts, timeouts(), job=job.name), save_dirs=job.save_dirs or None
                ),
                secret_file=job.secret_file,
                insecure=job.insecure,
                begin=begin,
                on_listening=ready.announce,
            )

    def connect(self, facts: JobInfo) -> Client:
        job, waits = read_job(), timeouts()
        keep_freed_memory()
        network = job_network(job.secret_file)
        me = trainer_identity(facts, job=job.name)
        return connected_client(network, me, waits, spans=spans_of(me.name))


def timeouts() -> Timeouts:
    """Returns the timeouts set by fluid's flag."""
    deadline_s = float(get_flags(_DEADLINE)[_DEADLINE]) / 1e3
    return Timeouts(
        lost_after_s=min(Timeouts.lost_after_s, deadline_s),
        step_timeout_s=deadline_s,
        connect_s=deadline_s,
    )


def server_options(facts: JobInfo, waits: Timeouts, *, job: str) -> ServerOptions:
    """Returns the options of a server."""
    return ServerOptions(
        server=facts.number,
        job=job,
        trainers=facts.trainers,
        lost_after_s=waits.lost_after_s,
        step_timeout_s=waits.step_timeout_s,
        may_leave=facts.mode != AVERAGED,  # zeros instead of parameters would halve them
    )


def trainer_identity(facts: JobInfo, *, job: str) -> TrainerIdentity:
    """Returns the identity of a trainer."""
    return TrainerIdentity(job, facts.number, facts.trainers, facts.endpoints, facts.digest, ())


@dataclass
class Connection:
    """A trainer's connection to its servers, after the handshake; `ended` is why it has ended."""

    facts: JobInfo
    client: Client
    ended: str = ""
    _process: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        atexit.register(self._at_exit)

    def check(self) -> None:
        """Raises ClosedError if the connection has ended."""
        if self.ended:
            hint = "start the job again; exe.close() is the last thing that a trainer does"
            raise ClosedError(f"{self.client.me.name} {self.ended}", hint=hint)

    def close(self) -> None:
        """Sends bye to servers, so that other trainers can continue."""
        if self._ends("has closed"):
            self.client.close()

    def fail(self, error: Exception) -> None:
        """Ends without a bye: servers report the trainer as lost, with the reason."""
        if self._ends(how := f"gave up: {error}"):
            self.client.abandon(how)

    def _ends(self, how: str) -> bool:
        if self.ended or self._process != os.getpid():  # a fork does not own the connection
            return False
        atexit.unregister(self._at_exit)
        self.ended = how
        return True

    def _at_exit(self) -> None:
        """Closes, or fails if the script ended with an exception."""
        failed = getattr(sys, "last_value", None)  # set if the script ended with an exception
        if failed is not None and not hasattr(sys, "ps1"):
            self.fail(failed)
        else:
            self.close()


class Connections:
    """The connections of a process, shared by its executors, with their cache of executables."""

    def __init__(
        self, wires: Transport | None = None, cache: ExecutableCache | None = None
    ) -> None:
        self.wires = wires if wires is not None else ZmqTransport()
        self.cache = cache if cache is not None else ExecutableCache()
        self._open: dict[JobInfo, Connection] = {}

    def get(self, facts: JobInfo) -> Connection:
        """Returns a trainer's connection, creating it at the first call.

        Raises ConnectError if a server does not answer, and ProgramError if a server rejects this
        trainer.
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
        """Returns the connection of a trainer to these servers, if there is one."""
        wanted = set(endpoints)
        live = [known for known in self._open.values() if not known.ended]
        return next((one for one in live if wanted.issubset(one.client.me.endpoints)), None)


PROCESS = Connections()


@contextmanager
def _handlers_given_back() -> Iterator[None]:
    """Restores signal handlers afterwards, since the script may continue."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve_program(program: Program, scope: Scope, process: Connections) -> None:
    """Serves until all trainers have closed, then writes the server's state to the scope.

    The scope holds the initial state, and receives the final one even after an error.

    Raises:
        FeedError: a value is missing in the scope, or has another shape.
        ConnectError: the endpoint is in use, or cannot be bound.
        JaxfleetError: a block failed, or no trainer is left.
    """
    facts, plan = job_info_of(program), read_plan(normalize_server(program), process.cache)
    arrays = _state(plan, scope)
    served: list[ServerCore] = []

    def begin(core: ServerCore) -> None:
        rows = [scope.rows[spec.name] for spec in plan.tables if spec.name in scope.rows]
        core.begin(plan, arrays, facts.digest, rows)
        served.append(core)

    try:
        process.wires.serve(facts, begin)
    finally:
        for core in served:
            values = core.state.items()
            scope.keep({name: value for name, value in values if not value.is_deleted()})
            scope.rows.update(core.stores)


def _state(plan: ServerPlan, scope: Scope) -> dict[str, np.ndarray]:
    found = {}
    for name, variable in plan.state.items():
        if name not in scope:
            what = (
                f"'{name}' ({variable.type}) is not in the scope, and the server's blocks need it"
            )
            hint = "run the server's startup program first, in the same scope"
            raise FeedError(what, hint=hint)
        array, wanted = np.asarray(scope.peek(name)), plan.types[name]
        if (array.shape, array.dtype) != (wanted.shape, wanted.dtype):
            what = f"'{name}' is {array.dtype}{list(array.shape)} in the scope, and the server's"
            raise FeedError(f"{what} program declares {variable.type}", hint="run its own startup")
        found[name] = array
    return found
