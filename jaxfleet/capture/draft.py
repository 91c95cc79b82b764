"""A step that has been read from a jaxpr and is not yet a program."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxfleet.ir import Attr, Attrs, Block, BlockRef, Operand, Operator, Source, Variable
from jaxfleet.ir.values import map_attr

MARK = "jaxfleet.mark"  # the operator that stands for a marker until `finish` takes it out


@dataclass(frozen=True)
class Draft:
    """A traced step: operators in single-assignment form, by block.

    Attributes:
        blocks: block 0 is the step; it has no variables but temporaries.
        constants: by name.
        results: what the step returned, flat.
        kept_rows: where a recomputation was not kept apart, since it looks up rows of tables.
    """

    blocks: Sequence[Block]
    constants: Mapping[str, Variable]
    results: Sequence[Operand]
    kept_rows: tuple[Source, ...] = ()

    def without_dead_ops(self) -> "Draft":
        """Returns the draft without operators whose results nothing reads.

        Tracing and differentiation leave many behind. Markers stay: they are read by `finish`.
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
    """Returns the blocks that some operator still names, numbered anew."""
    places: dict[int, int] = {0: 0}
    for block in blocks:  # a block comes after the one that it lies in
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
