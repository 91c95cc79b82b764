"""Draft of a program: a step read from a jaxpr, before it is finalized."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxfleet.ir import Attr, Attrs, Block, BlockRef, Operand, Operator, Source, Variable
from jaxfleet.ir.attributes import map_attr

MARK = "jaxfleet.mark"  # operator of a marker, until `finalize` removes it


@dataclass(frozen=True)
class Draft:
    """A traced step: operators in single-assignment form, by block."""

    blocks: Sequence[Block]  # block 0 is the step; all variables are temporaries
    constants: Mapping[str, Variable]  # by name
    results: Sequence[Operand]  # of the step, flat
    # Recomputations that were inlined because they look up rows of tables
    kept_rows: tuple[Source, ...] = ()
    differentiated: frozenset[str] = frozenset()  # inputs of functions that are differentiated

    def without_dead_ops(self) -> "Draft":
        """Returns the draft without operators whose results are unused.

        Tracing and differentiation leave many behind. Markers stay for `finalize`.
        """
        root = _live(self.blocks[0], self.results)
        blocks = [root, *(_live(block, block.results) for block in self.blocks[1:])]
        read = {name for block in blocks for op in block.ops for name in op.reads}
        read |= {x for block in blocks for x in block.results if isinstance(x, str)}
        read |= {x for x in self.results if isinstance(x, str)}
        constants = {name: v for name, v in self.constants.items() if name in read}
        return replace(self, blocks=_reachable(blocks), constants=constants)


def _live(block: Block, results: Sequence[Operand]) -> Block:
    needed = {result for result in results if isinstance(result, str)}
    kept: list[Operator] = []
    for op in reversed(block.ops):
        if op.type == MARK or needed.intersection(op.writes):
            needed.update(op.reads)
            kept.append(op)
    return block.with_ops(reversed(kept)).without_unused()


def _reachable(blocks: Sequence[Block]) -> list[Block]:
    places: dict[int, int] = {0: 0}
    for block in blocks:  # a block comes after the enclosing one
        if block.index in places:
            for op in block.ops:
                for index in op.blocks:
                    places[index] = 0
    kept = [block for block in blocks if block.index in places]
    places = {block.index: place for place, block in enumerate(kept)}
    places[-1] = -1
    return [_renumbered(block, places) for block in kept]


def _renumbered(block: Block, places: Mapping[int, int]) -> Block:
    def leaf(attr: Attr) -> Attr:
        return BlockRef(places[attr.index]) if isinstance(attr, BlockRef) else attr

    def renumbered(op: Operator) -> Operator:
        if not op.blocks:
            return op
        return replace(op, attrs=Attrs({k: map_attr(v, leaf) for k, v in op.attrs.items()}))

    ops = tuple(renumbered(op) for op in block.ops)
    return replace(block, index=places[block.index], parent=places[block.parent], ops=ops)
