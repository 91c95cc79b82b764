"""What a transpiler wrote into a program besides its operators: whose it is, of which job."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.transpiler.config import DistributedMode
from jaxfleet.fluid.transpiler.digest import DIGEST
from jaxfleet.ir import Attr, Program


@dataclass(frozen=True)
class Facts:
    """Whose program it is.

    Attributes:
        role: `trainer` or `pserver`.
        trainers: how many there are.
        number: the trainer's, or the server's.
        endpoints: of all servers, in order.
        digest: the same in all programs that were made of one; empty if nobody says.
        mode: how trainers and servers exchange.
    """

    role: str
    trainers: int
    number: int
    endpoints: tuple[str, ...]
    digest: str = ""
    mode: str = "sync"

    @property
    def endpoint(self) -> str:
        """Where a server listens."""
        return self.endpoints[self.number]


def facts_of(program: Program) -> Facts:
    """Returns the facts of a program.

    Raises:
        ProgramError: it has none.
    """
    attrs = program.attrs
    role, trainers, endpoints = (attrs.get(name) for name in ("role", "trainers", "endpoints"))
    number = attrs.get("trainer_id" if role == "trainer" else "pserver_id")
    is_known = role in {"trainer", "pserver"} and isinstance(endpoints, tuple)
    if not (is_known and isinstance(trainers, int) and isinstance(number, int)):
        what = "the program sends or receives, and does not say who it is in which job"
        hint = "run what DistributeTranspiler.get_trainer_program() or get_pserver_programs() gave"
        raise ProgramError(what, hint=f"{hint}, not a copy read from text")
    digest, mode = str(attrs.get(DIGEST, "")), str(attrs.get("mode", "sync"))
    return Facts(str(role), trainers, number, _texts(endpoints), digest, mode)


def with_facts_of_server(program: Program) -> Program:
    """Returns a server's program that says whose it is, by its operator where a script wrote it.

    Such a server is the only one of its job.

    Args:
        program: in the IR, `listen_and_serv` first.
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
