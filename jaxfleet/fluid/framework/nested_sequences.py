"""Sequences of two levels: the beams of a search, which change from step to step.

A variable declared with `lod_level=2` has sources, each with prefixes, each with rows. On the
device it is two arrays: the rows, padded to the largest number that beams may reach, and the
levels, `i32[sources+rows]`, under the variable's name with `@LEVELS`: the number of prefixes of
each source, then the number of rows of each prefix, padded with zeros.

All beams of a program have the same number of rows, so that number does not identify a variable's
levels, unlike with one level (`jaxfleet.fluid.framework.sequence_lengths`). The operators do: those
that make levels (`beam_search`, and `read_from_array` of an array of such) have a slot `OutLevels`,
and an operator that works row by row passes its input's levels on.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxfleet.errors import FeedError, ProgramError, RaggedError
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.sequence_lengths import (
    data_by_rows,
    levels_size,
    nested_data,
    source_of,
)
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.lod_tensor import LoDTensor, create_lod_tensor, rows_of_shape, why_not_lengths
from jaxfleet.ir import Size
from jaxfleet.ops.fluid import EMPTY

# Operators that compute each row by itself, when rows stay rows.
_ROW_BY_ROW = re.compile(
    r"lookup_table(_v2)?|mul|elementwise_\w+|scale|cast|dropout|sum|reshape2|concat|assign|clip"
    r"|relu6?|tanh|sigmoid|softsign|softplus|leaky_relu|elu|gelu|square|abs|exp|log|sqrt"
    r"|one_hot(_v2)?|layer_norm|softmax|top_k|less_than|equal|not_equal|fill_zeros_like|delete_var"
)


def is_row_by_row(block: Block, op: Operator, ragged: Mapping[str, Variable]) -> bool:
    """Whether an operator computes each row independently of the others.

    Its gradient operator then does, too: no target depends on padding rows, so their gradients are
    zero.

    `ragged` has the variables fed as sequences, by the letter of their number of rows.
    """
    forward = re.sub(r"_grad2?$", "", op.type)
    if _ROW_BY_ROW.fullmatch(forward) is None:
        return False
    if op.type == "softmax" and _first_axis_is(op.attr("axis"), block, op):
        return False
    if op.type == "layer_norm" and op.attr("begin_norm_axis") == 0:
        return False
    written = [block._var_recursive(name) for name in op.output_arg_names if name != EMPTY]
    return forward != op.type or all(
        source_of(v, ragged) is not None or _is_record(v) for v in written
    )


def _first_axis_is(axis: int, block: Block, op: Operator) -> bool:
    return axis % len(block._var_recursive(op.input("X")[0]).shape) == 0


def _is_record(variable: Variable) -> bool:
    """Whether a variable has no elements and only records a shape."""
    return bool(variable.sizes and variable.sizes[0] == 0)


OUT_LEVELS = "OutLevels"
_LEVELS = "@LEVELS"
# By operator type, the input slot whose levels the result has if its rows do not determine them.
_LIKE = {"sequence_expand": "Y", "lod_reset": "Y", "gather": "Index"}
_OF_LEVELS = frozenset(
    {"beam_search", "beam_search_decode", "sequence_expand", "lod_reset", "gather", "is_empty"}
    | {"write_to_array", "read_from_array"}
)


def levels_name(name: str) -> str:
    """Returns the name of the variable with the two levels of another."""
    return name + _LEVELS


def has_levels(array: Variable) -> bool:
    """Whether a tensor array holds sequences of two levels."""
    return array.block.has_var(levels_name(array.name))


def declare_levels(like: Variable, sizes: tuple[Size, ...], *, is_data: bool = False) -> Variable:
    """Declares the variable for another one's levels, in the same block."""
    made = like.block.create_var(
        name=levels_name(like.name), dtype="int32", stop_gradient=True, is_data=is_data
    )
    made.sizes = sizes
    return made


def levels_for(variable: Variable) -> Variable | None:
    """Returns the variable with another one's two levels, declared if missing; None if none."""
    source = _source(variable, set())
    if source is None:
        return None
    if (known := source.block.vars.get(levels_name(source.name))) is not None:
        return known
    return declare_levels(source, (levels_size(source),), is_data=True)


def _source(variable: Variable, seen: set[str]) -> Variable | None:
    """Returns the variable whose levels another shares; a fed one may not have them yet."""
    if variable.name in seen or not variable.sizes:
        return None
    seen.add(variable.name)
    if levels_name(variable.name) in variable.block.vars:
        return variable
    if variable.is_data:
        return variable if variable.lod_level > 1 else None
    op = variable.op
    if op is None:
        return None
    block = op.block
    if made := op.outputs.get(OUT_LEVELS):
        return block._var_recursive(made[0].removesuffix(_LEVELS))
    if op.type in _LIKE:
        return _source(block._var_recursive(op.input(_LIKE[op.type])[0]), seen)
    read = map(block._var_recursive, op.input_arg_names)
    same = (v for v in read if v.sizes and variable.sizes and v.sizes[0] == variable.sizes[0])
    return next((found for v in same if (found := _source(v, seen)) is not None), None)


def check_nested(program: Program) -> None:
    """Raises ProgramError if an operator combines rows of beams, some of which are spare.

    The same applies to one that overwrites beams without updating their levels.
    """
    nested = nested_data(program)
    for block in program.blocks if nested else ():
        for op in block.ops:
            if op._inner_blocks():
                continue
            _check_written(block, op)
            read = map(block._var_recursive, op.input_arg_names)
            of = next((v for v in read if source_of(v, nested) is not None), None)
            if of is None or op.type in _OF_LEVELS or is_row_by_row(block, op, nested):
                continue
            what = f"{op.type} takes all rows of '{of.name}' together, and some of them are spare"
            hint = "between beam searches, work row by row"
            raise ProgramError(f"{what}: its beams have two levels", source=op.source, hint=hint)


def _check_written(block: Block, op: Operator) -> None:
    for name in op.output_arg_names:
        written, beside = block._find_var_recursive(name), levels_name(name)
        is_fed = written is not None and written.is_data and written.lod_level > 1
        has_some = is_fed or block._find_var_recursive(beside) is not None
        if has_some and beside not in op.output_arg_names:
            what = f"{op.type} overwrites '{name}', whose levels stay what they were"
            hint = "keep beams in an array: array_write(x, i, array)"
            raise ProgramError(what, source=op.source, hint=hint)


def most_beams(program: Program) -> int:
    """Returns the largest `beam_size` of a program; 1 without a beam search."""
    ops = (op for block in program.blocks for op in block.ops if op.type == "beam_search")
    return max((op.attr("beam_size") for op in ops), default=1)


def fed_nested(program: Program, variable: Variable, value: Any) -> dict[str, np.ndarray]:
    """Returns by name the rows and levels that a value feeds to a variable of two levels.

    Copies of the last row follow, up to the largest number that beams may reach.

    Raises:
        FeedError: the value does not have two levels, or no operator reads two.
        RaggedError: the value has no lengths, or they do not match its rows.
    """
    name = variable.name
    same = data_by_rows(program)[str((variable.sizes or ())[0])]
    if not any(levels_name(v.name) in v.block.vars for v in same):
        what = f"'{name}' is declared {variable} with {variable.lod_level} levels of sequences"
        hint = "only beams have two levels (beam_search); others have one: lod_level=1"
        raise FeedError(what, hint=hint)
    if not isinstance(value, LoDTensor) or len(value.recursive_sequence_lengths()) != 2:
        what = f"'{name}' has two levels of sequences, and is fed a {type(value).__name__} "
        hint = "fluid.create_lod_tensor(rows, [[1, 1], [1, 1]], place)"
        raise RaggedError(f"{what}without both", hint=hint)
    prefixes, lengths = value.recursive_sequence_lengths()
    rows = rows_of_shape(np.asarray(value), variable.shape[1:], name)
    if (why := why_not_lengths([prefixes, lengths], len(rows))) is not None:
        raise RaggedError(f"'{name}' is fed sequences: {why}", hint="set them after the rows")
    room = max(len(rows), len(lengths), len(prefixes) * most_beams(program), 1)
    last = rows[-1:] if len(rows) else np.zeros((1, *rows.shape[1:]), rows.dtype)
    whole = np.concatenate([rows, np.repeat(last, room - len(rows), axis=0)])
    spare = np.zeros(room - len(lengths), np.int32)
    levels = np.concatenate([prefixes, lengths, spare]).astype(np.int32)
    return {name: whole, levels_name(name): levels}


def as_nested(value: Any, levels: Any) -> LoDTensor:
    """Returns a computed value of two levels, without its spare rows."""
    rows, held = np.asarray(value), np.asarray(levels)
    sources = len(held) - len(rows)
    prefixes = held[:sources]
    lengths = held[sources:][: prefixes.sum()]
    return create_lod_tensor(rows[: lengths.sum()], [prefixes.tolist(), lengths.tolist()])


def levels_among(program: Program, names: Iterable[str]) -> dict[str, str]:
    """Returns the names of the levels of those variables that have two."""
    declared = program.global_block().vars
    sources = {name: _source(declared[name], set()) for name in names if name in declared}
    return {name: levels_name(v.name) for name, v in sources.items() if v is not None}
