"""Job attributes that a transpiler wrote into a program: role, endpoints, trainers, digest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.transpiler.config import DistributedMode
from jaxfleet.fluid.transpiler.pserver_job import DIGEST
from jaxfleet.ir import Attr, Program


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
