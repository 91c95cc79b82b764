"""The execution plan of a server's program: its blocks, their dependencies, and their results.

A block may also run on some rows of a slice (`RowBlock`), without reading or copying the rest.
Trainers send the rows of a sparse table that a batch looked up. An update that leaves a row
unchanged where its gradient is zero (`sgd`, `adagrad`, lazy `adam`) does not need the other rows:
the block is rewritten for a number of rows, `u`, which are taken, updated by the block's own
operators and put back::

    rows = take_rows(w, numbers)      numbers: i32[u]; a number outside w selects no row
    ... the block, with f32[u,dim] for w, for its state and for its gradients
    w = put_rows(w, rows, numbers)    in w's own memory

The result equals, bit for bit, that of the whole block with zeros for all other rows. `u` is a
power of two, so that few variants are compiled.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from jaxfleet.ir import (
    Attrs,
    Block,
    Kind,
    Operands,
    Operator,
    Program,
    Variable,
    trainer_name,
)
from jaxfleet.lower import ExecutableCache, HostType, LoweredBlock, host_type, lower_block
from jaxfleet.ops.fluid import LAZY_ROWS
from jaxfleet.ps.gradient_encoding import RowGradient, RowTensor
from jaxfleet.tables import TableSpec
from jaxfleet.tables.buckets import buckets_of
from jaxfleet.transport.messages import Tensor

SentGradients = Mapping[str, "np.ndarray | RowGradient"]

NUMBERS = "@NUMBERS"  # of the rows; not a valid name of a user's variable
_OF = "@OF"  # suffix of the variable with some rows of another
_LEAST = 8  # minimum number of rows that a block is compiled for
_LEAVES_THE_REST = frozenset({"adagrad", "scale", "sgd", "sum"})


@dataclass(frozen=True)
class Merge:
    """A gradient that trainers send, and that the server sums or applies separately.

    Attributes:
        senders: in the order of summation.
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
class RowBlock:
    """A block that can run on some rows.

    Attributes:
        program: the program from which the whole block is lowered.
        state: persistent variables with rows: the parameter and its moments.
    """

    program: Program
    index: int
    state: tuple[str, ...]
    height: int
    cache: ExecutableCache
    _lowered: dict[int, LoweredBlock] = field(default_factory=dict)

    def lowered(self, count: int) -> LoweredBlock:
        if count not in self._lowered:
            made, donate = self._written_for(count), frozenset(self.state)
            self._lowered[count] = lower_block(made, self.index, donate=donate, cache=self.cache)
        return self._lowered[count]

    def joined(self, sent: SentGradients) -> tuple[LoweredBlock, dict[str, np.ndarray]] | None:
        """Returns the block and its inputs for sparse gradients; None if some are dense.

        Each gradient is extended to the union of rows, with zeros for those it lacks, so that the
        sums equal those of dense gradients.
        """
        given = {name: x for name, x in sent.items() if isinstance(x, RowGradient)}
        if not given or len(given) < len(sent):
            return None
        numbers = np.unique(np.concatenate([x.numbers for x in given.values()]))
        count = max(_LEAST, 1 << max(len(numbers) - 1, 0).bit_length())
        padded = np.full(count, self.height, np.int32)
        padded[: len(numbers)] = numbers
        found = {NUMBERS: padded}
        for name, x in given.items():
            rows = np.zeros((count, *x.rows.shape[1:]), x.rows.dtype)
            rows[np.searchsorted(numbers, x.numbers)] = x.rows
            found[name] = rows
        return self.lowered(count), found

    def _written_for(self, count: int) -> Program:
        program, block = self.program, self.program.blocks[self.index]
        shape = program.variables[self.state[0]].shape
        parts = {name: name + _OF for name in self.state}

        def resized(variables: Mapping[str, Variable]) -> dict[str, Variable]:
            return {
                name: replace(v, shape=(count, *shape[1:]))
                if v.shape == shape and name not in parts
                else v
                for name, v in variables.items()
            }

        own = resized(block.variables)
        for name, part in parts.items():
            like = program.variables[name]
            own[part] = replace(like, name=part, shape=(count, *shape[1:]), kind=Kind.TEMP)
        top = resized(program.variables)
        top[NUMBERS] = Variable(NUMBERS, "i32", (count,), Kind.DATA)
        root = replace(program.blocks[0], variables=resized(program.blocks[0].variables))
        made = replace(block, ops=tuple(self._ops(block, parts)), variables=own)
        blocks = [root, *program.blocks[1:]]
        blocks[self.index] = made
        return replace(program, variables=top, blocks=tuple(blocks))

    def _ops(self, block: Block, parts: Mapping[str, str]) -> Iterator[Operator]:
        written = {name for op in block.ops for name in op.writes}
        for name, part in parts.items():
            yield _operator("take_rows", (name, NUMBERS), part)
        for op in block.ops:
            yield replace(op, inputs=op.inputs.renamed(parts), outputs=op.outputs.renamed(parts))
        for name, part in parts.items():
            if name in written:
                yield _operator("put_rows", (name, part, NUMBERS), name)


def row_block(
    program: Program, index: int, sparse: Collection[str], cache: ExecutableCache
) -> RowBlock | None:
    """Returns a block that runs on some rows; None if its update needs all rows."""
    block = program.blocks[index]
    named = dict.fromkeys(name for op in block.ops for name in (*op.reads, *op.writes))
    if not any(name in sparse for name in named) or any(
        not _leaves_the_rest(op) for op in block.ops
    ):
        return None
    declared = {name: program.lookup(name, block) for name in named}
    params = [v for v in declared.values() if v.kind is Kind.PARAM]
    if len(params) != 1 or len(params[0].shape) < 2 or not isinstance(params[0].shape[0], int):
        return None
    alike = [v for v in declared.values() if v.shape == params[0].shape]
    state = tuple(v.name for v in alike if v.kind is Kind.STATE)
    return RowBlock(program, index, (params[0].name, *state), params[0].shape[0], cache)


def _leaves_the_rest(op: Operator) -> bool:
    """Whether an operator leaves rows with a zero gradient unchanged."""
    if op.type == "adam":
        return bool(op.attrs.get(LAZY_ROWS))
    return op.type in _LEAVES_THE_REST and not (op.type == "scale" and op.attrs.get("bias"))


def _operator(op_type: str, read: tuple[str, ...], written: str) -> Operator:
    return Operator(op_type, Operands.of(*read), Operands.of(written), Attrs({}))


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

    def unlike(self, other: "ServerPlan") -> str | None:
        """Returns in what the program differs from one for another number of trainers, if so."""
        mine, theirs = ({n: held.types[n] for n in held.state} for held in (self, other))
        writes, others = (
            {block.index: block.lowered.writes for block in held.blocks} for held in (self, other)
        )
        if mine != theirs:
            names = ", ".join(sorted(mine.keys() ^ theirs.keys())) or "types of variables"
            return f"'{self.program.name}' for {self.trainers} trainers has another state: {names}"
        if writes != others:
            return f"'{self.program.name}' for {self.trainers} trainers has other blocks"
        if self.tables != other.tables:
            return f"'{self.program.name}' for {self.trainers} trainers has other tables"
        if self.waits != other.waits:
            return f"'{self.program.name}' for {self.trainers} trainers waits for them otherwise"
        return None

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
