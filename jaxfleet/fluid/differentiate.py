"""The walk from targets back: for every operator on the way, its gradient operator.

Follows fluid: gradients are named `x@GRAD`, or `x@GRAD_0` where an earlier walk took that name;
where several operators give parts of one, each part has a name of its own (`@RENAME@`), and a
`sum` adds them before the first operator that reads the whole, or at the end.

A variable that is written several times has a gradient for each of its values, the first of which
is named as usual. What an operator has read and another overwrote is copied for its gradient.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from jaxfleet.fluid import unique_name
from jaxfleet.fluid.block import Block
from jaxfleet.fluid.block_copies import block_attributes
from jaxfleet.fluid.dtypes import VarType
from jaxfleet.fluid.operator import ROLE, Operator
from jaxfleet.fluid.roles import OpRole
from jaxfleet.fluid.variable import Parameter, Variable
from jaxfleet.fluid.written_values import WrittenValues
from jaxfleet.ir import grad_name
from jaxfleet.ops.fluid import EMPTY, GRAD, Gradient, Slot, schema_of

Callback: TypeAlias = Callable[[Block, Mapping[str, str]], None]


@dataclass
class Walk:
    """One walk back.

    Attributes:
        block: whose operators are differentiated.
        ops: those that it goes through, the last first.
        ended: names at which gradients end.
        callbacks: called after each operator that is added, with the block and the names of
            variables by those of their gradients.
        parts: names of what was given to a gradient so far, by variable.
        expected: how many operators give parts of a variable's gradient.
        names: names of gradients, by those that they would have in a first walk.
        of: names of variables, by those of their gradients.
        values: which value of a variable each operator reads and writes.

    A variable stands for its first value that has a gradient; a later one is `x@VALUE2`.
    """

    block: Block
    ops: Sequence[Operator]
    ended: frozenset[str]
    callbacks: Sequence[Callback] = ()
    parts: dict[str, list[str]] = field(default_factory=dict)
    expected: Counter[str] = field(default_factory=Counter)
    names: dict[str, str] = field(default_factory=dict)
    of: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values = WrittenValues(self.block.ops)
        self._first: dict[str, int] = {}  # the first value with a gradient, by variable
        self._copies: dict[tuple[str, int], str] = {}

    def run(self, targets: Sequence[Variable], begin: Callable[[Variable, str], str]) -> None:
        """Adds all gradient operators.

        Args:
            targets: where the walk begins.
            begin: makes the gradient of a target: takes it and a name that is free, and returns
                the name of the gradient.
        """
        for target in targets:
            self._first[target.name] = self.values.last(target.name)
        for op in self.ops:  # the last first, so that the first value stays
            for _, _, name in _given_back(op, self.ended):
                value = self.values.before(op, name)
                self._first[name] = min(value, self._first.get(name, value))
        for op in self.ops:
            read = (name for _, _, name in _given_back(op, self.ended))
            self.expected.update(self._key(name, self.values.before(op, name)) for name in read)
        self.expected.update(self._key(t.name, self.values.last(t.name)) for t in targets)
        for target in targets:
            self._begin(target, begin)
        for op in self.ops:
            self._differentiate(op)
        for key in self.parts:
            self._add_up(key.partition("@VALUE")[0], key)

    def gradient_of(self, name: str) -> Variable | None:
        """Returns the gradient of a variable; None where nothing on the way depends on it."""
        made = self.names.get(grad_name(name))
        return None if made is None else self.block._var_recursive(made)

    def _begin(self, target: Variable, begin: Callable[[Variable, str], str]) -> None:
        key = self._key(target.name, self.values.last(target.name))
        planned = self._next_part(key)
        made = begin(target, self._free(planned))
        self.names[planned] = self.parts[key][-1] = made

    def _key(self, name: str, value: int) -> str:
        """Returns what stands for one of a variable's values."""
        return name if value == self._first.get(name, value) else f"{name}@VALUE{value}"

    def _differentiate(self, op: Operator) -> None:
        gradient, schema = gradient_of(op), schema_of(op.type)
        assert gradient is not None
        assert schema is not None
        if gradient.by is not None:
            self._differentiate_by(op, gradient.type, gradient.by(op.attrs))
            return
        inputs = {slot: self._read(op, slot) for slot in gradient.reads_with(op.attrs)}
        for slot in schema.outputs:
            inputs[grad_name(slot.name)] = self._of_outputs(op, slot)
        written: dict[str, list[str]] = {}
        for place, at, name in _given_back(op, self.ended):
            names = written.setdefault(grad_name(place), [EMPTY] * len(op.input(place)))
            names[at] = self._part(op, name, is_sparse=bool(op.attr("is_sparse")))
        attrs = {k: v for k, v in op.attrs.items() if k in schema.attrs}
        if "sub_block" in attrs:
            attrs |= block_attributes(op, self.ended)
        self._add(gradient.type, inputs, written, attrs).source = op.source

    def _differentiate_by(self, op: Operator, op_type: str, attrs: Mapping[str, object]) -> None:
        """Adds an operator that is no gradient operator, for each input that has a gradient."""
        schema = schema_of(op.type)
        assert schema is not None
        (slot,) = schema.outputs
        grads = self._of_outputs(op, slot)
        for _, _, name in _given_back(op, self.ended):
            part = self._part(op, name, is_sparse=False)
            self._add(op_type, {"X": grads}, {"Out": [part]}, attrs).source = op.source

    def _of_outputs(self, op: Operator, slot: Slot) -> list[str]:
        """Returns the gradients of what an operator wrote, each in one piece."""
        names = [self._wanted(op, slot.name, at) for at in range(len(op.output(slot.name)))]
        keys = [self._key(name, self.values.after(op, name)) for name in names]
        for name, key in zip(names, keys, strict=True):
            self._add_up(name, key)
        known = [self.names[grad_name(key)] for key in keys if grad_name(key) in self.names]
        if known and len(known) < len(names):
            found = zip(names, keys, strict=True)
            return [self.names.get(grad_name(key)) or self._zeros(n, key) for n, key in found]
        return known

    def _read(self, op: Operator, slot: str) -> list[str]:
        """Returns what a gradient operator reads of an operator's slot, as it was."""
        if op.input(slot):
            return [self._kept(op, name, self.values.before(op, name)) for name in op.input(slot)]
        return [self._kept(op, name, self.values.after(op, name)) for name in op.output(slot)]

    def _kept(self, op: Operator, name: str, value: int) -> str:
        """Returns a variable that holds a value at the end: a copy where it is overwritten."""
        if name == EMPTY or value >= self.values.last(name):
            return name
        like = self.block._var_recursive(name)
        if like.persistable and like.stop_gradient and name in op.output_arg_names:
            return name  # statistics, which an operator that normalizes by them leaves alone
        if (name, value) not in self._copies:
            copy = self.block.create_var(
                name=unique_name.generate(f"{name}@KEPT"), dtype=like.dtype, stop_gradient=True
            )
            copy.type, copy.sizes, copy.lod_level = like.type, like.sizes, like.lod_level
            place = op.idx + (value > self.values.before(op, name))
            attrs = {ROLE: op.attrs[ROLE] & ~OpRole.LOSS}
            self.block._insert_op_without_sync(
                place, "assign", inputs={"X": [name]}, outputs={"Out": [copy.name]}, attrs=attrs
            )
            self._copies[name, value] = copy.name
        return self._copies[name, value]

    def _wanted(self, op: Operator, slot: str, at: int) -> str:
        """Returns an output, or where it was not wanted a variable of its shape."""
        name = op.output(slot)[at]
        return name if name != EMPTY else op.input(slot.removesuffix(GRAD))[at]

    def _zeros(self, name: str, key: str) -> str:
        """Makes the gradient of what nothing depends on, beside others of its slot."""
        zeros = self._declare(name, grad_name(key))
        self._add("fill_zeros_like", {"X": [name]}, {"Out": [zeros]}, {})
        return zeros

    def _part(self, op: Operator, name: str, *, is_sparse: bool) -> str:
        """Declares the next part of a gradient, of what an operator read; returns its name."""
        key = self._key(name, self.values.before(op, name))
        made = self._declare(name, self._next_part(key))
        self.parts[key][-1] = made
        if is_sparse:
            self.block.var(made).type = VarType.SELECTED_ROWS
        return made

    def _next_part(self, name: str) -> str:
        """Returns what the next part of a gradient is called in a first walk."""
        parts = self.parts.setdefault(name, [])
        several = self.expected[name] > 1
        parts.append(f"{grad_name(name)}@RENAME@block{self.block.idx}@{len(parts)}")
        return parts[-1] if several else grad_name(name)

    def _add_up(self, name: str, key: str) -> None:
        """Adds the parts of a gradient, where there are several and that is not done."""
        parts = self.parts.get(key, [])
        if len(parts) < 2 or grad_name(key) in self.names:
            return
        whole = self._declare(name, grad_name(key))
        self.block.var(whole).type = self.block._var_recursive(parts[0]).type
        self._add("sum", {"X": parts}, {"Out": [whole]}, {})

    def _add(
        self,
        op_type: str,
        inputs: Mapping[str, list[str]],
        outputs: Mapping[str, list[str]],
        attrs: Mapping[str, object],
    ) -> Operator:
        made = self.block.append_op(op_type, inputs, outputs, attrs)
        for callback in self.callbacks:
            callback(self.block, self.of)
        return made

    def _declare(self, name: str, planned: str) -> str:
        """Declares the gradient of a variable, or a part of it."""
        like, free = self.block._var_recursive(name), self._free(planned)
        made = self.block.create_var(name=free, dtype=like.dtype)
        made.sizes = like.sizes
        self.names[planned] = free
        if planned == grad_name(name):
            self.of[free] = name
        return free

    def _free(self, planned: str) -> str:
        return unique_name.generate(planned) if self.block.has_var(planned) else planned


def ops_between(
    ops: Sequence[Operator],
    targets: Sequence[Variable],
    inputs: Sequence[Variable],
    ended: frozenset[str],
) -> list[Operator]:
    """Returns the operators that gradients go through, the last first.

    Args:
        ops: those of a block, in order.
        targets: where the way begins.
        inputs: what every operator on the way depends on; empty for anything.
        ended: names at which gradients end.
    """
    values = WrittenValues(ops)
    reached, chosen = {(x.name, values.last(x.name)) for x in targets}, []
    dependent = _dependent(ops, inputs, ended) if inputs else None
    for op in reversed(ops):
        if reached.isdisjoint((name, values.after(op, name)) for name in op.output_arg_names):
            continue
        if dependent is not None and dependent.isdisjoint(op.input_arg_names):
            continue
        names = {name for _, _, name in _given_back(op, ended)}
        if names:
            reached.update((name, values.before(op, name)) for name in names)
            chosen.append(op)
    return chosen


def _dependent(
    ops: Sequence[Operator], inputs: Sequence[Variable], ended: frozenset[str]
) -> set[str]:
    """Returns the names of what depends on some variables, these included."""
    found = {x.name for x in inputs}
    for op in ops:
        if not found.isdisjoint(op.input_arg_names):
            found.update(name for name in op.output_arg_names if name not in ended)
    return found


def gradient_of(op: Operator) -> Gradient | None:
    """Returns how an operator is differentiated; None where it is not."""
    schema = schema_of(op.type)
    found = None if schema is None else schema.gradient
    if found is not None and found.unless is not None:
        name, value = found.unless
        return None if op.attr(name) == value else found
    return found


def _given_back(op: Operator, ended: frozenset[str]) -> Iterator[tuple[str, int, str]]:
    """Yields the inputs that get gradients: slot, place in it, name."""
    gradient = gradient_of(op)
    for slot in () if gradient is None else gradient.writes:
        for at, name in enumerate(op.input(slot)):
            if name not in ended and not _ends_at(op.block._var_recursive(name)):
                yield slot, at, name


def _ends_at(variable: Variable) -> bool:
    is_number = variable.dtype.startswith(("float", "bfloat"))
    frozen = isinstance(variable, Parameter) and not variable.trainable
    return variable.stop_gradient or frozen or not is_number
