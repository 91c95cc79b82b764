"""What running an operator again costs, roughly: to compare operators, not to predict seconds."""

from collections.abc import Mapping, Sequence
from math import prod

from jaxfleet.ir import Block, Dim, Operator, Program, Struct, evaluate
from jaxfleet.ir.program import shape_of

# An element that is read, computed and written takes as long as this many multiply-adds of a
# matrix product: memory, and not arithmetic, is what the first waits for.
ELEMENT = 8


class Costs:
    """Knows what operators cost, in multiply-adds of a matrix product."""

    def __init__(self, program: Program, sizes: Mapping[str, int]) -> None:
        self._program = program
        self._sizes = sizes
        self._of_block: dict[int, int] = {}
        for block in reversed(program.blocks[1:]):  # a sub-block comes after the one that uses it
            self._of_block[block.index] = sum(self.of(op, block) for op in block.ops)

    def of(self, op: Operator, block: Block | None = None) -> int:
        """Returns the cost of an operator of a block, block 0 unless told."""
        if op.blocks:
            turns = op.attrs.get("length", 1)
            count = evaluate(turns, self._sizes) if isinstance(turns, int | Dim) else 1
            return count * max(self._of_block[index] for index in op.blocks)
        made = sum(prod(self._shape(name, block)) for name in op.writes)
        read = max((prod(self._shape(name, block)) for name in op.reads), default=0)
        return max(made * self._depth(op, block), max(made, read) * ELEMENT)

    def _depth(self, op: Operator, block: Block | None) -> int:
        """Returns how many products each element of the result is a sum of; 0 for others."""
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


_PRODUCTS = {
    "jax.dot_general": _dot_general,
    "jax.conv_general_dilated": _convolution,
    "conv2d": _conv2d,
    "conv3d": _conv2d,
    "depthwise_conv2d": _conv2d,
    "conv2d_transpose": _conv2d,
    "mul": _mul,
    "matmul": _matmul,
}
