"""Host part of a step's look-ups: deduplicates keys, fetches rows, pushes gradients."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxfleet.errors import FeedError, ProgramError
from jaxfleet.ir import Dim, Kind, Operator, Program
from jaxfleet.tables.access import RowReader, TableAccess
from jaxfleet.tables.spec import TableSpec

LOOKUP, SEND = "distributed_lookup_table", "send_rows"
_SUM = "lookup_rows_grad"
_FEWEST = 8  # rows; fewer are not worth another executable


@dataclass(frozen=True)
class LookUp:
    """One look-up on the host.

    Attributes:
        keys: the variables of the batch that hold keys.
        index: for each of them, the variable of the positions of its keys' rows.
        rows: the variable of the rows.
        letter: symbolic size of the number of rows.
        gradient: the variable of their gradient; none if the table is not trained.
        trained: for each of `keys`, whether it contributes to the gradient; the keys of a frozen
            look-up are not pushed, since momentum would move their rows.
    """

    table: str
    dim: int
    keys: tuple[str, ...]
    index: tuple[str, ...]
    rows: str
    letter: str
    gradient: str | None
    trained: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Joined:
    """The unique keys of a step, by table.

    `trained` are the positions of the trained keys among them; a table without an entry trains all.
    """

    keys: Mapping[str, np.ndarray]
    trained: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class HostTables:
    """Host work for a program's tables.

    Attributes:
        lookups: in the program's order.
        checked: keys that the device reads too, with their dtype there.
        counts: by table, the most rows that a step had. A program of several tables never lowers
            them, so the executables number the sum of the tables' powers of two, not the product.
    """

    lookups: tuple[LookUp, ...]
    checked: Mapping[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program) -> "HostTables":
        """Reads a program written by `sparse_table`."""
        ops = program.root.ops
        sends = {op.attrs["table"]: op for op in ops if is_table_send(op)}
        summed = {op.inputs[0] for op in ops if op.type == _SUM}
        lookups = tuple(_look_up(program, op, sends, summed) for op in ops if op.type == LOOKUP)
        keys = {name for each in lookups for name in each.keys}
        seen = {name for op in program.root.ops if op.type != LOOKUP for name in op.reads}
        dtypes = {name: program.lookup(name).dtype for name in sorted(keys & seen)}
        return cls(lookups, dtypes)

    def bring(
        self, access: TableAccess, values: Mapping[str, Any], frozen: RowReader | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, int], Joined]:
        """Looks up the rows of a batch, whose leaves are given by name.

        Args:
            access: creates rows for new keys.
            values: the leaves.
            frozen: reads the tables that the program does not train, of which no push would ever
                evict rows; by default `access` does.

        Returns:
            The rows and indices by their variables; a number for each letter; the keys.

        Raises:
            FeedError: keys are not integers, or overflow their dtype on the device.
        """
        for name, dtype in self.checked.items():
            _check_fits(name, np.asarray(values[name]), dtype)
        arrays: dict[str, np.ndarray] = {}
        sizes: dict[str, int] = {}
        joined: dict[str, np.ndarray] = {}
        trained: dict[str, np.ndarray] = {}
        for each in self.lookups:
            given = [keys_of(name, values[name]) for name in each.keys]
            joined[each.table], places = join(given)
            arrays.update(zip(each.index, places, strict=True))
            if not all(each.trained):
                some = [p.reshape(-1) for p, is_ in zip(places, each.trained, strict=True) if is_]
                trained[each.table] = np.unique(np.concatenate([np.empty(0, np.int32), *some]))
        kept = {x.table for x in self.lookups if x.gradient is None} if frozen is not None else ()
        found = access.look_up_all({name: x for name, x in joined.items() if name not in kept})
        if frozen is not None:
            found.update({name: frozen.peek(name, joined[name]) for name in kept})
        for each in self.lookups:
            count = sizes[each.letter] = self._row_count(each.table, len(joined[each.table]))
            arrays[each.rows] = padded(found[each.table], count)
        return arrays, sizes, Joined(joined, trained)

    def _row_count(self, table: str, keys: int) -> int:
        count = row_count(keys)
        if len(self.lookups) > 1:
            count = self.counts[table] = max(count, self.counts.get(table, 0))
        return count

    def hand_over(
        self, access: TableAccess, of: LookUp, joined: Joined, gradient: np.ndarray
    ) -> None:
        """Pushes float32[u, dim], the gradient of a look-up's rows, with the keys from `bring`."""
        keys, some = joined.keys[of.table], joined.trained.get(of.table)
        if some is None:
            access.push(of.table, keys, gradient[: len(keys)])
        else:
            access.push(of.table, keys[some], gradient[some])

    def hand_over_nothing(self, access: TableAccess) -> None:
        """Pushes nothing to tables without a gradient here, as servers wait for a push to each.

        Another trainer has all of their gradient, or they have none.
        """
        for each in self.lookups:
            if each.gradient is None:
                nothing = np.empty((0, each.dim), np.float32)
                access.push(each.table, np.empty(0, np.int64), nothing)


def looked_up(reader: RowReader, table: str, keys: np.ndarray) -> np.ndarray:
    """Returns float32[*keys.shape, dim], rows outside of a step, for example to evaluate.

    It creates no rows: serving would otherwise take memory for every key that it ever met.

    Raises:
        FeedError: `keys` are not valid keys.
    """
    unique, (places,) = join([keys_of(f"keys of table '{table}'", keys)])
    rows: np.ndarray = reader.peek(table, unique)[places]
    return rows


def is_table_send(op: Operator) -> bool:
    """Whether an operator pushes gradients of rows to a table."""
    return op.type == SEND and "table" in op.attrs


def specs_of(program: Program) -> tuple[TableSpec, ...]:
    """Returns the specs of the tables that a program uses, from its attribute."""
    texts = program.attrs.get("tables", ())
    if not isinstance(texts, tuple):
        raise ProgramError(f"attribute 'tables' of program '{program.name}' is not a list")
    return tuple(TableSpec.from_text(str(text)) for text in texts)


def on_device(program: Program, tables: HostTables) -> Program:
    """Returns the device part of a program, to which rows and indices are fed.

    For programs without servers, where the host does nothing else.
    """
    ops = [op for op in program.root.ops if op.type != LOOKUP and not is_table_send(op)]
    fed = [name for each in tables.lookups for name in (each.rows, *each.index)]
    read = {name for block in program.blocks for op in block.ops for name in op.reads
            if op.type != LOOKUP}  # fmt: skip
    hidden = {n for each in tables.lookups for n in each.keys if n not in read}
    variables = {n: v for n, v in program.variables.items() if n not in hidden}
    for name in fed:
        variables[name] = replace(program.lookup(name), kind=Kind.DATA)
    temporaries = {n: v for n, v in program.root.variables.items() if n not in fed}
    root = replace(program.root, ops=tuple(ops), variables=temporaries)
    made = replace(program, variables=variables).with_block(root)
    return replace(made, attrs=made.attrs.updated(**_sharded(program, tables, hidden)))


def join(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Joins int64 arrays: their sorted unique keys, and each array's int32 positions among them."""
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    unique, inverse = np.unique(flat, return_inverse=True)
    inverse = inverse.reshape(-1).astype(np.int32)
    ends = np.cumsum([array.size for array in arrays])[:-1]
    parts = np.split(inverse, ends)
    return unique, [part.reshape(a.shape) for part, a in zip(parts, arrays, strict=True)]


def row_count(keys: int) -> int:
    """Returns the number of rows that a step with this number of keys is compiled for."""
    return max(_FEWEST, 1 << max(keys - 1, 0).bit_length())


def padded(rows: np.ndarray, count: int) -> np.ndarray:
    """Pads rows with zeros, which no index refers to."""
    if len(rows) == count:
        return rows
    found = np.zeros((count, rows.shape[1]), np.float32)
    found[: len(rows)] = rows
    return found


def keys_of(name: str, value: Any) -> np.ndarray:
    """Returns a leaf of the batch as int64 keys; rejects non-integers, overflow and masks."""
    if np.ma.isMaskedArray(value):
        what = f"'{name}' is fed a masked array, and a table has a row for every key"
        raise FeedError(what, hint="array.filled(some key of its own) gives what is masked a row")
    array = np.asarray(value)
    if array.dtype == np.int64:
        return array
    if array.dtype.kind not in "iu":
        what = f"'{name}' is fed {array.dtype}, and keys of a table are integers"
        raise FeedError(what, hint="convert it to int64 before the step")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        what = f"'{name}' has a key of {array.max()}, which is not an int64"
        raise FeedError(what, hint="array.view(np.int64) keeps all keys apart")
    return array.astype(np.int64)


def _look_up(
    program: Program, op: Operator, sends: Mapping[Any, Operator], summed: AbstractSet[object]
) -> LookUp:
    (rows,) = (str(name) for name in op.outputs.slot("Outputs"))
    count, dim = program.lookup(rows).shape
    assert isinstance(count, Dim)
    assert isinstance(dim, int)
    table = str(op.attrs["table"])
    send, index = sends.get(table), tuple(map(str, op.outputs.slot("Index")))
    return LookUp(
        table,
        dim,
        tuple(map(str, op.inputs.slot("Ids"))),
        index,
        rows,
        str(count),
        send.reads[0] if send is not None and send.reads else None,
        tuple(name in summed or summed.isdisjoint(index) for name in index),
    )


def _sharded(program: Program, tables: HostTables, hidden: set[str]) -> dict[str, Any]:
    """Returns the sharding of inputs and outputs: an index is sharded as its keys are."""
    pairs = program.attrs.get("sharded")
    if pairs is None:
        return {}
    assert isinstance(pairs, tuple)
    axes = {str(pair[0]): pair[1] for pair in pairs if isinstance(pair, tuple)}
    more = [
        (index, axes[keys])
        for each in tables.lookups
        for keys, index in zip(each.keys, each.index, strict=True)
        if keys in axes
    ]
    kept = [pair for pair in pairs if isinstance(pair, tuple) and pair[0] not in hidden]
    return {"sharded": (*kept, *more)}


def _check_fits(name: str, array: np.ndarray, dtype: str) -> None:
    """Rejects keys that overflow their dtype on the device, where the step uses them too."""
    bits = int(dtype.lstrip("iu"))
    seen = np.iinfo(np.dtype(f"{'int' if dtype[0] == 'i' else 'uint'}{bits}"))
    if array.size and (array.min() < seen.min or array.max() > seen.max):
        wrong = array.min() if array.min() < seen.min else array.max()
        what = f"'{name}' has a key of {wrong}, and the step computes with its keys as {seen.dtype}"
        hint = "put into the batch as a leaf of its own what the step computes with"
        raise FeedError(what, hint=hint)
