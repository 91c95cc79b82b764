"""Dependencies through sub-blocks: the operands that each result of an operator depends on.

`optax.MultiSteps` is one `cond` over all parameters, and each of its results depends on few of its
operands. For other operators with sub-blocks (loops, recomputation) every result is assumed to
depend on every operand.
"""

from collections.abc import Iterable, Iterator

from jaxfleet.ir import Block, Kind, Operator, Program

COND = "jax.cond"


class SubblockDeps:
    """Dependencies of the results of a program's operators; bits stand for operands."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._of_blocks: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._makers: dict[int, dict[str, tuple[int, int]] | None] = {}
        self._outer: dict[int, tuple[set[str], set[str]]] = {}
        for block in reversed(program.blocks[1:]):  # a sub-block comes after the block that runs it
            self._outer[block.index] = self._uses(block)

    def reads(self, op: Operator) -> tuple[int, ...]:
        """Returns, for each output, the operands that it depends on, as bits."""
        if not self.can_narrow(op):
            return ((1 << len(op.inputs)) - 1,) * len(op.writes)
        if op.blocks not in self._of_blocks:
            branches = [self.results(self.program.blocks[index]) for index in op.blocks]
            masks = [union(found) for found in zip(*branches, strict=True)]
            self._of_blocks[op.blocks] = tuple(mask << 1 | 1 for mask in masks)
        return self._of_blocks[op.blocks]

    def can_narrow(self, op: Operator) -> bool:
        """Whether an operator can be copied for some of its results alone."""
        if op.type != COND or self.outer_reads(op) or self.outer_writes(op):
            return False
        return all(self.makers(index) is not None for index in op.blocks)

    def makers(self, index: int) -> dict[str, tuple[int, int]] | None:
        """Returns the operator and the output that make each variable of a block.

        None for a block that writes a variable twice: nothing can be extracted from it.
        """
        if index not in self._makers:
            block = self.program.blocks[index]
            found: dict[str, tuple[int, int]] = {}
            for place, op in enumerate(block.ops):
                found.update({name: (place, output) for output, name in enumerate(op.writes)})
            is_once = len(found) == sum(len(op.writes) for op in block.ops)
            can = is_once and found.keys().isdisjoint(block.args)
            self._makers[index] = found if can else None
        return self._makers[index]

    def results(self, block: Block) -> list[int]:
        """Returns, for each result of a block, the arguments that it depends on, as bits."""
        masks = {name: 1 << place for place, name in enumerate(block.args)}
        self.spread(block, masks)
        return [masks.get(result, 0) if isinstance(result, str) else 0 for result in block.results]

    def spread(self, block: Block, masks: dict[str, int]) -> None:
        """Adds the dependencies of every variable of a block, given the masks of its arguments."""
        for op in block.ops:
            inputs = [masks.get(x, 0) if isinstance(x, str) else 0 for x in op.inputs]
            for name, bits in zip(op.writes, self.reads(op), strict=True):
                masks[name] = union(inputs[place] for place in set_bits(bits))

    def outer_reads(self, op: Operator) -> list[str]:
        """Returns the variables around them that an operator's sub-blocks read."""
        return sorted(set().union(*(self._outer[index][0] for index in op.blocks)))

    def outer_writes(self, op: Operator) -> list[str]:
        """Returns the variables around them that an operator's sub-blocks write."""
        return sorted(set().union(*(self._outer[index][1] for index in op.blocks)))

    def _uses(self, block: Block) -> tuple[set[str], set[str]]:
        reads = {result for result in block.results if isinstance(result, str)}
        writes = set[str]()
        for op in block.ops:
            reads.update(op.reads, *(self._outer[index][0] for index in op.blocks))
            writes.update(op.writes, *(self._outer[index][1] for index in op.blocks))
        own = block.variables.keys()
        return {name for name in reads - own if not self._is_const(name)}, writes - own

    def _is_const(self, name: str) -> bool:
        variable = self.program.variables.get(name)
        return variable is not None and variable.kind is Kind.CONST


def set_bits(mask: int) -> Iterator[int]:
    """Yields the positions of a mask's bits, the lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def union(masks: Iterable[int]) -> int:
    """Returns the bit positions set in any of the masks."""
    found = 0
    for mask in masks:
        found |= mask
    return found
