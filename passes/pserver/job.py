"""The facts that all programs of a pserver job share: mode, placement, `listen_and_serv`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.analysis.placement.sliced_layout import Slice
from jaxfleet.errors import PassError
from jaxfleet.ir import Attr, Attrs, BlockRef, Operands, Operator, Program, Role, block_name

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


def server_attrs(
    step: Program, job: PServerJob, endpoint: str, holds: Iterable[Attr]
) -> dict[str, Attr]:
    """Returns the attributes of a server's program.

    `holds` is, for each variable of a slice, its name, its leaf and its first row, -1 for a copy.
    """
    facts: dict[str, Attr] = {
        "endpoint": endpoint,
        "endpoints": job.endpoints,
        "holds": tuple(holds),
        "pserver_id": job.endpoints.index(endpoint),
        "role": "pserver",
        "slices": step.attrs.get("slices", ()),
        "trainers": job.trainers,
        **job.mode.facts(),
    }
    if "tables" in step.attrs:
        facts["tables"] = step.attrs["tables"]
    return facts


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

    Args:
        job: the shared facts.
        endpoint: the server's.
        sent: the names that trainers send.
        runs: the indices of the blocks that it runs, in order.
        merges: the block that merges a slice's gradient, by the gradient's name there.
        lr: the block of learning rates, or of other initial work; -1 for none.
        combine: the block of operators across parameters; -1 for none.
        parts: the blocks that make values for other servers.
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
