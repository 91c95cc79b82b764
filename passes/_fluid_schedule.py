"""The block of a server that makes learning rates, and the blocks within it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.ir import (
    Attr,
    Attrs,
    Block,
    BlockRef,
    Kind,
    Operands,
    Operator,
    Variable,
    trainer_name,
)
from jaxfleet.ir.names import LR_COUNTER
from jaxfleet.passes._fluid_job import FluidJob

_INDEX = 1  # of the block; block 0 is around it


@dataclass
class ScheduleBlocks:
    """Copies the operators of a schedule, with their blocks, for a server.

    Attributes:
        fluid: the job.
        blocks: the block, then those within it; the first has number 1.
        names: the variables that they name, of block 0.
        counters: how often each trainer has said that it did a step, where they say so.
    """

    fluid: FluidJob
    blocks: list[Block] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    counters: list[Variable] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._copy(self.fluid.updates.schedule, 0, ())
        if self.fluid.counts_steps:
            self._count()

    def _copy(self, ops: Sequence[Operator], parent: int, own: Sequence[Variable]) -> int:
        """Adds a block; returns its number."""
        place = len(self.blocks)
        index = place + _INDEX
        self.blocks.append(Block(index, parent))
        inner = {v.name: v for v in own}
        self._name(ops, inner)
        copied = tuple(self._with_blocks(op, index) for op in ops)
        self.blocks[place] = Block(index, parent, inner, ops=copied)
        return index

    def _name(self, ops: Sequence[Operator], inner: dict[str, Variable]) -> None:
        program = self.fluid.updates.program
        for op in ops:
            for name in (*op.reads, *op.writes):
                seen = name in inner or name in self.names
                if not seen and (name in program.variables or name in program.root.variables):
                    self.names.append(name)

    def _with_blocks(self, op: Operator, index: int) -> Operator:
        if not op.blocks:
            return op
        program, attrs = self.fluid.updates.program, dict[str, Attr](op.attrs)
        for name, value in attrs.items():
            if isinstance(value, BlockRef):
                inner = program.blocks[value.index]
                copied = self._copy(inner.ops, index, tuple(inner.variables.values()))
                attrs[name] = BlockRef(copied)
        return replace(op, attrs=Attrs(attrs))

    def _count(self) -> None:
        """Adds up what trainers say of their steps, in the place of counting."""
        like = self.fluid.updates.variable(LR_COUNTER)
        names = [trainer_name(LR_COUNTER, trainer) for trainer in range(self.fluid.job.trainers)]
        self.counters = [replace(like, name=name, kind=Kind.STATE) for name in names]
        ops = self.blocks[0].ops
        self.blocks[0] = self.blocks[0].with_ops(self._counted(ops, names))

    def _counted(self, ops: Sequence[Operator], names: Sequence[str]) -> Iterator[Operator]:
        for op in ops:
            if op.type == "increment" and LR_COUNTER in op.writes:
                read, made = Operands.named(X=names), Operands.named(Out=LR_COUNTER)
                yield Operator("sum", read, made, role=op.role, source=op.source)
            else:
                yield op
