"""The execution plan of a server's program: its blocks, their dependencies, and their results."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from jaxfleet.ir import Kind, Program, Variable, trainer_name
from jaxfleet.lower import HostType, LoweredBlock, host_type
from jaxfleet.ps.gradient_encoding import RowTensor
from jaxfleet.ps.server.sparse_update import RowBlock
from jaxfleet.tables import TableSpec
from jaxfleet.tables.buckets import buckets_of
from jaxfleet.transport.messages import Tensor


@dataclass(frozen=True)
class Merge:
    """A gradient that trainers send, and that the server sums or applies separately.

    Attributes:
        name: as trainers send it.
        senders: the trainers that send it, in the order of summation.
        type: type of each summand.
        is_alone: each trainer's gradient is applied separately.
    """

    name: str
    senders: tuple[int, ...]
    type: HostType
    is_alone: bool = False

    def summand(self, trainer: int) -> str:
        """Returns the variable that holds a trainer's gradient."""
        return self.name if self.is_alone else trainer_name(self.name, trainer)

    @cached_property
    def summands(self) -> tuple[str, ...]:
        return (self.name,) if self.is_alone else tuple(map(self.summand, self.senders))


@dataclass(frozen=True)
class Exchange:
    """Partial sums exchanged between servers within a step.

    Attributes:
        here: the variables that this server sends.
        there: the variables it receives, with the number of the sending server.
        others: numbers of the other participating servers.
    """

    here: tuple[str, ...]
    there: Mapping[str, int]
    others: tuple[int, ...]


@dataclass(frozen=True)
class BlockPlan:
    """One block of the program.

    Attributes:
        after: the blocks that must have run before it in the same step.
        exchanges: it begins with partial sums of other servers.
        backups: variables that hold a parameter as received by the gradient's sender, with the
            parameter.
        rows: the same block for some rows, if the others do not change.
    """

    index: int
    merges: tuple[Merge, ...]
    after: frozenset[int]
    lowered: LoweredBlock
    exchanges: bool
    backups: Mapping[str, str] = field(default_factory=dict)
    rows: RowBlock | None = None

    @cached_property
    def passing(self) -> tuple[str, ...]:
        """The variables that have a value only while the block runs."""
        return (*(name for merge in self.merges for name in merge.summands), *self.backups)


@dataclass(frozen=True)
class ServerPlan:
    """A server's program, ready to run.

    Attributes:
        program: the program as sent.
        endpoints: endpoints of all servers, in order.
        blocks: in execution order.
        known: all variables that outlive a block or are shared by blocks.
        waits: a step waits for the gradients of all trainers; otherwise each trainer's are applied
            on arrival.
        staleness: maximum age in steps of requested values; -1 for any.
        compensation: delay compensation factor for rows; blocks correct gradients of parameters.
    """

    program: Program
    server: int
    endpoints: tuple[str, ...]
    trainers: int
    blocks: tuple[BlockPlan, ...]
    exchange: Exchange | None
    known: Mapping[str, Variable]
    tables: tuple[TableSpec, ...] = ()
    waits: bool = True
    staleness: int = -1
    compensation: float = 0.0

    @cached_property
    def backed_up(self) -> frozenset[str]:
        """The parameters whose values received by each trainer are kept."""
        return frozenset(name for block in self.blocks for name in block.backups.values())

    @cached_property
    def types(self) -> Mapping[str, HostType]:
        return {name: host_type(variable) for name, variable in self.known.items()}

    @cached_property
    def state(self) -> Mapping[str, Variable]:
        return {v.name: v for v in self.program.of_kind(Kind.PARAM, Kind.STATE)}

    @cached_property
    def state_bytes(self) -> int:
        types = [self.types[name] for name in self.state]
        return sum(math.prod(found.shape) * found.dtype.itemsize for found in types)

    @property
    def buckets(self) -> range:
        return buckets_of(self.server, len(self.endpoints))

    @property
    def share(self) -> float:
        """The fraction of all buckets on this server."""
        return 1.0 / len(self.endpoints)

    @cached_property
    def merges(self) -> Mapping[str, Merge]:
        return {merge.name: merge for block in self.blocks for merge in block.merges}

    def misfit(self, trainer: int, tensors: Iterable[Tensor]) -> str | None:
        """Returns the reason that gradients do not fit this program, if so."""
        for tensor in tensors:
            merge = self.merges.get(tensor.name)
            if merge is None:
                return f"there is no gradient '{tensor.name}' here"
            if trainer not in merge.senders:
                return f"'{tensor.name}' does not come from trainer {trainer}"
            wanted = merge.type
            if isinstance(tensor, RowTensor):
                continue  # already validated
            if tensor.array.dtype != wanted.dtype or tensor.array.shape != wanted.shape:
                found = f"{tensor.array.dtype}{list(tensor.array.shape)}"
                return f"'{tensor.name}' is {found}, not {wanted.dtype}{list(wanted.shape)}"
        return None

    @cached_property
    def by_rows(self) -> frozenset[str]:
        """The gradients that blocks accept as rows."""
        blocks = [block for block in self.blocks if block.rows is not None]
        return frozenset(merge.name for block in blocks for merge in block.merges)

    @cached_property
    def makers_of_merges(self) -> Mapping[str, int]:
        return {merge.name: block.index for block in self.blocks for merge in block.merges}

    @cached_property
    def by_index(self) -> Mapping[int, BlockPlan]:
        return {block.index: block for block in self.blocks}

    @cached_property
    def makers(self) -> Mapping[str, int]:
        """The last block that changes each variable."""
        return {name: block.index for block in self.blocks for name in block.lowered.writes}

    @cached_property
    def donated(self) -> frozenset[str]:
        """The variables whose memory the next step reuses."""
        return frozenset(name for block in self.blocks for name in block.lowered.donated)
