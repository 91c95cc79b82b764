"""What is fed and fetched of sequences: their rows with their lengths, and rows that are added.

See `jaxfleet.fluid.ragged` for what sequences are to a program.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfleet.errors import FeedError, ProgramError, RaggedError
from jaxfleet.fluid.block import Block
from jaxfleet.fluid.lod_tensor import LoDTensor, create_lod_tensor, why_not_lengths
from jaxfleet.fluid.made_sequences import spare_rows
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.ragged import (
    data_by_rows,
    lengths_of,
    measures,
    places_of,
    ragged_data,
    room_of,
    slots_for_lengths,
    source_of,
)
from jaxfleet.fluid.sequence_limits import LIMITED, Limit, limits_of
from jaxfleet.fluid.variable import Variable
from jaxfleet.fluid.versions import PerVersion
from jaxfleet.ir.dims import letter, letters
from jaxfleet.ops.fluid import EMPTY

_LEAST = 8  # the fewest rows, and the smallest step between two numbers of rows

# Operators that compute each row by itself, when rows stay rows.
_ROW_BY_ROW = re.compile(
    r"lookup_table(_v2)?|mul|elementwise_\w+|scale|cast|dropout|sum|reshape2|concat|assign|clip"
    r"|relu6?|tanh|sigmoid|softsign|softplus|leaky_relu|elu|gelu|square|abs|exp|one_hot(_v2)?"
    r"|layer_norm|softmax|less_than|equal|not_equal|fill_zeros_like|delete_var"
)


def fed_sequences(program: Program, variable: Variable, value: Any) -> dict[str, np.ndarray]:
    """Returns the rows and the lengths of what is fed to a variable of sequences, by name.

    Where an operator wants to know how long the longest is, there are places beside.

    Raises:
        RaggedError: it is neither a LoDTensor with lengths nor a list of sequences.
        FeedError: it has more levels than one, rows of another shape, or sequences too long for
            an operator.
    """
    rows, lengths = _rows_and_lengths(variable, value)
    known = _PROGRAMS.get(program)
    known.check(variable.name, lengths)
    if variable.name not in known.exact:
        rows = _with_more_rows(rows)
    fed = {variable.name: rows, lengths_of(variable.name): np.asarray(lengths, np.int32)}
    if not known.measures:
        return fed
    longest = max([1, *lengths])
    for place, count in ((places_of, longest), (room_of, _rounded(longest))):
        fed[place(variable.name)] = np.arange(count, dtype=np.int32)
    return fed


def check_counts(declared: Mapping[str, Variable], fed: Mapping[str, Any]) -> None:
    """Checks that there are as many sequences as rows of everything else.

    Args:
        declared: the variables of the program.
        fed: arrays by name, of sequences with their lengths.

    Raises:
        FeedError: there are more, or fewer.
    """
    found: dict[int, str] = {}
    for name, value in fed.items():
        variable = declared.get(name)
        if variable is None or not variable.is_data or not np.ndim(value):
            continue
        if (lengths := fed.get(lengths_of(name))) is not None:
            found.setdefault(len(lengths), f"'{name}' is fed {len(lengths)} sequences")
        elif variable.sizes and variable.sizes[0] == letter("b"):
            found.setdefault(len(value), f"'{name}' is fed {len(value)} rows")
    if len(found) > 1:
        raise FeedError(", and ".join(found.values()), hint="feed a row for each sequence")


def check_equal_lengths(program: Program, fed: Mapping[str, Any]) -> None:
    """Checks that sequences which an operator reads side by side have equal lengths.

    Args:
        program: what is run.
        fed: arrays by name, of sequences with their lengths.

    Raises:
        FeedError: they differ.
    """
    for names in _PROGRAMS.get(program).equal:
        given = {name: fed[lengths_of(name)].tolist() for name in names if name in fed}
        first = next(iter(given), None)
        for name, lengths in given.items():
            if first is not None and lengths != given[first]:
                raise FeedError(
                    f"'{first}' is fed sequences of lengths {given[first][:8]}, and '{name}' of "
                    f"{lengths[:8]}; an operator of the program takes them row by row",
                    hint="feed sequences of equal lengths, in the same order",
                )


def lod_tensor_of(variable: Variable, sequences: Sequence[Any]) -> LoDTensor:
    """Returns sequences as what a variable is fed.

    Raises:
        FeedError: their rows are of another shape than the variable's.
    """
    rows, lengths = _rows_and_lengths(variable, list(sequences))
    return create_lod_tensor(rows, [lengths])


def sequences_of(variable: Variable, value: Any) -> list[np.ndarray]:
    """Returns what is fed to a variable of sequences as a list of them."""
    rows, lengths = _rows_and_lengths(variable, value)
    return np.split(rows, np.cumsum(lengths)[:-1]) if lengths else []


def _rows_and_lengths(variable: Variable, value: Any) -> tuple[np.ndarray, list[int]]:
    name, shape = variable.name, variable.shape[1:]
    if isinstance(value, LoDTensor) and value.lod():
        levels = value.recursive_sequence_lengths()
        if len(levels) > 1 or variable.lod_level > 1:
            what = f"'{name}' is fed {len(levels)} levels of sequences, and declared {variable}"
            raise FeedError(what, hint="one level is supported: lod_level=1")
        if (why := why_not_lengths(levels, len(np.asarray(value)))) is not None:
            raise RaggedError(f"'{name}' is fed sequences: {why}", hint="set them after the rows")
        return _shaped(np.asarray(value), shape, name), levels[0]
    if not isinstance(value, list | tuple):
        what = f"'{name}' is sequences, and is fed {type(value).__name__} without their lengths"
        raise RaggedError(what, hint="feed a list of sequences, or fluid.create_lod_tensor(...)")
    parts = [np.asarray(sequence, variable.dtype) for sequence in value]
    whole = [_shaped(part, shape, name) for part in parts]
    empty = np.zeros((0, *(max(size, 1) for size in shape)), variable.dtype)
    return np.concatenate(whole) if whole else empty, [len(part) for part in parts]


def _shaped(rows: np.ndarray, shape: Sequence[int], name: str) -> np.ndarray:
    """Returns rows in the shape that is declared, where they lack only axes of size 1."""
    count = rows.shape[0] if rows.ndim else 0
    if [size for size in rows.shape[1:] if size != 1] == [size for size in shape if size != 1]:
        return rows.reshape(count, *shape)
    what = f"'{name}' is fed rows of shape {list(rows.shape[1:])}, and declared {list(shape)}"
    raise FeedError(what, hint="feed a list of sequences of such rows")


def _with_more_rows(rows: np.ndarray) -> np.ndarray:
    """Returns rows with copies of the last, whose number is one of four up to the next power."""
    count = len(rows)
    more = _rounded(count) - count
    last = rows[-1:] if count else np.zeros((1, *rows.shape[1:]), rows.dtype)
    return np.concatenate([rows, np.repeat(last, more, axis=0)])


def _rounded(count: int) -> int:
    """Returns the next of a few numbers, so that few programs are compiled."""
    step = max(_LEAST, 1 << max(count.bit_length() - 3, 0))
    return max(-(-count // step) * step, _LEAST)


@dataclass(frozen=True)
class _Known:
    """What is known of a program as it is: names, which do not keep it alive.

    Attributes:
        ragged: what it is fed as sequences, by the letter that is its number of rows.
        exact: the names of those to which no rows may be added.
        equal: the names of those that must have equal lengths, since an operator reads them side
            by side.
        measures: some operator wants to know how long the longest sequence is.
        limits: what operators want of the lengths of what is fed, by its name.
    """

    ragged: Mapping[str, str]
    exact: frozenset[str]
    equal: tuple[tuple[str, ...], ...] = ()
    measures: bool = False
    limits: Mapping[str, tuple[Limit, ...]] = field(default_factory=dict)

    def check(self, name: str, lengths: Sequence[int]) -> None:
        """Checks the lengths that are fed to a variable.

        Raises:
            FeedError: an operator takes none such.
        """
        for limit in self.limits.get(name, ()):
            limit.check(name, lengths)

    @classmethod
    def of(cls, program: Program) -> "_Known":
        ragged = ragged_data(program)
        mixed = set(_mixed(program, ragged)) if ragged else set()
        together = [[v.name for v in same] for same in data_by_rows(program).values()]
        exact = frozenset(n for names in together if mixed & {*names} for n in names)
        equal = tuple(tuple(names) for names in together if len(names) > 1)
        names = {rows: variable.name for rows, variable in ragged.items()}
        types = {op.type for block in program.blocks for op in block.ops} if ragged else set()
        limits = limits_of(program, together) if types & LIMITED else {}
        return cls(names, exact, equal, any(map(measures, types)), limits)


_PROGRAMS = PerVersion(_Known.of)  # so that a run looks at no program that has not changed


def _mixed(program: Program, ragged: Mapping[str, Variable]) -> Iterator[str]:
    """Yields the fed sequences whose rows some operator puts together without knowing the lengths.

    Raises:
        ProgramError: rows that are put together are those of sequences and spare ones.
    """
    for block in program.blocks:
        for op in block.ops:
            if slots_for_lengths(op.type):
                continue
            names = [block._var_recursive(name) for name in op.input_arg_names]
            read = [v for v in names if source_of(v, ragged) is not None]
            groups = _groups(block, op, ragged)
            if not read or (not groups and _is_row_by_row(block, op, ragged)):
                continue
            yield from groups
            for variable in read:
                assert variable.sizes
                if spare_rows(variable.sizes[0]):
                    what = f"{op.type} takes all rows of '{variable.name}' together, and some of "
                    hint = "pool the sequences first, by sequence_pool"
                    raise ProgramError(
                        f"{what}them are spare: an operator made its sequences", source=op.source,
                        hint=hint,
                    )  # fmt: skip
                yield from (ragged[rows].name for rows in letters(variable.sizes[:1]) & {*ragged})


def _groups(block: Block, op: Operator, ragged: Mapping[str, Variable]) -> set[str]:
    """Returns what has as many rows as an operator makes of groups of others' rows."""
    read, written = (
        {ragged[str(v.sizes[0])].name for v in map(block._var_recursive, names)
         if source_of(v, ragged) is not None and v.sizes}
        for names in (op.input_arg_names, [n for n in op.output_arg_names if n != EMPTY])
    )  # fmt: skip
    return written - read


def _is_row_by_row(block: Block, op: Operator, ragged: Mapping[str, Variable]) -> bool:
    """Tells whether an operator does with each row what it would do without the others.

    A gradient operator of such a one is: the gradients of added rows are zero, as nothing that
    the loss depends on is made of them.
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
    """Tells whether a variable has no elements, and is only there for its shape."""
    return bool(variable.sizes and variable.sizes[0] == 0)


def fetched_sequences(
    program: Program,
    names: Sequence[str],
    values: Sequence[Any],
    fed: Mapping[str, Any],
    *,
    return_numpy: bool,
) -> list[Any]:
    """Returns what is fetched, with LoDTensors for sequences, of the rows that they have.

    Raises:
        RaggedError: sequences are to be numpy arrays, which have no lengths.
    """
    ragged, declared = _PROGRAMS.get(program).ragged, program.global_block().vars
    if not ragged:
        return list(values)
    found = []
    for name, value in zip(names, values, strict=True):
        source = source_of(declared[name], ragged) if name in declared else None
        if source is None:
            found.append(value)
            continue
        if return_numpy:
            what = f"'{name}' is sequences, whose lengths a numpy array does not tell"
            raise RaggedError(what, hint="fetch it with return_numpy=False")
        lengths = np.asarray(fed[lengths_of(source)]).tolist()
        found.append(create_lod_tensor(np.asarray(value)[: sum(lengths)], [lengths]))
    return found


def lengths_to_fetch(program: Program, names: Iterable[str]) -> tuple[str, ...]:
    """Returns the lengths of what is fetched that the program computes, which are fetched too."""
    ragged, declared = _PROGRAMS.get(program).ragged, program.global_block().vars
    sources = [source_of(declared[name], ragged) for name in names if name in declared]
    made = [name for name in sources if name is not None and not declared[name].is_data]
    return tuple(dict.fromkeys(map(lengths_of, made)))


def is_sequences(program: Program, name: str) -> bool:
    """Whether a variable has the rows of sequences."""
    ragged, declared = _PROGRAMS.get(program).ragged, program.global_block().vars
    return bool(ragged) and name in declared and source_of(declared[name], ragged) is not None


def check_fetched(program: Program, names: Sequence[str]) -> None:
    """Checks that nothing is fetched that has sequences, of which each device has others.

    Raises:
        RaggedError: something is.
    """
    ragged, declared = _PROGRAMS.get(program).ragged, program.global_block().vars
    for name in names if ragged else ():
        if name in declared and source_of(declared[name], ragged) is not None:
            what = f"'{name}' is fetched, of whose sequences each device has some"
            raise RaggedError(what, hint="fetch what is made of them, or run on one device")
