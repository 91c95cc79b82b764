"""Costs: bytes of a variable for given sizes, and the approximate arithmetic of an operator."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod

from jaxfleet.errors import PassError
from jaxfleet.ir import Block, Dim, Kind, Operator, Program, Struct, Variable, evaluate
from jaxfleet.ir.program import shape_of

_KEY_BYTES = {"fry": 8, "rbg": 16, "unsafe_rbg": 16}  # of a random key, by generator


def bytes_of(variable: Variable, sizes: Mapping[str, int]) -> int:
    """Returns the size of a variable; handles and ordering tokens take 0 bytes.

    A letter of its shape without a number is a PassError.
    """
    try:
        shape = [evaluate(size, sizes) for size in variable.shape]
    except KeyError as error:
        what = f"'{variable.name}' is {variable.type}, and a size has no number: {error.args[0]}"
        raise PassError(what, hint="give a number for every letter") from None
    return prod(shape) * itemsize(variable.dtype)


@lru_cache(maxsize=1 << 8)
def itemsize(dtype: str) -> int:
    """Returns the bytes of one element, at least 1."""
    if dtype.startswith("key<"):
        return _KEY_BYTES.get(dtype.removeprefix("key<").rstrip(">"), _KEY_BYTES["fry"])
    if dtype == "raw":
        return 0
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits.group()) // 8) if bits is not None else 1


class TemporaryBytes:
    """The bytes of the temporaries of a step.

    Data, parameters, state, constants and returned values exist under any plan and are not counted
    (docs/memory.md), nor are values in host memory.
    """

    def __init__(
        self, program: Program, sizes: Mapping[str, int], *, keep: Iterable[str] = ()
    ) -> None:
        """Prepares to count; variables in `keep` are fetched by name, so returned."""
        self._program = program
        self._sizes = sizes
        self._elsewhere = set(keep)
        for op in program.root.ops:
            if op.type == "fetch":
                self._elsewhere.update(op.reads)
            elif op.type == "to_host":
                self._elsewhere.update(op.writes)
        self._by_type: dict[str, int] = {}

    def of(self, name: str, block: Block | None = None) -> int:
        """Returns the bytes of a variable visible in a block, block 0 by default."""
        variable = self._program.lookup(name, block)
        if variable.kind is not Kind.TEMP or name in self._elsewhere:
            return 0
        key = variable.type
        if key not in self._by_type:
            self._by_type[key] = bytes_of(variable, self._sizes)
        return self._by_type[key]


def equal_sizes(program: Program, rows: int) -> Mapping[str, int]:
    """Returns the same number for every letter in the shapes of a program."""
    scopes = (program.variables, *(block.variables for block in program.blocks))
    sizes = (size for scope in scopes for v in scope.values() for size in v.shape)
    letters = {letter for size in sizes if isinstance(size, Dim) for letter in size.letters}
    return dict.fromkeys(letters, rows)


# Reading, computing and writing an element takes as long as this many multiply-adds of a matrix
# product: it is bound by memory, not by arithmetic.
ELEMENT = 8


class Costs:
    """The costs of operators, in multiply-adds of a matrix product."""

    def __init__(self, program: Program, sizes: Mapping[str, int]) -> None:
        self._program = program
        self._sizes = sizes
        self._of_block: dict[int, int] = {}
        for block in reversed(program.blocks[1:]):  # a sub-block comes after the one that uses it
            self._of_block[block.index] = sum(self.of(op, block) for op in block.ops)

    def of(self, op: Operator, block: Block | None = None) -> int:
        """Returns the cost of an operator of a block."""
        if op.blocks:
            turns = op.attrs.get("length", 1)
            count = evaluate(turns, self._sizes) if isinstance(turns, int | Dim) else 1
            return count * max(self._of_block[index] for index in op.blocks)
        made = sum(prod(self._shape(name, block)) for name in op.writes)
        read = max((prod(self._shape(name, block)) for name in op.reads), default=0)
        return max(made * self._depth(op, block), max(made, read) * ELEMENT)

    def products(self, op: Operator, block: Block | None = None) -> int:
        """Returns the multiply-adds of a matrix product or convolution; 0 of anything else."""
        if op.type.removesuffix(_GRADIENT) in _BY_SLOTS and op.type not in _BY_SLOTS:
            return self._products_of_gradient(op, block)
        depth = self._depth(op, block)
        return depth * sum(prod(self._shape(name, block)) for name in op.writes) if depth else 0

    def _products_of_gradient(self, op: Operator, block: Block | None) -> int:
        """Returns those of a fluid gradient: each operand's takes as many as the product itself."""
        rule = _BY_SLOTS[op.type.removesuffix(_GRADIENT)]
        shapes = [self._shape(x, block) if isinstance(x, str) else () for x in op.inputs]
        made = _slot(op, shapes, "Output@GRAD") or _slot(op, shapes, "Out@GRAD")
        return rule(op, shapes) * prod(made) * len(op.writes)

    def _depth(self, op: Operator, block: Block | None) -> int:
        """Returns the number of products summed in each element; 0 for other operators."""
        rule = _PRODUCTS.get(op.type)
        if rule is None:
            return 0
        return rule(op, [self._shape(x, block) if isinstance(x, str) else () for x in op.inputs])

    def _shape(self, name: str, block: Block | None) -> tuple[int, ...]:
        shape = shape_of(self._program, name, block)
        return tuple(evaluate(size, self._sizes) for size in shape)


Shapes = Sequence[tuple[int, ...]]


def _dot_general(op: Operator, shapes: Shapes) -> int:
    numbers = op.attrs["dimension_numbers"]
    assert isinstance(numbers, tuple)
    contracted = numbers[0]
    assert isinstance(contracted, tuple)
    axes = contracted[0]
    assert isinstance(axes, tuple)
    return prod(shapes[0][axis] for axis in axes if isinstance(axis, int))


def _convolution(op: Operator, shapes: Shapes) -> int:
    numbers = op.attrs["dimension_numbers"]
    assert isinstance(numbers, Struct)
    spec = numbers.fields["rhs_spec"]
    assert isinstance(spec, tuple)
    features = spec[0]
    assert isinstance(features, int)
    return prod(shapes[1]) // max(1, shapes[1][features])


def _conv2d(op: Operator, shapes: Shapes) -> int:
    kernel = _slot(op, shapes, "Filter")
    return prod(kernel[1:])


def _mul(op: Operator, shapes: Shapes) -> int:
    axes = op.attrs.get("y_num_col_dims", 1)
    return prod(_slot(op, shapes, "Y")[: axes if isinstance(axes, int) else 1])


def _matmul(op: Operator, shapes: Shapes) -> int:
    left, is_turned = _slot(op, shapes, "X"), op.attrs.get("transpose_X", False)
    return left[-2] if is_turned and len(left) > 1 else left[-1] if left else 1


def _slot(op: Operator, shapes: Shapes, slot: str) -> tuple[int, ...]:
    names = op.inputs.slot(slot)
    return shapes[list(op.inputs).index(names[0])] if names else ()


_GRADIENT = "_grad"
_BY_SLOTS = {  # fluid's
    "conv2d": _conv2d,
    "conv3d": _conv2d,
    "depthwise_conv2d": _conv2d,
    "conv2d_transpose": _conv2d,
    "mul": _mul,
    "matmul": _matmul,
}
_PRODUCTS = {
    **_BY_SLOTS,
    "jax.dot_general": _dot_general,
    "jax.conv_general_dilated": _convolution,
}
