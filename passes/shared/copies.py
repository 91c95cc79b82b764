"""Copies of operators, including sub-blocks: every sub-block has one owner."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxfleet.ir import Attr, Attrs, Block, BlockRef, Operator, Program
from jaxfleet.ir.attributes import map_attr


@dataclass
class OperatorCopies:
    """Copies operators of a program; the copied sub-blocks are to be appended to its own."""

    program: Program
    blocks: list[Block] = field(default_factory=list)

    def of(self, op: Operator, names: Mapping[str, str], parent: int = 0) -> Operator:
        """Returns a copy of an operator in block `parent`, with variables renamed by `names`."""
        attrs = op.attrs
        if op.blocks:
            moved = {index: self._block(index, names, parent) for index in op.blocks}
            attrs = Attrs({key: _refer(value, moved) for key, value in attrs.items()})
        return replace(
            op, inputs=op.inputs.renamed(names), outputs=op.outputs.renamed(names), attrs=attrs
        )

    def _block(self, index: int, names: Mapping[str, str], parent: int) -> int:
        block = self.program.blocks[index]
        place, number = len(self.blocks), len(self.program.blocks) + len(self.blocks)
        self.blocks.append(block)
        outer = {old: new for old, new in names.items() if old not in block.variables}
        ops = tuple(self.of(op, outer, number) for op in block.ops)
        results = tuple(outer.get(x, x) if isinstance(x, str) else x for x in block.results)
        self.blocks[place] = replace(block, index=number, parent=parent, ops=ops, results=results)
        return number


def _refer(attr: Attr, moved: Mapping[int, int]) -> Attr:
    def change(item: Attr) -> Attr:
        return BlockRef(moved[item.index]) if isinstance(item, BlockRef) else item

    return map_attr(attr, change)
