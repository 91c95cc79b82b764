"""Effects of operators: variables read and written, sub-blocks included, and other side effects."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operator, OpTraits, Program, ir_traits


@dataclass(frozen=True)
class Uses:
    """Names of variables that an operator, or a block, reads and writes."""

    reads: AbstractSet[str]
    writes: AbstractSet[str]


class OuterUses:
    """Variables read and written by each operator, sub-blocks included.

    A sub-block comes after the block that uses it, so one backward walk takes time linear in the
    program.
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
        return self._of_block[index]

    def of(self, op: Operator) -> Uses:
        inner = [self._of_block[index] for index in op.blocks]
        if not inner:
            return Uses(frozenset(op.reads), frozenset(op.writes))
        return Uses(
            set(op.reads).union(*(uses.reads for uses in inner)),
            set(op.writes).union(*(uses.writes for uses in inner)),
        )


class Effects:
    """Operator types with effects besides their outputs.

    An unregistered type is assumed to have one, unless it is a primitive of jax.
    """

    def __init__(self) -> None:
        self._known: dict[str, OpTraits] = {}

    def has_effect(self, op: Operator) -> bool:
        """Whether the operator has an effect other than a collective."""
        return self._traits(op.type).has_effect

    def is_collective(self, op: Operator) -> bool:
        """Whether all devices must run the operator together."""
        return self._traits(op.type).is_collective

    def runs_once(self, op: Operator) -> bool:
        """Whether the operator has an effect or is a collective: no pass may drop or repeat it."""
        traits = self._traits(op.type)
        return traits.has_effect or traits.is_collective

    def _traits(self, op_type: str) -> OpTraits:
        if op_type not in self._known:
            self._known[op_type] = ir_traits(op_type) or _registered_traits(op_type)
        return self._known[op_type]


def _registered_traits(op_type: str) -> OpTraits:
    from jaxfleet.ops import find_op  # noqa: PLC0415  # imports JAX, which the IR's own do not need

    try:
        return find_op(op_type).traits
    except ProgramError:
        return OpTraits(has_effect=True)
