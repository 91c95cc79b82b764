"""What operators use and do beyond their own operands: in sub-blocks, and to the world."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operator, Program
from jaxfleet.ops import find_op


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


class Effects:
    """Knows which operator types do something besides writing their outputs.

    A type that is not registered is taken to: nothing is known of it.
    """

    def __init__(self) -> None:
        self._collective: dict[str, bool] = {}
        self._effect: dict[str, bool] = {}

    def has_effect(self, op: Operator) -> bool:
        """Tells whether the operator acts on the world, collectives left aside."""
        self._learn(op.type)
        return self._effect[op.type]

    def is_collective(self, op: Operator) -> bool:
        """Tells whether all devices must run the operator together."""
        self._learn(op.type)
        return self._collective[op.type]

    def _learn(self, op_type: str) -> None:
        if op_type in self._effect:
            return
        try:
            found = find_op(op_type)
        except ProgramError:
            self._effect[op_type], self._collective[op_type] = True, False
        else:
            self._effect[op_type] = found.has_effect
            self._collective[op_type] = found.is_collective
