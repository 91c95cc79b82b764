"""Analysis of slices of the batch: whether they are computed row by row and only summed."""

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxfleet.analysis.flow import OuterUses
from jaxfleet.analysis.sharding import arithmetic
from jaxfleet.analysis.sharding.plan import ShardingPlan
from jaxfleet.ir import Block, BlockRef, Literal, Operand, Operator, Program

_EVEN = frozenset({"jax.broadcast_in_dim"})  # creates identical rows
_ELEMENTWISE = (
    arithmetic.ADDITIVE | arithmetic.LINEAR | arithmetic.NONLINEAR | {"jax.mul", "jax.div"}
)


def is_rowwise(plan: ShardingPlan, block: Block, places: AbstractSet[int] | None = None) -> bool:
    """Whether a block's result for each row is independent of the row's position.

    Examines all operators, or those at the given places.
    """
    makers = {name: op for op in block.ops for name in op.writes}
    planned = zip(block.ops, plan.blocks[block.index].ops, strict=True)
    for place, (op, found) in enumerate(planned):
        if places is not None and place not in places:
            continue
        if found.completed or found.placing.note:
            return False
        lie = list(zip(op.inputs, found.labels, found.placing.inputs, strict=True))
        for operand, label, wanted in lie:
            cut = wanted.is_sharded and not label.is_sharded
            if label.is_sharded and label != wanted:
                return False
            if cut and not _is_even(operand, wanted.axis, makers):
                return False
        makes_rows = any(label.is_sharded for label in found.outputs)
        if makes_rows and not any(x.is_sharded for _, x, _ in lie) and op.type not in _EVEN:
            return False
    return True


def _is_even(operand: Operand, axis: int, makers: Mapping[str, Operator]) -> bool:
    if isinstance(operand, Literal):
        return True
    op = makers.get(operand)
    if op is None or op.type not in _EVEN | _ELEMENTWISE:
        return False
    if op.type in _EVEN:
        places = op.attrs["broadcast_dimensions"]
        assert isinstance(places, tuple)
        return axis not in places
    return all(_is_even(value, axis, makers) for value in op.inputs)


_ADDITIONS = frozenset({"jax.add", "jax.add_any"})
_KEEPING_ZERO = frozenset({"jax.broadcast_in_dim", "jax.convert_element_type"})


@dataclass(frozen=True)
class BatchSlices:
    """Slices of `rows` rows each that tile the batch; `at` maps cutting operators to slices."""

    rows: int
    count: int
    at: Mapping[int, int]


def unrolled_slices(program: Program) -> BatchSlices | None:
    """Returns the slices that block 0 cuts the batch into, or None if there are none."""
    batch, found = program.attrs.get("batch"), dict[int, tuple[int, int]]()
    if not isinstance(batch, int):
        return None
    for place, op in enumerate(program.root.ops):
        if op.type == "jax.slice" and (cut := _rows_of(program, op)) is not None:
            found[place] = cut
    sizes = {rows for _, rows in found.values()}
    if len(sizes) != 1:
        return None
    (rows,) = sizes
    starts = {start for start, _ in found.values()}
    if batch % rows or starts != set(range(0, batch, rows)):
        return None
    return BatchSlices(rows, batch // rows, {at: start // rows for at, (start, _) in found.items()})


def may_slice_batch(program: Program) -> bool:
    """Whether block 0 cuts rows out of the whole batch more than once; its size may be a letter."""
    cuts = (op for op in program.root.ops if op.type == "jax.slice")
    return sum(_cuts_rows(program, op) for op in cuts) > 1


def _cuts_rows(program: Program, op: Operator) -> bool:
    whole = program.lookup(op.reads[0], program.root).shape
    part = program.lookup(op.writes[0], program.root).shape
    is_batch = bool(whole) and whole[0] == program.attrs.get("batch")
    return is_batch and part[1:] == whole[1:] and part[0] != whole[0]


def _rows_of(program: Program, op: Operator) -> tuple[int, int] | None:
    """Returns the first row and the number of rows that an operator cuts out of the whole batch."""
    starts, limits = op.attrs["start_indices"], op.attrs["limit_indices"]
    assert isinstance(starts, tuple)
    assert isinstance(limits, tuple)
    strides = op.attrs.get("strides")
    if not _cuts_rows(program, op) or (isinstance(strides, tuple) and set(strides) != {1}):
        return None
    first, last = starts[0], limits[0]
    return (first, last - first) if isinstance(first, int) and isinstance(last, int) else None


class _Value(NamedTuple):
    """Analysis result for a value."""

    form: int  # a value number, equal for the same computation on different slices
    slices: frozenset[int] = frozenset()  # the slices that it depends on
    # for a sum over several slices, the form, slice and name of each summand
    terms: tuple[tuple[int, int, str], ...] = ()


@dataclass
class SliceSums:
    """Determines whether slices meet only in sums over all, with equal computations per slice.

    Collects the values of single slices (`parts`), and those of them that are summed (`terms`).
    """

    program: Program
    cuts: BatchSlices
    parts: set[str] = field(default_factory=set)
    terms: set[str] = field(default_factory=set)
    _forms: dict[object, int] = field(default_factory=dict)
    _zeros: set[str] = field(default_factory=set)
    _uses: OuterUses = field(init=False)

    def __post_init__(self) -> None:
        self._uses = OuterUses(self.program)

    def holds(self) -> bool:
        env: dict[str, _Value] = {}
        for place, op in enumerate(self.program.root.ops):
            if not self._step(place, op, env):
                return False
        return bool(self.terms) and not any(
            value.slices for name, value in env.items() if name in self.program.variables
        )

    def _step(self, place: int, op: Operator, env: dict[str, _Value]) -> bool:
        """Processes an operator; returns False if its result depends on the slice index."""
        values = [self._value(x, env) for x in op.inputs]
        if place in self.cuts.at:
            if values[0].slices:
                return False
            form = self._form("slice", values[0].form)
            self.parts.add(op.writes[0])
            env[op.writes[0]] = _Value(form, frozenset({self.cuts.at[place]}))
            return True
        slices = frozenset[int]().union(*(value.slices for value in values))
        summed_up = any(value.terms for value in values)
        if not slices:
            self._note_zero(op, env)
        if op.type in _ADDITIONS and slices:
            kept = [n for n, x in enumerate(op.inputs) if not self._is_zero(x)]
            if len(kept) == 1:  # 0 + the first summand
                env[op.writes[0]] = values[kept[0]]
                self.parts |= set() if summed_up else set(op.writes)
                return True
            if len(slices) > 1 or summed_up:
                return self._add(op, values, env)
        beside = self._uses.of(op).reads - set(op.reads)  # reads of sub-blocks only
        is_mixed = any(env[name].slices for name in beside if name in env)
        if len(slices) > 1 or summed_up or is_mixed or (slices and not op.writes):
            return False
        form = self._form(*_kind(op), *(v.form for v in values), *self._inner(op, env, 0))
        for number, name in enumerate(op.writes):
            env[name] = _Value(self._form(form, number), slices)
            if slices:
                self.parts.add(name)
        return True

    def _add(self, op: Operator, values: list[_Value], env: dict[str, _Value]) -> bool:
        """Adds summands of several slices; a sum over all no longer depends on a slice."""
        terms: list[tuple[int, int, str]] = []
        for operand, value in zip(op.inputs, values, strict=True):
            if self._is_zero(operand):
                continue
            if not value.slices or not isinstance(operand, str):
                return False  # a non-slice value is added in between
            (first, *_) = value.slices
            terms += value.terms or [(value.form, first, operand)]
        alike, found = {form for form, _, _ in terms}, Counter(at for _, at, _ in terms)
        if len(alike) > 1 or max(found.values()) > 1:
            return False
        slices = frozenset(found)
        form = self._form("sum", *sorted(alike), *sorted(slices))
        if len(slices) == self.cuts.count:
            self.terms |= {name for _, _, name in terms}
            env[op.writes[0]] = _Value(form)
        else:
            env[op.writes[0]] = _Value(form, slices, tuple(terms))
        return True

    def _value(self, operand: Operand, env: Mapping[str, _Value]) -> _Value:
        if isinstance(operand, Literal):
            return _Value(self._form("literal", operand))
        return env[operand] if operand in env else _Value(self._form("name", operand))

    def _form(self, *parts: object) -> int:
        """Returns the value number for these parts, the same for equal parts."""
        return self._forms.setdefault(parts, len(self._forms))

    def _inner(self, op: Operator, env: Mapping[str, _Value], depth: int) -> Iterator[int]:
        """Yields the forms of an operator's sub-blocks, regardless of names."""
        for index in op.blocks:
            yield self._block(self.program.blocks[index], env, depth)

    def _block(self, block: Block, env: Mapping[str, _Value], depth: int) -> int:
        inner = dict(env)
        for number, name in enumerate(block.args):
            kind = self.program.lookup(name, block).type
            inner[name] = _Value(self._form("argument", depth, number, kind))
        forms = []
        for op in block.ops:
            read = [self._value(x, inner).form for x in op.inputs]
            form = self._form(*_kind(op), *read, *self._inner(op, inner, depth + 1))
            forms.append(form)
            inner.update({n: _Value(self._form(form, at)) for at, n in enumerate(op.writes)})
        return self._form(*forms, *(self._value(x, inner).form for x in block.results))

    def _note_zero(self, op: Operator, env: Mapping[str, _Value]) -> None:
        keeps = op.type in _KEEPING_ZERO and all(map(self._is_zero, op.inputs))
        for name in op.writes:
            if keeps and name not in env:
                self._zeros.add(name)
            else:
                self._zeros.discard(name)

    def _is_zero(self, operand: Operand) -> bool:
        if isinstance(operand, Literal):
            return operand.text in {"0", "0.0"}
        return operand in self._zeros


def _kind(op: Operator) -> tuple[object, ...]:
    """Returns an operator's type and attributes without the indices of its sub-blocks."""
    attrs = ((name, value) for name, value in op.attrs.items() if not _has_blocks(value))
    return op.type, tuple(attrs), len(op.writes)


def _has_blocks(attr: object) -> bool:
    if isinstance(attr, tuple):
        return any(map(_has_blocks, attr))
    return isinstance(attr, BlockRef)
