"""Fed and fetched sequences: rows with lengths, padding rows, and checks of lengths.

`jaxfleet.fluid.framework.sequence_lengths` describes sequences in a program.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfleet.errors import FeedError, ProgramError, RaggedError
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.nested_sequences import (
    as_nested,
    check_nested,
    fed_nested,
    is_row_by_row,
    levels_among,
    levels_name,
)
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import Program, VersionCache
from jaxfleet.fluid.framework.sequence_lengths import (
    data_by_rows,
    lengths_name,
    measures,
    nested_data,
    places_name,
    ragged_data,
    room_name,
    slots_for_lengths,
    source_of,
    spare_rows,
)
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.lod_tensor import LoDTensor, create_lod_tensor, rows_of_shape, why_not_lengths
from jaxfleet.ir.dims import letter, letters
from jaxfleet.ops.fluid import EMPTY

LIMITED = frozenset({"sequence_pad", "sequence_reshape"})  # restrict the lengths


@dataclass(frozen=True)
class Limit:
    """An operator's restriction on lengths: at most `most` (0 for any), multiples of `factor`."""

    op_type: str
    most: int = 0
    factor: int = 1

    @classmethod
    def of(cls, op: Operator, x: Variable) -> "Limit":
        if op.type == "sequence_pad":
            return cls(op.type, most=max(op.attr("padded_length"), 0))
        wide = op.attr("new_dim")
        return cls(op.type, factor=wide // math.gcd(wide, x.shape[1]))

    def check(self, name: str, lengths: Sequence[int]) -> None:
        """Raises FeedError if the operator does not accept these lengths."""
        longest = max(lengths, default=0)
        if self.most and longest > self.most:
            what = f"'{name}' is fed a sequence of {longest} rows, and {self.op_type} pads to "
            raise FeedError(f"{what}{self.most}", hint="give it a larger maxlen, or None")
        odd = next((n for n in lengths if n % self.factor), None)
        if odd is not None:
            what = (
                f"'{name}' is fed a sequence of {odd} rows, and {self.op_type} makes one of each "
            )
            raise FeedError(f"{what}{self.factor}", hint="feed lengths that divide")


def limits_of(
    program: Program, together: Iterable[Sequence[str]]
) -> Mapping[str, tuple[Limit, ...]]:
    """Returns the limits by name of the fed sequences that operators read unchanged."""
    same = {name: names for names in together for name in names}
    ragged, found = ragged_data(program), dict[str, tuple[Limit, ...]]()
    for block in program.blocks:
        for op in block.ops:
            if op.type not in LIMITED:
                continue
            x = block._var_recursive(op.input("X")[0])
            source = source_of(x, ragged)
            for name in same.get(source.name, ()) if source else ():
                found[name] = (*found.get(name, ()), Limit.of(op, x))
    return found


_LEAST = 8  # the smallest padded number of rows, and the smallest step between two


def fed_sequences(program: Program, variable: Variable, value: Any) -> dict[str, np.ndarray]:
    """Returns by name the rows and lengths that a value feeds to a variable of sequences.

    If an operator needs the length of the longest sequence, places are added. Beams have levels
    instead of lengths.

    Raises:
        RaggedError: the value is neither a LoDTensor with lengths nor a list of sequences.
        FeedError: it has more than one level, rows of another shape, or sequences too long for an
            operator.
    """
    known = _PROGRAMS.get(program)
    if variable.lod_level > 1:
        return fed_nested(program, variable, value)
    rows, lengths = _rows_and_lengths(variable, value)
    known.check(variable.name, lengths)
    if variable.name not in known.exact:
        rows = _with_more_rows(rows)
    fed = {variable.name: rows, lengths_name(variable.name): np.asarray(lengths, np.int32)}
    if not known.measures:
        return fed
    longest = max([1, *lengths])
    for place, count in ((places_name, longest), (room_name, _rounded(longest))):
        fed[place(variable.name)] = np.arange(count, dtype=np.int32)
    return fed


def check_counts(declared: Mapping[str, Variable], fed: Mapping[str, Any]) -> None:
    """Checks that the numbers of sequences equal the number of rows of other inputs."""
    found: dict[int, str] = {}
    for name, value in fed.items():
        variable = declared.get(name)
        if variable is None or not variable.is_data or not np.ndim(value):
            continue
        if (lengths := fed.get(lengths_name(name))) is not None:
            found.setdefault(len(lengths), f"'{name}' is fed {len(lengths)} sequences")
        elif (levels := fed.get(levels_name(name))) is not None:
            count = len(levels) - len(value)
            found.setdefault(count, f"'{name}' is fed {count} sources")
        elif variable.sizes and variable.sizes[0] == letter("b"):
            found.setdefault(len(value), f"'{name}' is fed {len(value)} rows")
    if len(found) > 1:
        raise FeedError(", and ".join(found.values()), hint="feed a row for each sequence")


def check_equal_lengths(program: Program, fed: Mapping[str, Any]) -> None:
    """Checks that sequences that an operator reads side by side have equal lengths."""
    for names in _PROGRAMS.get(program).equal:
        given = {name: _lengths_fed(name, fed) for name in names if name in fed}
        first = next(iter(given), None)
        for name, lengths in given.items():
            if first is not None and lengths != given[first]:
                raise FeedError(
                    f"'{first}' is fed sequences of lengths {given[first][:8]}, and '{name}' of "
                    f"{lengths[:8]}; an operator of the program takes them row by row",
                    hint="feed sequences of equal lengths, in the same order",
                )


def _lengths_fed(name: str, fed: Mapping[str, Any]) -> list[int]:
    levels = fed.get(levels_name(name))
    found: list[int] = (fed[lengths_name(name)] if levels is None else levels).tolist()
    return found


def lod_tensor_of(variable: Variable, sequences: Sequence[Any]) -> LoDTensor:
    """Returns sequences as a LoDTensor for a variable; FeedError if the row shapes differ."""
    rows, lengths = _rows_and_lengths(variable, list(sequences))
    return create_lod_tensor(rows, [lengths])


def sequences_of(variable: Variable, value: Any) -> list[np.ndarray]:
    """Returns the value fed to a variable as a list of sequences."""
    rows, lengths = _rows_and_lengths(variable, value)
    return np.split(rows, np.cumsum(lengths)[:-1]) if lengths else []


def _rows_and_lengths(variable: Variable, value: Any) -> tuple[np.ndarray, list[int]]:
    name, shape = variable.name, variable.shape[1:]
    if isinstance(value, LoDTensor) and value.lod():
        levels = value.recursive_sequence_lengths()
        if len(levels) > 1:
            what = f"'{name}' is fed {len(levels)} levels of sequences, and declared {variable}"
            raise FeedError(what, hint="one level is supported: lod_level=1")
        if (why := why_not_lengths(levels, len(np.asarray(value)))) is not None:
            raise RaggedError(f"'{name}' is fed sequences: {why}", hint="set them after the rows")
        return rows_of_shape(np.asarray(value), shape, name), levels[0]
    if not isinstance(value, list | tuple):
        what = f"'{name}' is sequences, and is fed {type(value).__name__} without their lengths"
        raise RaggedError(what, hint="feed a list of sequences, or fluid.create_lod_tensor(...)")
    parts = [np.asarray(sequence, variable.dtype) for sequence in value]
    whole = [rows_of_shape(part, shape, name) for part in parts]
    empty = np.zeros((0, *(max(size, 1) for size in shape)), variable.dtype)
    return np.concatenate(whole) if whole else empty, [len(part) for part in parts]


def _with_more_rows(rows: np.ndarray) -> np.ndarray:
    """Pads rows with copies of the last, to one of four counts up to the next power of two."""
    count = len(rows)
    more = _rounded(count) - count
    last = rows[-1:] if count else np.zeros((1, *rows.shape[1:]), rows.dtype)
    return np.concatenate([rows, np.repeat(last, more, axis=0)])


def _rounded(count: int) -> int:
    """Rounds up to one of a few numbers, so that few programs are compiled."""
    step = max(_LEAST, 1 << max(count.bit_length() - 3, 0))
    return max(-(-count // step) * step, _LEAST)


@dataclass(frozen=True)
class _Known:
    """Names of a program's sequences, cached for each version; they do not keep it alive."""

    ragged: Mapping[str, str]  # variables fed as sequences, by the letter of their number of rows
    exact: frozenset[str]  # names of those that must not be padded
    # groups of names that must have equal lengths, since an operator reads them side by side
    equal: tuple[tuple[str, ...], ...] = ()
    measures: bool = False  # some operator needs the length of the longest sequence
    # the limits on fed lengths, by name
    limits: Mapping[str, tuple[Limit, ...]] = field(default_factory=dict)
    has_nested: bool = False  # some variable is fed as sequences of two levels

    def check(self, name: str, lengths: Sequence[int]) -> None:
        """Raises FeedError if an operator does not accept the fed lengths of a variable."""
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
        check_nested(program)
        nested = bool(nested_data(program))
        return cls(names, exact, equal, any(map(measures, types)), limits, nested)


_PROGRAMS = VersionCache(_Known.of)  # so that unchanged programs are not inspected at every run


def _mixed(program: Program, ragged: Mapping[str, Variable]) -> Iterator[str]:
    """Yields the fed sequences whose rows some operator combines without reading the lengths."""
    for block in program.blocks:
        for op in block.ops:
            if slots_for_lengths(op.type):
                continue
            names = [block._var_recursive(name) for name in op.input_arg_names]
            read = [v for v in names if source_of(v, ragged) is not None]
            groups = _groups(block, op, ragged)
            if not read or (not groups and is_row_by_row(block, op, ragged)):
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
    """Returns the names with as many rows as an operator that groups rows outputs."""
    read, written = (
        {ragged[str(v.sizes[0])].name for v in map(block._var_recursive, names)
         if source_of(v, ragged) is not None and v.sizes}
        for names in (op.input_arg_names, [n for n in op.output_arg_names if n != EMPTY])
    )  # fmt: skip
    return written - read


def fetched_sequences(
    program: Program,
    names: Sequence[str],
    values: Sequence[Any],
    fed: Mapping[str, Any],
    *,
    return_numpy: bool,
) -> list[Any]:
    """Converts fetched sequences to LoDTensors without padding rows.

    Raises RaggedError if sequences are requested as numpy arrays, which have no lengths.
    """
    known, declared = _PROGRAMS.get(program), program.global_block().vars
    if not known.ragged and not known.has_nested:
        return list(values)
    nested = levels_among(program, names) if known.has_nested else {}
    found = []
    for name, value in zip(names, values, strict=True):
        source = source_of(declared[name], known.ragged) if name in declared else None
        if source is None and name not in nested:
            found.append(value)
            continue
        if return_numpy:
            what = f"'{name}' is sequences, whose lengths a numpy array does not tell"
            raise RaggedError(what, hint="fetch it with return_numpy=False")
        if source is None:
            found.append(as_nested(value, fed[nested[name]]))
            continue
        lengths = np.asarray(fed[lengths_name(source)]).tolist()
        found.append(create_lod_tensor(np.asarray(value)[: sum(lengths)], [lengths]))
    return found


def lengths_to_fetch(program: Program, names: Iterable[str]) -> tuple[str, ...]:
    """Returns the computed lengths of fetched variables, which are fetched with them."""
    known, declared = _PROGRAMS.get(program), program.global_block().vars
    wanted = [name for name in names if name in declared]
    sources = [source_of(declared[name], known.ragged) for name in wanted]
    made = [name for name in sources if name is not None and not declared[name].is_data]
    levels = levels_among(program, wanted).values() if known.has_nested else ()
    computed = [name for name in levels if name in declared and not declared[name].is_data]
    return tuple(dict.fromkeys([*map(lengths_name, made), *computed]))


def is_sequences(program: Program, name: str) -> bool:
    """Whether a variable's rows are those of sequences."""
    known, declared = _PROGRAMS.get(program), program.global_block().vars
    if name not in declared:
        return False
    has_one = source_of(declared[name], known.ragged) is not None
    return has_one or (known.has_nested and name in levels_among(program, [name]))


def check_fetched(program: Program, names: Sequence[str]) -> None:
    """Raises RaggedError if a fetched variable has sequences, which differ by device."""
    for name in names:
        if is_sequences(program, name):
            what = f"'{name}' is fetched, of whose sequences each device has some"
            raise RaggedError(what, hint="fetch what is made of them, or run on one device")
