"""Sparse updates: blocks that update some rows of a slice, without reading or copying the rest.

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

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from jaxfleet.ir import Attrs, Block, Kind, Operands, Operator, Program, Variable
from jaxfleet.lower import ExecutableCache, LoweredBlock, lower_block
from jaxfleet.ops.fluid import LAZY_ROWS
from jaxfleet.ps.gradient_encoding import RowGradient

SentGradients = Mapping[str, "np.ndarray | RowGradient"]

NUMBERS = "@NUMBERS"  # of the rows; not a valid name of a user's variable
_OF = "@OF"  # suffix of the variable with some rows of another
_LEAST = 8  # minimum number of rows that a block is compiled for
_LEAVES_THE_REST = frozenset({"adagrad", "scale", "sgd", "sum"})


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
