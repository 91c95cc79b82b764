"""Shapes of what an operator makes, by tracing what it computes: nothing says them twice.

An unknown size is a letter. Each letter is tried with two numbers, and an axis of a result that
grows with one becomes a size in that letter; so `reshape` and `concat` need no rules of their own.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxfleet.errors import JaxfleetError, ProgramError
from jaxfleet.fluid.variable import Variable
from jaxfleet.ir import Operator, Program, Size, evaluate
from jaxfleet.ir.dims import letter, letters
from jaxfleet.ops import Interpreter, find_op
from jaxfleet.ops.fluid.arrays import device_dtype

# What a letter is tried with: two numbers that most factors divide, two that large windows fit, and
# two for a `reshape` into groups of 5, 7 or 11.
_TRIED = ((24, 48), (24 << 6, 48 << 6), (24 * 1155, 48 * 1155))

# Ends the letter of a size that is not a multiple of another: rows in groups of five.
UNKNOWN = "_part"


def infer_sizes(op: Operator, read: Mapping[str, Variable]) -> list[tuple[Size, ...]]:
    """Returns the sizes of an operator's outputs, in the order of its operands.

    Args:
        op: with names for operands; it has no sub-blocks.
        read: the variables that it reads.

    Raises:
        ProgramError: it cannot compute with inputs of these shapes.
    """
    known = {name: variable.sizes for name, variable in read.items()}
    if any(sizes is None for sizes in known.values()):
        unknown = next(name for name, sizes in known.items() if sizes is None)
        raise ProgramError(f"the shape of '{unknown}' is not known", op=op)
    found = sorted(letters(tuple(s for sizes in known.values() for s in sizes or ())))
    try:
        return _sizes(op, read, found, {})
    except ProgramError:
        for tried in _TRIED[1:]:
            with contextlib.suppress(ProgramError):
                return _sizes(op, read, found, {}, tried)
        numbers = {s for sizes in known.values() for s in sizes or () if isinstance(s, int)}
        for fixed in ({name: number} for name in found for number in sorted(numbers, reverse=True)):
            with contextlib.suppress(ProgramError):
                return _sizes(op, read, found, fixed)
        raise


def _sizes(
    op: Operator,
    read: Mapping[str, Variable],
    found: Sequence[str],
    fixed: Mapping[str, int],
    tried: tuple[int, int] = _TRIED[0],
) -> list[tuple[Size, ...]]:
    """Returns the sizes of outputs, where some letters stand for numbers.

    An unknown axis beside a known one is of that size, or the operator could not run: `[b,2]`
    joined with `[3,2]` along axis 1 is of 3 rows.
    """
    usual = {**dict.fromkeys(found, tried[0]), **fixed}
    free = [name for name in found if name not in fixed]
    base = _shapes(op, read, usual)
    grown = {x: _shapes(op, read, {**usual, x: tried[1]}) for x in free}
    return [
        tuple(
            _size(base[at][axis], {x: grown[x][at][axis] for x in free}, tried)
            for axis in range(len(base[at]))
        )
        for at in range(len(base))
    ]


def _shapes(
    op: Operator, read: Mapping[str, Variable], numbers: Mapping[str, int]
) -> list[tuple[int, ...]]:
    meaning = find_op(op).meaning
    interpreter = Interpreter(Program(), numbers)
    given = [_like(read[name], numbers) for name in op.inputs.names]

    def run(values: Sequence[Any]) -> Sequence[Any]:
        return meaning(interpreter, op, values)

    return [made.shape for made in _traced(run, given, op, read)]


def _traced(
    run: Callable[[Sequence[Any]], Sequence[Any]],
    given: Sequence[Any],
    op: Operator,
    read: Mapping[str, Variable],
) -> Any:
    try:
        return jax.eval_shape(run, given)
    except JaxfleetError:
        raise
    except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        shapes = " and ".join(_shown(read[name]) for name in op.inputs.names)
        what = f"operator '{op.type}' cannot take {shapes or 'nothing'}"
        hint = f"tried with {_TRIED[0][0]} for each letter: {error}"
        raise ProgramError(what, op=op, hint=hint) from error


def _shown(variable: Variable) -> str:
    return f"'{variable.name}' [{','.join(map(str, variable.sizes or ()))}]"


def _like(variable: Variable, numbers: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    shape = tuple(evaluate(size, numbers) for size in variable.sizes or ())
    return jax.ShapeDtypeStruct(shape, device_dtype(variable.dtype))


def _size(base: int, grown: Mapping[str, int], tried: tuple[int, int]) -> Size:
    """Returns the size that is `base` where all letters are the first number, and grows so."""
    first, second = tried
    size: Size = base
    for name, number in grown.items():
        slope, rest = divmod(number - base, second - first)
        if rest:  # not a multiple of the letter: a size of its own, as good as unknown
            return letter(name + UNKNOWN)
        size = size + slope * letter(name) - slope * first
    return size
