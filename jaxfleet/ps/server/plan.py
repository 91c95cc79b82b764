"""What a server's program comes to: its blocks, what each waits for, and what it makes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from jaxfleet.ir import Kind, Program, Variable, trainer_name
from jaxfleet.lower import HostType, LoweredBlock, host_type
from jaxfleet.ps.messages import Tensor
from jaxfleet.ps.row_gradients import RowTensor
from jaxfleet.ps.server.row_blocks import RowBlock
from jaxfleet.tables import TableSpec
from jaxfleet.tables.buckets import buckets_of


@dataclass(frozen=True)
class Merge:
    """A gradient that trainers send and the server adds up, or takes alone.

    Attributes:
        name: as trainers send it.
        senders: the trainers that send it; those that have a summand, in the order of addition.
        type: what each sends.
        is_alone: what one trainer sends is not added to what others send.
    """

    name: str
    senders: tuple[int, ...]
    type: HostType
    is_alone: bool = False

    def summand(self, trainer: int) -> str:
        """Returns the variable that holds what a trainer sends."""
        return self.name if self.is_alone else trainer_name(self.name, trainer)

    @cached_property
    def summands(self) -> tuple[str, ...]:
        """All of them."""
        return (self.name,) if self.is_alone else tuple(map(self.summand, self.senders))


@dataclass(frozen=True)
class Exchange:
    """What crosses from server to server within a step.

    Attributes:
        here: the variables that this server has for the others.
        there: the variables that come, with the number of the server that sends each.
        others: the numbers of the servers that take part, but for this one.
    """

    here: tuple[str, ...]
    there: Mapping[str, int]
    others: tuple[int, ...]


@dataclass(frozen=True)
class BlockPlan:
    """One block of the program.

    Attributes:
        index: the block's.
        merges: the gradients that it merges.
        after: the blocks that must have run in the same step.
        lowered: what runs then.
        exchanges: it begins with what other servers send.
        backups: the variables that hold what a parameter was when the trainer received it whose
            gradients the block takes, with the parameter.
        rows: the same for some rows, where others stay what they are.
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
        """The variables that hold something only while the block runs."""
        return (*(name for merge in self.merges for name in merge.summands), *self.backups)


@dataclass(frozen=True)
class ServerPlan:
    """A server's program, ready to run.

    Attributes:
        program: as it was sent.
        server: the server's number.
        endpoints: of all servers, in order.
        trainers: how many there are.
        blocks: in the order they run in.
        exchange: what crosses from server to server, if anything does.
        known: all variables that outlive a block or that several blocks know.
        tables: those that have rows here.
        waits: a step waits for the gradients of all trainers; else each trainer's own are applied
            as they come.
        staleness: how many steps values may be behind who asks for them; -1 for any number.
        compensation: how much late gradients of rows are corrected; those of parameters, blocks
            correct themselves.
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
        """The parameters of which it is kept what each trainer received."""
        return frozenset(name for block in self.blocks for name in block.backups.values())

    @cached_property
    def types(self) -> Mapping[str, HostType]:
        """What the variables are on the host."""
        return {name: host_type(variable) for name, variable in self.known.items()}

    @cached_property
    def state(self) -> Mapping[str, Variable]:
        """The variables that live across steps."""
        return {v.name: v for v in self.program.of_kind(Kind.PARAM, Kind.STATE)}

    @property
    def buckets(self) -> range:
        """The buckets of its tables that are here."""
        return buckets_of(self.server, len(self.endpoints))

    @property
    def share(self) -> float:
        """The part of its tables' buckets that is here, of all."""
        return 1.0 / len(self.endpoints)

    @cached_property
    def merges(self) -> Mapping[str, Merge]:
        """All gradients, by name."""
        return {merge.name: merge for block in self.blocks for merge in block.merges}

    def misfit(self, trainer: int, tensors: Iterable[Tensor]) -> str | None:
        """Says why gradients are none of this program's, if they are not."""
        for tensor in tensors:
            merge = self.merges.get(tensor.name)
            if merge is None:
                return f"there is no gradient '{tensor.name}' here"
            if trainer not in merge.senders:
                return f"'{tensor.name}' does not come from trainer {trainer}"
            wanted = merge.type
            if isinstance(tensor, RowTensor):
                continue  # it was found to fit when it was taken apart
            if tensor.array.dtype != wanted.dtype or tensor.array.shape != wanted.shape:
                found = f"{tensor.array.dtype}{list(tensor.array.shape)}"
                return f"'{tensor.name}' is {found}, not {wanted.dtype}{list(wanted.shape)}"
        return None

    @cached_property
    def by_rows(self) -> frozenset[str]:
        """The gradients that blocks take as rows."""
        blocks = [block for block in self.blocks if block.rows is not None]
        return frozenset(merge.name for block in blocks for merge in block.merges)

    @cached_property
    def makers_of_merges(self) -> Mapping[str, int]:
        """The block that merges each gradient."""
        return {merge.name: block.index for block in self.blocks for merge in block.merges}

    @cached_property
    def by_index(self) -> Mapping[int, BlockPlan]:
        """The blocks by their indices."""
        return {block.index: block for block in self.blocks}

    @cached_property
    def makers(self) -> Mapping[str, int]:
        """The last block that changes each variable."""
        return {name: block.index for block in self.blocks for name in block.lowered.writes}

    @cached_property
    def donated(self) -> frozenset[str]:
        """The variables whose memory the next step takes."""
        return frozenset(name for block in self.blocks for name in block.lowered.donated)
