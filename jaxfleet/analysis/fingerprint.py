"""Fingerprints: equal for programs that compute the same, up to names, order and dead operators.

Value numbering: the number of a value identifies the operator that makes it, the operator's
attributes and the numbers of its inputs. Equal numbers mean equal computations. Different numbers
may still mean equal values: the only algebra is constant folding of known scalars.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

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
from jaxfleet.ir.attributes import map_attr
from jaxfleet.ir.dims import substitute
from jaxfleet.ir.variable import numpy_dtype

_COMPARE: Mapping[str, Callable[..., Any]] = {
    "jax.eq": np.equal,
    "jax.ne": np.not_equal,
    "jax.lt": np.less,
    "jax.le": np.less_equal,
    "jax.gt": np.greater,
    "jax.ge": np.greater_equal,
}
_COMPUTE: Mapping[str, Callable[..., Any]] = {
    "jax.add": np.add,
    "jax.sub": np.subtract,
    "jax.mul": np.multiply,
    "jax.max": np.maximum,
    "jax.min": np.minimum,
    "jax.neg": np.negative,
    "jax.sqrt": np.sqrt,
    "jax.floor": np.floor,
    "jax.rem": np.fmod,
    "jax.and": np.bitwise_and,
    "jax.or": np.bitwise_or,
    "jax.not": np.bitwise_not,
}


def fold(op_type: str, inputs: Sequence[Literal], attrs: Attrs) -> Literal | None:
    """Returns the result of a scalar operator with one output on known inputs, or None.

    Letters in `attrs` are replaced already. None means that the operator is not folded here.
    """
    if op_type == "jax.dim_value":
        size, dtype = attrs["dim"], attrs["dtype"]
        return _literal(size, str(dtype)) if isinstance(size, int) else None
    if not inputs:
        return None
    values = [np.asarray(x.value, dtype=numpy_dtype(x.dtype)) for x in inputs]
    with np.errstate(all="ignore"):  # overflow happens in the step too
        return _fold(op_type, inputs, values, attrs)


def _fold(
    op_type: str, inputs: Sequence[Literal], values: Sequence[Any], attrs: Attrs
) -> Literal | None:
    dtype = inputs[0].dtype
    match op_type:
        case "jax.convert_element_type":
            return _literal(values[0], str(attrs["new_dtype"]))
        case "jax.select_n":
            return inputs[1 + int(values[0])]
        case "jax.div" if values[0].dtype.kind in "iu":
            return _literal(_divided(int(values[0]), int(values[1])), dtype) if values[1] else None
        case "jax.div":
            return _literal(values[0] / values[1], dtype)
    if op_type in _COMPARE:
        return _literal(_COMPARE[op_type](*values), "bool")
    if op_type in _COMPUTE:
        return _literal(_COMPUTE[op_type](*values), dtype)
    return None


def _divided(x: int, y: int) -> int:
    """Divides as XLA does, towards zero."""
    quotient = abs(x) // abs(y)
    return quotient if (x < 0) == (y < 0) else -quotient


def _literal(value: Any, dtype: str) -> Literal:
    return Literal.of(np.asarray(value).astype(numpy_dtype(dtype)).item(), dtype)


class Numbering:
    """Numbers the values of any number of programs from one table; `sizes` replaces letters."""

    def __init__(self, sizes: Mapping[str, Size] | None = None) -> None:
        self.sizes = dict(sizes or {})
        self._attrs: dict[Attrs, Attrs] = {}  # with letters, and without
        self._numbers: dict[Hashable, int] = {}
        self._literals: dict[int, Literal] = {}
        self._repeated: dict[int, int] = {}  # array -> the value that it repeats
        self._chosen: dict[int, tuple[int, tuple[int, ...]]] = {}  # value -> its choice and cases

    def of(self, program: Program) -> dict[str, int]:
        """Returns the number of the value of every name at the end of block 0.

        An input is numbered by its name and type, a constant by its value. Each sub-block of
        `program` is a function, which sees no values around it.
        """
        given = {name: self._given(variable) for name, variable in program.variables.items()}
        return _Reader(self, program, given).read(program.root, [], 0)

    def number(self, *key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def literal(self, literal: Literal) -> int:
        number = self.number(literal)
        self._literals[number] = literal
        return number

    def known(self, numbers: Sequence[int]) -> list[Literal] | None:
        """Returns the scalars with these numbers, or None if one is not known."""
        known = [self._literals[number] for number in numbers if number in self._literals]
        return known if len(known) == len(numbers) else None

    def repeat(self, number: int, length: Size) -> int:
        """Returns the number of an array that repeats one value."""
        array = self.number("repeat", number, length)
        self._repeated[array] = number
        return array

    def row(self, array: int, depth: int) -> int:
        """Returns the number of the current row of an array in a loop."""
        return self._repeated.get(array, self.number("row", depth, array))

    def choice(self, which: int, cases: tuple[int, ...]) -> int:
        """Returns the number of a choice among several cases by the value `which`."""
        if len(set(cases)) == 1:
            return cases[0]
        value = self.number("cond", which, *cases)
        self._chosen[value] = which, cases
        return value

    def case(self, value: int, which: int, place: int) -> int:
        """Returns the number of a value once its choice is known to be `place`."""
        chosen_by, cases = self._chosen.get(value, (None, ()))
        return cases[place] if chosen_by == which else value

    def shape(self, variable: Variable) -> tuple[Size, ...]:
        return tuple(substitute(size, self.sizes) for size in variable.shape)

    def attrs(self, attrs: Attrs) -> Attrs:
        """Returns attributes with letters replaced and all references to blocks alike."""
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
        """Returns the numbers of an operator's outputs; `inputs` are the numbers of its inputs."""
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
        """Numbers a choice.

        In a branch, the result of an earlier choice of the same index is its case. So the branches
        of a gradient depend on the residuals of their own forward branch and not on the residuals
        of all branches together, which differ from trace to trace.
        """
        refs: Any = op.attrs["branches"]
        which = self.table.number("choice", inputs[0], op.attrs.get("platforms"))
        branches = [
            self._results(ref, [self.table.case(x, which, place) for x in inputs[1:]], depth)
            for place, ref in enumerate(refs)
        ]
        return [self.table.choice(which, case) for case in zip(*branches, strict=True)]

    def _scan(self, op: Operator, inputs: list[int], depth: int) -> list[int]:
        """Numbers a scan: a value that stays the same in all iterations is not made by it."""
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
        """Returns the number of a block as a function of unknown arguments."""
        block = block_of(self.program, ref)
        types = [block.variables[name] for name in block.args]
        keys = [("arg", depth, i, v.dtype, self.table.shape(v)) for i, v in enumerate(types)]
        args = [self.table.number(*key) for key in keys]
        return self.table.number(*keys, *self._results(ref, args, depth + 1))

    def _operand(self, held: Mapping[str, int], operand: Operand) -> int:
        return self.table.literal(operand) if isinstance(operand, Literal) else held[operand]
