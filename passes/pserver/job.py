"""The facts that all programs of a pserver job share: mode, placement, `listen_and_serv`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.placement.sliced_layout import Slice
from jaxfleet.errors import PassError
from jaxfleet.ir import (
    Attr,
    Attrs,
    Block,
    BlockRef,
    Kind,
    Operands,
    Operator,
    Program,
    Role,
    Variable,
    block_name,
)

_DISTRIBUTED_MODES = {"sync": 0, "async": 1, "half_async": 2, "geo": 3, "dc_asgd": 1, "fl": 0}


@dataclass(frozen=True)
class CommunicationMode:
    """A communication mode with its parameters."""

    communication: str = "sync"  # `sync`, `async`, `half_async`, `geo`, `dc_asgd` or `fl`
    staleness: int = 0  # the staleness bound in steps
    merge: int = 1  # the most gradients in one message
    k_steps: int = 1  # steps between exchanges, if trainers update
    compensation: float = 1.0  # the factor of the correction of late gradients
    by_rows: bool = False  # an average is weighted by rows instead of trainers

    def __post_init__(self) -> None:
        if self.communication not in _DISTRIBUTED_MODES:
            what = f"insert_send_recv: mode is '{self.communication}'"
            raise PassError(what, hint=f"choose one of {', '.join(_DISTRIBUTED_MODES)}")

    @property
    def is_sync(self) -> bool:
        """Whether all wait for each other at every step."""
        return self.communication == "sync"

    @property
    def updates_on_trainers(self) -> bool:
        return self.communication in {"geo", "fl"}

    @property
    def distributed_mode(self) -> int:
        """Fluid's number of the mode, for `listen_and_serv`: 0 if servers wait for all trainers."""
        return _DISTRIBUTED_MODES[self.communication]

    def facts(self) -> dict[str, Attr]:
        """Returns the attributes of a program; none for `sync`."""
        if self.is_sync:
            return {}
        found: dict[str, Attr] = {"communication": self.communication}
        if self.communication != "fl":
            found["staleness"] = self.staleness
        if self.merge > 1 and self.communication in {"async", "half_async"}:
            found["merge"] = self.merge
        if self.updates_on_trainers:
            found["k_steps"] = self.k_steps
        if self.communication == "dc_asgd":
            found["compensation"] = self.compensation
        return found


Mark = Callable[[Operator], Operator]


@dataclass(frozen=True)
class PServerJob:
    """The facts that all programs of a job share."""

    trainers: int
    endpoints: tuple[str, ...]  # of the servers, in order
    slices: tuple[Slice, ...]  # of all parameters
    placement: Mapping[str, str]  # the endpoint of each slice, by its name
    # the gradients of which every trainer has a summand; trainer 0 has all of the others
    summed: frozenset[str]
    # by parameter, the other values that servers make for trainers; under "", values made of
    # several parameters
    exports: Mapping[str, tuple[str, ...]]
    mode: CommunicationMode = field(default_factory=CommunicationMode)

    def of(self, param: str) -> tuple[Slice, ...]:
        return tuple(cut for cut in self.slices if cut.param == param)

    def held_by(self, endpoint: str) -> list[Slice]:
        return [cut for cut in self.slices if self.placement[cut.name] == endpoint]

    def endpoints_of(self, cuts: Iterable[Slice]) -> tuple[str, ...]:
        return tuple(self.placement[cut.name] for cut in cuts)

    def name(self, name: str, cut: Slice) -> str:
        """Returns the name of a parameter's leaf or gradient in a slice of it."""
        return name if cut.is_whole else block_name(name, cut.index)

    def senders(self, gradient: str) -> range:
        own = gradient in self.summed or not self.mode.is_sync
        return range(self.trainers if own else 1)

    def sharers(self) -> tuple[str, ...]:
        """Returns the servers that hold anything, and so take part in exchanges."""
        held = set(self.placement.values())
        return tuple(endpoint for endpoint in self.endpoints if endpoint in held)


_CUTS_OR_JOINS = frozenset({"assign", "concat", "split_byref"})


def exchange_op(
    op_type: str, reads: Sequence[str] = (), writes: Sequence[str] = (), **attrs: Attr
) -> Operator:
    """Returns an operator of the exchange between trainers and servers, with fluid's slots."""
    role = Role.DIST if op_type in _CUTS_OR_JOINS else Role.RPC
    read = Operands.named(X=reads) if reads else Operands()
    written = Operands.named(Out=writes) if writes else Operands()
    return Operator(op_type, read, written, Attrs(attrs), role)


def named_trainer(
    step: Program, made: Program, job: PServerJob, trainer_id: int, facts: Mapping[str, Attr]
) -> Program:
    """Returns a trainer's program with its name and its attributes, `facts` among them."""
    attrs = step.attrs.updated(role="trainer", trainers=job.trainers, **facts)
    attrs = attrs.without("slices", "placement")
    return replace(made, name=f"{step.name}.trainer{trainer_id}", attrs=attrs)


_ORDER = (Kind.DATA, Kind.PARAM, Kind.STATE, Kind.CONST)


def assembled_server(
    step: Program,
    job: PServerJob,
    endpoint: str,
    *,
    holds: Iterable[Attr],
    variables: Iterable[Variable],
    blocks: tuple[Block, ...],
    **facts: Attr,
) -> Program:
    """Returns a server's program.

    `holds` is, for each variable of a slice, its name, its leaf and its first row, -1 for a copy;
    `facts` are more attributes of the program.
    """
    number = job.endpoints.index(endpoint)
    if "tables" in step.attrs:
        facts["tables"] = step.attrs["tables"]
    attrs: dict[str, Attr] = {
        "endpoint": endpoint,
        "endpoints": job.endpoints,
        "holds": tuple(holds),
        "pserver_id": number,
        "role": "pserver",
        "slices": step.attrs.get("slices", ()),
        "trainers": job.trainers,
        **job.mode.facts(),
        **facts,
    }
    top = sorted(variables, key=lambda v: _ORDER.index(v.kind))
    name = f"{step.name}.pserver{number}"
    return Program(name, {v.name: v for v in top}, blocks, Attrs(attrs))


def listen_and_serv(
    job: PServerJob,
    endpoint: str,
    sent: Sequence[str],
    *,
    runs: Iterable[int],
    merges: Mapping[str, int],
    lr: int,
    combine: int = -1,
    parts: Iterable[int] = (),
) -> Operator:
    """Returns the operator of a server's block 0, which declares the purpose of each block.

    `sent` are the names that trainers send, `runs` the blocks that the server runs, in order, and
    `merges` names the block that merges a slice's gradient, by the gradient's name there. `lr` is
    the block of learning rates, or of other initial work, and `combine` that of operators across
    parameters, -1 for none; `parts` are the blocks that make values for other servers.
    """
    attrs: dict[str, Attr] = {
        "Fanin": job.trainers,
        "combine_block_id": combine,
        "distributed_mode": job.mode.distributed_mode,
        "endpoint": endpoint,
        "grad_to_block_id": tuple(f"{name}:{block}" for name, block in merges.items()),
        "lr_decay_block_id": lr,
        "optimize_blocks": tuple(BlockRef(index) for index in runs),
        "part_block_ids": tuple(parts),
        "pserver_id": job.endpoints.index(endpoint),
    }
    read = Operands.named(X=sent)
    return Operator("listen_and_serv", read, attrs=Attrs(attrs), role=Role.RPC)
