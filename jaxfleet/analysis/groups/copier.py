"""Copies operators with their sub-blocks, a `cond` narrowed to some of its results."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxfleet.analysis.groups.inner import Inner, places_of, union
from jaxfleet.ir import Attr, Attrs, Block, BlockRef, Operand, Operands, Operator
from jaxfleet.ir.values import map_attr


@dataclass
class Copier:
    """Copies operators into a new program, with their sub-blocks, narrowed where that is asked.

    Attributes:
        inner: of the program that is copied from.
        blocks: of the new program; block 0 is the caller's to fill.
    """

    inner: Inner
    blocks: list[Block]

    def copy(self, op: Operator, outputs: Collection[int] | None = None) -> Operator:
        """Returns an operator of block 0 whose sub-blocks are among `blocks`.

        Args:
            op: the operator, in the program that is copied from.
            outputs: the outputs of a `cond` to keep; all, unless given.
        """
        return self._copy(op, 0, outputs)

    def _copy(self, op: Operator, parent: int, outputs: Collection[int] | None) -> Operator:
        if not op.blocks:
            return op
        if outputs is not None and len(outputs) < len(op.writes) and self.inner.can_narrow(op):
            return self._narrowed(op, parent, sorted(outputs))
        numbers = {index: self._block(index, parent) for index in op.blocks}
        return _with_blocks(op, numbers)

    def _narrowed(self, op: Operator, parent: int, outputs: Sequence[int]) -> Operator:
        masks = self.inner.reads(op)
        needed = union(masks[output] for output in outputs)
        kept = list(places_of(needed))
        args = [place - 1 for place in kept[1:]]  # the first operand chooses the branch
        numbers = {
            index: self._block(index, parent, results=outputs, args=args) for index in op.blocks
        }
        narrow = replace(
            op,
            inputs=Operands.of(*(op.inputs[place] for place in kept)),
            outputs=Operands.of(*(op.outputs[place] for place in outputs)),
        )
        return _with_blocks(narrow, numbers)

    def _block(
        self,
        index: int,
        parent: int,
        *,
        results: Sequence[int] | None = None,
        args: Sequence[int] | None = None,
    ) -> int:
        """Copies a block; of its results and arguments, those that are given."""
        block, number = self.inner.program.blocks[index], len(self.blocks)
        self.blocks.append(block)  # its number is taken before those of the blocks inside it
        ops: Iterable[tuple[Operator, set[int] | None]]
        if results is None:
            wanted, ops = block.results, ((op, None) for op in block.ops)
        else:
            wanted = tuple(block.results[place] for place in results)
            ops = _needed(block, wanted, self.inner)
        copied = replace(
            block,
            index=number,
            parent=parent,
            ops=tuple(self._copy(op, number, outputs) for op, outputs in ops),
            args=block.args if args is None else tuple(block.args[place] for place in args),
            results=wanted,
        )
        self.blocks[number] = copied if results is None else _with_used_variables(copied)
        return number


def _needed(
    block: Block, results: Iterable[Operand], inner: Inner
) -> list[tuple[Operator, set[int] | None]]:
    """Returns the operators that some results of a block need, and which of their outputs."""
    makers = inner.makers(block.index)
    assert makers is not None
    needed: dict[int, set[int]] = {}
    left = [name for name in results if isinstance(name, str)]
    while left:
        maker = makers.get(left.pop())
        if maker is None or maker[1] in needed.get(maker[0], ()):
            continue
        place, output = maker
        needed.setdefault(place, set()).add(output)
        op, mask = block.ops[place], inner.reads(block.ops[place])[output]
        operands = (op.inputs[at] for at in places_of(mask))
        left += [x for x in operands if isinstance(x, str)]
    return [(block.ops[place], needed[place]) for place in sorted(needed)]


def _with_used_variables(block: Block) -> Block:
    """Returns a block with those of its variables that it uses; there may be many more."""
    used = [*block.args, *(name for op in block.ops for name in (*op.reads, *op.writes))]
    used += [x for x in block.results if isinstance(x, str)]
    known = block.variables
    return replace(block, variables={name: known[name] for name in used if name in known})


def _with_blocks(op: Operator, numbers: Mapping[int, int]) -> Operator:
    def renumbered(attr: Attr) -> Attr:
        return BlockRef(numbers[attr.index]) if isinstance(attr, BlockRef) else attr

    attrs = {key: map_attr(value, renumbered) for key, value in op.attrs.items()}
    return replace(op, attrs=Attrs(attrs))
