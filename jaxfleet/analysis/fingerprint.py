"""Tells whether two programs compute the same, whatever their names, order and dead operators.

Value numbering: a value's number stands for the operator that makes it, that operator's
attributes and the numbers of what it reads. Equal numbers mean equal computations. Different
numbers may still mean equal values: no algebra is done but on scalars that are known.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from jaxfleet.analysis.scalars import fold
from jaxfleet.ir import (
    Attr,
    Attrs,
    Block,
    BlockRef,
    Dim,
    Literal,
    Operand,
    Operator,
    Program,
    Size,
    Variable,
    block_of,
)
from jaxfleet.ir.dims import substitute
from jaxfleet.ir.values import map_attr


class Numbering:
    """Numbers the values of any number of programs from one table.

    Args:
        sizes: a size for each letter that is to be replaced by one.
    """

    def __init__(self, sizes: Mapping[str, Size] | None = None) -> None:
        self.sizes = dict(sizes or {})
        self._attrs: dict[Attrs, Attrs] = {}  # with letters, and without
        self._numbers: dict[Hashable, int] = {}
        self._literals: dict[int, Literal] = {}
        self._repeated: dict[int, int] = {}  # array -> the value that it holds over and over

    def of(self, program: Program) -> dict[str, int]:
        """Returns the number of what every name holds when block 0 ends.

        What goes in is numbered by its name and type, a constant by its value.

        Args:
            program: each of its sub-blocks is a function, which sees no values around it.
        """
        given = {name: self._given(variable) for name, variable in program.variables.items()}
        return _Reader(self, program, given).read(program.root, [], 0)

    def number(self, *key: Hashable) -> int:
        """Returns the number of what makes a value."""
        return self._numbers.setdefault(key, len(self._numbers))

    def literal(self, literal: Literal) -> int:
        """Returns the number of a scalar that is known."""
        number = self.number(literal)
        self._literals[number] = literal
        return number

    def known(self, numbers: Sequence[int]) -> list[Literal] | None:
        """Returns the scalars that have these numbers, or None where one is not known."""
        known = [self._literals[number] for number in numbers if number in self._literals]
        return known if len(known) == len(numbers) else None

    def repeat(self, number: int, length: Size) -> int:
        """Returns the number of an array that holds one value over and over."""
        array = self.number("repeat", number, length)
        self._repeated[array] = number
        return array

    def row(self, array: int, depth: int) -> int:
        """Returns the number of the row of an array that a loop has reached."""
        return self._repeated.get(array, self.number("row", depth, array))

    def shape(self, variable: Variable) -> tuple[Size, ...]:
        """Returns a variable's shape with letters replaced."""
        return tuple(substitute(size, self.sizes) for size in variable.shape)

    def attrs(self, attrs: Attrs) -> Attrs:
        """Returns attributes with letters replaced, and all references to blocks alike."""
        if attrs not in self._attrs:
            replaced = {key: map_attr(value, self._leaf) for key, value in attrs.items()}
            self._attrs[attrs] = Attrs(replaced)
        return self._attrs[attrs]

    def _given(self, variable: Variable) -> int:
        what = variable.constant.digest if variable.constant else variable.name
        return self.number("given", what, variable.dtype, self.shape(variable))

    def _leaf(self, attr: Attr) -> Attr:
        if isinstance(attr, Dim):
            return substitute(attr, self.sizes)
        return BlockRef(0) if isinstance(attr, BlockRef) else attr


class _Reader:
    """Numbers the values of one program."""

    def __init__(self, table: Numbering, program: Program, given: Mapping[str, int]) -> None:
        self.table = table
        self.program = program
        self.given = given

    def read(self, block: Block, args: Sequence[int], depth: int) -> dict[str, int]:
        """Returns the number of every name in a block, given those of its arguments."""
        held = {**self.given, **dict(zip(block.args, args, strict=True))}
        for op in block.ops:
            numbers = self._op(op, [self._operand(held, x) for x in op.inputs], depth)
            held.update(zip(op.writes, numbers, strict=True))
        return held

    def _op(self, op: Operator, inputs: list[int], depth: int) -> list[int]:
        """Returns the numbers of an operator's outputs.

        Args:
            op: the operator.
            inputs: the numbers of what it reads.
            depth: how many loops it is in.
        """
        match op.type:
            case "jax.remat2":
                return self._results(op.attrs["body"], inputs, depth)
            case "jax.cond":
                return self._cond(op, inputs, depth)
            case "jax.scan":
                return self._scan(op, inputs, depth)
        attrs = self.table.attrs(op.attrs)
        known = self.table.known(inputs)
        if known is not None and (folded := fold(op.type, known, attrs)) is not None:
            return [self.table.literal(folded)]
        blocks = tuple(self._function(ref, depth) for ref in op.attrs.block_refs)
        slots = tuple((slot, len(items)) for slot, items in op.inputs.slots)
        made = self.table.number(op.type, attrs, blocks, slots, tuple(inputs))
        if len(op.outputs) == 1:
            return [made]
        return [self.table.number(made, place) for place in range(len(op.outputs))]

    def _cond(self, op: Operator, inputs: list[int], depth: int) -> list[int]:
        refs: Any = op.attrs["branches"]
        branches = [self._results(ref, inputs[1:], depth) for ref in refs]
        return [
            case[0] if len(set(case)) == 1 else self.table.number("cond", inputs[0], *case)
            for case in zip(*branches, strict=True)
        ]

    def _scan(self, op: Operator, inputs: list[int], depth: int) -> list[int]:
        """Numbers a scan: a value that stays the same in all its rounds is not made by it."""
        num_consts: Any = op.attrs["num_consts"]
        num_carry: Any = op.attrs["num_carry"]
        consts, rest = inputs[:num_consts], inputs[num_consts:]
        init, arrays = rest[:num_carry], rest[num_carry:]
        carry = [self.table.number("carry", depth, place) for place in range(num_carry)]
        rows = [self.table.row(array, depth) for array in arrays]
        results = self._results(op.attrs["body"], [*consts, *carry, *rows], depth + 1)
        length, reverse = self.table.attrs(op.attrs)["length"], op.attrs["reverse"]
        assert isinstance(length, Size)
        steps = tuple(zip(init, results[:num_carry], strict=True))
        loop = self.table.number("scan", length, reverse, steps)
        outputs = [self.table.number(loop, place) for place in range(num_carry)]
        for result in results[num_carry:]:
            same = result in consts or self.table.known([result]) is not None
            row = self.table.number(loop, "row", result)
            outputs.append(self.table.repeat(result, length) if same else row)
        return outputs

    def _results(self, ref: Attr, args: Sequence[int], depth: int) -> list[int]:
        block = block_of(self.program, ref)
        held = self.read(block, args, depth)
        return [self._operand(held, result) for result in block.results]

    def _function(self, ref: BlockRef, depth: int) -> int:
        """Returns the number of a block as a function of arguments that are not known."""
        block = block_of(self.program, ref)
        types = [block.variables[name] for name in block.args]
        keys = [("arg", depth, i, v.dtype, self.table.shape(v)) for i, v in enumerate(types)]
        args = [self.table.number(*key) for key in keys]
        return self.table.number(*keys, *self._results(ref, args, depth + 1))

    def _operand(self, held: Mapping[str, int], operand: Operand) -> int:
        return self.table.literal(operand) if isinstance(operand, Literal) else held[operand]
