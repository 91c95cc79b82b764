"""The walk from targets back to inputs that adds a gradient operator for each operator.

Names follow fluid: a gradient is `x@GRAD`, or `x@GRAD_0` if an earlier walk took that name. Where
several operators contribute to one gradient, each contribution has its own name (`@RENAME@`), and a
`sum` adds them before the first operator that reads the whole, or at the end.

Loops, branches and `increment` write variables in place. Backward distinguishes the values: the
gradient of a variable's value before a loop differs from that of its value afterwards. A variable
that is written several times has a gradient for each value, the first of which has the usual name.
A value that an operator has read and a later one overwrites is copied for the gradient operator.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from jaxfleet.fluid import unique_name
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.operator import ROLE, Operator, OpRole
from jaxfleet.fluid.framework.sub_blocks import block_attributes
from jaxfleet.fluid.framework.types import VarType
from jaxfleet.fluid.framework.variable import Parameter, Variable
from jaxfleet.ir import grad_name
from jaxfleet.ops.fluid import EMPTY, GRAD, Gradient, Slot, schema_of


class WrittenValues:
    """Numbers the values of a block's variables: 0 initially, 1 after the first writer, ..."""

    def __init__(self, ops: Sequence[Operator]) -> None:
        self._before: dict[int, dict[str, int]] = {}
        count: Counter[str] = Counter()
        for op in ops:
            names = {*op.input_arg_names, *op.output_arg_names}
            self._before[id(op)] = {name: count[name] for name in names if count[name]}
            count.update({*op.output_arg_names})
        self._last = count

    def before(self, op: Operator, name: str) -> int:
        """Returns the number of the value that an operator reads."""
        return self._before[id(op)].get(name, 0)

    def after(self, op: Operator, name: str) -> int:
        """Returns the number of the value that an operator writes."""
        return self.before(op, name) + 1

    def last(self, name: str) -> int:
        """Returns the number of a variable's final value."""
        return self._last[name]


Callback: TypeAlias = Callable[[Block, Mapping[str, str]], None]


@dataclass
class Walk:
    """One walk back.

    A variable stands for its first value that has a gradient; a later one is `x@VALUE2`.

    Attributes:
        block: the block whose operators are differentiated.
        ops: the operators to differentiate, the last first.
        ended: names at which gradients end.
        callbacks: called after each added operator, with the block and a map from the names of
            gradients to those of their variables.
        parts: names of the contributions to each variable's gradient so far.
        expected: the number of operators that contribute to each variable's gradient.
        names: actual names of gradients, by the names that a first walk would use.
        of: names of variables, by the names of their gradients.
        values: the value of each variable that each operator reads and writes.
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
            begin: creates a target's gradient from the target and a free name; returns the name
                of the gradient.
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
        """Returns the gradient of a variable; None if no target depends on it."""
        made = self.names.get(grad_name(name))
        return None if made is None else self.block._var_recursive(made)

    def _begin(self, target: Variable, begin: Callable[[Variable, str], str]) -> None:
        key = self._key(target.name, self.values.last(target.name))
        planned = self._next_part(key)
        made = begin(target, self._free(planned))
        self.names[planned] = self.parts[key][-1] = made

    def _key(self, name: str, value: int) -> str:
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
        """Adds an operator that is not a gradient operator, for each input with a gradient."""
        schema = schema_of(op.type)
        assert schema is not None
        (slot,) = schema.outputs
        grads = self._of_outputs(op, slot)
        for _, _, name in _given_back(op, self.ended):
            part = self._part(op, name, is_sparse=False)
            self._add(op_type, {"X": grads}, {"Out": [part]}, attrs).source = op.source

    def _of_outputs(self, op: Operator, slot: Slot) -> list[str]:
        """Returns the complete gradients of an operator's outputs."""
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
        """Returns a slot of an operator as the operator read it, for its gradient operator."""
        if op.input(slot):
            return [self._kept(op, name, self.values.before(op, name)) for name in op.input(slot)]
        return [self._kept(op, name, self.values.after(op, name)) for name in op.output(slot)]

    def _kept(self, op: Operator, name: str, value: int) -> str:
        """Returns a variable that still holds a value at the end, a copy if it is overwritten."""
        if name == EMPTY or value >= self.values.last(name):
            return name
        like = self.block._var_recursive(name)
        if like.persistable and like.stop_gradient and name in op.output_arg_names:
            return name  # running statistics, which a normalizing operator does not change
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
        """Returns an output, or a new variable of its shape if it was not requested."""
        name = op.output(slot)[at]
        return name if name != EMPTY else op.input(slot.removesuffix(GRAD))[at]

    def _zeros(self, name: str, key: str) -> str:
        """Declares a zero gradient for a slot's variable on which no target depends."""
        zeros = self._declare(name, grad_name(key))
        self._add("fill_zeros_like", {"X": [name]}, {"Out": [zeros]}, {})
        return zeros

    def _part(self, op: Operator, name: str, *, is_sparse: bool) -> str:
        """Declares the next contribution to an input's gradient and returns its name."""
        key = self._key(name, self.values.before(op, name))
        made = self._declare(name, self._next_part(key))
        self.parts[key][-1] = made
        if is_sparse:
            self.block.var(made).type = VarType.SELECTED_ROWS
        return made

    def _next_part(self, name: str) -> str:
        """Returns the name of the next contribution in a first walk."""
        parts = self.parts.setdefault(name, [])
        several = self.expected[name] > 1
        parts.append(f"{grad_name(name)}@RENAME@block{self.block.idx}@{len(parts)}")
        return parts[-1] if several else grad_name(name)

    def _add_up(self, name: str, key: str) -> None:
        """Sums the contributions to a gradient if there are several and no sum exists yet."""
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
    """Returns the operators through which gradients flow, the last first.

    Each depends on some of `inputs`, if there are any; gradients end at the names in `ended`.
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
    """Returns the names of the variables that depend on `inputs`, including these."""
    found = {x.name for x in inputs}
    for op in ops:
        if not found.isdisjoint(op.input_arg_names):
            found.update(name for name in op.output_arg_names if name not in ended)
    return found


def gradient_of(op: Operator) -> Gradient | None:
    """Returns the gradient rule of an operator; None if it is not differentiable."""
    schema = schema_of(op.type)
    found = None if schema is None else schema.gradient
    if found is not None and found.unless is not None:
        name, value = found.unless
        return None if op.attr(name) == value else found
    return found


def _given_back(op: Operator, ended: frozenset[str]) -> Iterator[tuple[str, int, str]]:
    """Yields the inputs that get gradients, as slot, position in it, and name."""
    gradient = gradient_of(op)
    for slot in () if gradient is None else gradient.writes:
        for at, name in enumerate(op.input(slot)):
            if name not in ended and not _ends_at(op.block._var_recursive(name)):
                yield slot, at, name


def _ends_at(variable: Variable) -> bool:
    is_number = variable.dtype.startswith(("float", "bfloat"))
    frozen = isinstance(variable, Parameter) and not variable.trainable
    return variable.stop_gradient or frozen or not is_number
