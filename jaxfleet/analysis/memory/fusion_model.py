"""A model of the compiler's fusion: the values that it never writes to memory.

XLA computes an element-wise operator inside its readers if these are element-wise too: once for
each reader if it is cheap, otherwise only for a single reader. The value of such an operator takes
no bytes, and its operands stay alive until its readers have run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from jaxfleet.analysis.memory.liveness import GIVEN, LiveRange
from jaxfleet.ir import Operator, Program

# Worth computing once for each reader.
_CHEAP = frozenset(
    {
        *("abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "copy", "eq"),
        *("convert_element_type", "expand_dims", "floor", "ge", "gt", "integer_pow", "iota"),
        *("is_finite", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pad"),
        *("complex", "conj", "imag", "one_minus_square", "real", "shift_right_arithmetic"),
        *("reduce_precision", "reshape", "rev", "round", "select_n", "shift_left"),
        *("shift_right_logical", "sign", "slice", "square", "squeeze", "sub", "transpose", "xor"),
    }
)
_COSTLY = frozenset(
    {
        *("acos", "asin", "atan", "atan2", "cbrt", "cos", "cosh", "div", "erf", "erf_inv", "exp"),
        *("digamma", "erfc", "lgamma"),
        *("exp2", "expm1", "log", "log1p", "logistic", "nextafter", "pow", "rem", "rsqrt", "sin"),
        *("sinh", "sqrt", "tan", "tanh"),
    }
)
_MOST_ARRAYS = 1  # operands of a value that is recomputed for each of its readers
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"})
_FLUID_CHEAP = frozenset(
    {
        *("abs", "cast", "elementwise_add", "elementwise_max", "elementwise_min"),
        *("elementwise_mul", "elementwise_sub", "fill_constant", "leaky_relu", "relu", "reshape2"),
        *("scale", "sign", "square", "sum"),
    }
)


def fused_ranges(program: Program, values: Sequence[LiveRange]) -> list[LiveRange]:
    """Returns the values of block 0 after fusion: some without bytes, others with longer lives."""
    ops, found = program.root.ops, list(values)
    reads: dict[int, set[int]] = {}  # by merged operator, the operators that it runs in
    by_maker: dict[int, list[int]] = {}
    for number, value in enumerate(values):
        if value.made != GIVEN:
            by_maker.setdefault(value.made, []).append(number)
    readers = {place: _readers(values, numbers) for place, numbers in by_maker.items()}
    for place in sorted(_merged(ops, values, readers), reverse=True):
        reads[place] = {x for at in readers[place] for x in reads.get(at, {at})}
    for number, value in enumerate(values):
        where = {x for at in value.reads for x in reads.get(at, {at})}
        size = 0 if value.made in reads else value.bytes
        found[number] = replace(value, bytes=size, reads=tuple(sorted(where)))
    return found


def executables(ops: Sequence[Operator]) -> list[int]:
    """Returns the number of each operator's executable: a `cut` ends one."""
    return list(accumulate((op.type == "cut" for op in ops), initial=0))[1:]


def _merged(
    ops: Sequence[Operator], values: Sequence[LiveRange], readers: Mapping[int, Sequence[int]]
) -> set[int]:
    """Returns the operators that are merged with their readers.

    A value with several readers is not merged once it is made of many arrays: a sum over all layers
    is written to memory, not recomputed from every layer's part.
    """
    inputs: dict[int, list[LiveRange]] = {}
    for value in values:
        for at in value.reads:
            inputs.setdefault(at, []).append(value)
    found, made_of = set[int](), dict[int, set[int]]()
    runs_in = executables(ops)
    for place in sorted(readers):
        is_inside = all(runs_in[at] == runs_in[place] for at in readers[place])
        made = set[int]()
        for value in inputs.get(place, ()):
            made |= made_of.get(value.made, {id(value)} if value.bytes else set())
        is_simple = len(made) <= _MOST_ARRAYS or len(readers[place]) <= 1
        if is_inside and is_simple and _is_merged(ops, place, readers[place]):
            found.add(place)
            made_of[place] = made
    return found


def _readers(values: Sequence[LiveRange], numbers: Sequence[int]) -> list[int]:
    return sorted({place for number in numbers for place in values[number].reads})


def _is_merged(ops: Sequence[Operator], place: int, readers: Sequence[int]) -> bool:
    if not readers or not all(is_elementwise(ops[at].type) for at in readers):
        return False
    if _is_one_of(ops[place].type, _CHEAP, _FLUID_CHEAP):
        return True
    return len(readers) == 1 and is_elementwise(ops[place].type) and not _reduces(ops[place].type)


def is_elementwise(op_type: str) -> bool:
    """Whether an operator's results are element-wise, or sums of element-wise results."""
    return _is_one_of(op_type, _CHEAP | _COSTLY, _FLUID_CHEAP) or _reduces(op_type)


def _reduces(op_type: str) -> bool:
    return _is_one_of(op_type, _REDUCTIONS, frozenset())


def _is_one_of(op_type: str, jax_types: frozenset[str], fluid_types: frozenset[str]) -> bool:
    if op_type.startswith("jax."):
        return op_type.removeprefix("jax.") in jax_types
    return op_type.removesuffix("_grad") in fluid_types
