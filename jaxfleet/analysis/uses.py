"""What operators use beyond their own operands: what their sub-blocks read and write."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from jaxfleet.ir import Operator, Program


@dataclass(frozen=True)
class Uses:
    """Names of variables that an operator, or a block, reads and writes."""

    reads: AbstractSet[str]
    writes: AbstractSet[str]


class OuterUses:
    """Knows what each operator reads and writes, sub-blocks included.

    A sub-block comes after the block that uses it, so going backward each is known when its
    operator is met, and the whole takes time linear in the program.
    """

    def __init__(self, program: Program) -> None:
        self._of_block: dict[int, Uses] = {}
        for block in reversed(program.blocks):
            reads, writes = set[str](), set[str]()
            for op in block.ops:
                uses = self.of(op)
                reads.update(uses.reads)
                writes.update(uses.writes)
            own = block.variables.keys()
            self._of_block[block.index] = Uses(reads - own, writes - own)

    def of_block(self, index: int) -> Uses:
        """Returns what a block uses of the variables around it."""
        return self._of_block[index]

    def of(self, op: Operator) -> Uses:
        """Returns what an operator uses of the variables around it."""
        inner = [self._of_block[index] for index in op.blocks]
        if not inner:
            return Uses(frozenset(op.reads), frozenset(op.writes))
        return Uses(
            set(op.reads).union(*(uses.reads for uses in inner)),
            set(op.writes).union(*(uses.writes for uses in inner)),
        )
