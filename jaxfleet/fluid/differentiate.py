"""The walk from targets back: for every operator on the way, its gradient operator.

Follows fluid: gradients are named `x@GRAD`, or `x@GRAD_0` where an earlier walk took that name;
where several operators give parts of one, each part has a name of its own (`@RENAME@`), and a
`sum` adds them before the first operator that reads the whole, or at the end.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from jaxfleet.fluid import unique_name
from jaxfleet.fluid.block import Block
from jaxfleet.fluid.dtypes import VarType
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.variable import Parameter, Variable
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
    """

    block: Block
    ops: Sequence[Operator]
    ended: frozenset[str]
    callbacks: Sequence[Callback] = ()
    parts: dict[str, list[str]] = field(default_factory=dict)
    expected: Counter[str] = field(default_factory=Counter)
    names: dict[str, str] = field(default_factory=dict)
    of: dict[str, str] = field(default_factory=dict)

    def run(self, targets: Sequence[Variable], begin: Callable[[Variable, str], str]) -> None:
        """Adds all gradient operators.

        Args:
            targets: where the walk begins.
            begin: makes the gradient of a target: takes it and a name that is free, and returns
                the name of the gradient.
        """
        for op in self.ops:
            self.expected.update(name for _, _, name in _given_back(op, self.ended))
        self.expected.update(target.name for target in targets)
        for target in targets:
            self._begin(target, begin)
        for op in self.ops:
            self._differentiate(op)
        for name in self.parts:
            self._add_up(name)

    def gradient_of(self, name: str) -> Variable | None:
        """Returns the gradient of a variable; None where nothing on the way depends on it."""
        made = self.names.get(grad_name(name))
        return None if made is None else self.block._var_recursive(made)

    def _begin(self, target: Variable, begin: Callable[[Variable, str], str]) -> None:
        planned = self._next_part(target.name)
        made = begin(target, self._free(planned))
        self.names[planned] = self.parts[target.name][-1] = made

    def _differentiate(self, op: Operator) -> None:
        gradient, schema = gradient_of(op), schema_of(op.type)
        assert gradient is not None
        assert schema is not None
        if gradient.by is not None:
            self._differentiate_by(op, gradient.type, gradient.by(op.attrs))
            return
        inputs = {slot: op.input(slot) or op.output(slot) for slot in gradient.reads_with(op.attrs)}
        for slot in schema.outputs:
            inputs[grad_name(slot.name)] = self._of_outputs(op, slot)
        written: dict[str, list[str]] = {}
        for place, at, name in _given_back(op, self.ended):
            names = written.setdefault(grad_name(place), [EMPTY] * len(op.input(place)))
            names[at] = self._part(name, is_sparse=bool(op.attr("is_sparse")))
        attrs = {k: v for k, v in op.attrs.items() if k in schema.attrs}
        self._add(gradient.type, inputs, written, attrs).source = op.source

    def _differentiate_by(self, op: Operator, op_type: str, attrs: Mapping[str, object]) -> None:
        """Adds an operator that is no gradient operator, for each input that has a gradient."""
        schema = schema_of(op.type)
        assert schema is not None
        (slot,) = schema.outputs
        grads = self._of_outputs(op, slot)
        for _, _, name in _given_back(op, self.ended):
            part = self._part(name, is_sparse=False)
            self._add(op_type, {"X": grads}, {"Out": [part]}, attrs).source = op.source

    def _of_outputs(self, op: Operator, slot: Slot) -> list[str]:
        """Returns the gradients of what an operator wrote, each in one piece."""
        names = [self._wanted(op, slot.name, at) for at in range(len(op.output(slot.name)))]
        for name in names:
            self._add_up(name)
        known = [self.names[grad_name(n)] for n in names if grad_name(n) in self.names]
        if known and len(known) < len(names):
            return [self.names.get(grad_name(name)) or self._zeros(name) for name in names]
        return known

    def _wanted(self, op: Operator, slot: str, at: int) -> str:
        """Returns an output, or where it was not wanted a variable of its shape."""
        name = op.output(slot)[at]
        return name if name != EMPTY else op.input(slot.removesuffix(GRAD))[at]

    def _zeros(self, name: str) -> str:
        """Makes the gradient of what nothing depends on, beside others of its slot."""
        zeros = self._declare(name, grad_name(name))
        self._add("fill_zeros_like", {"X": [name]}, {"Out": [zeros]}, {})
        return zeros

    def _part(self, name: str, *, is_sparse: bool) -> str:
        """Declares the next part of a gradient, and returns its name."""
        made = self._declare(name, self._next_part(name))
        self.parts[name][-1] = made
        if is_sparse:
            self.block.var(made).type = VarType.SELECTED_ROWS
        return made

    def _next_part(self, name: str) -> str:
        """Returns what the next part of a gradient is called in a first walk."""
        parts = self.parts.setdefault(name, [])
        several = self.expected[name] > 1
        parts.append(f"{grad_name(name)}@RENAME@block{self.block.idx}@{len(parts)}")
        return parts[-1] if several else grad_name(name)

    def _add_up(self, name: str) -> None:
        """Adds the parts of a gradient, where there are several and that is not done."""
        parts = self.parts.get(name, [])
        if len(parts) < 2 or grad_name(name) in self.names:
            return
        whole = self._declare(name, grad_name(name))
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
    reached, chosen = {x.name for x in targets}, []
    dependent = _dependent(ops, inputs, ended) if inputs else None
    for op in reversed(ops):
        if reached.isdisjoint(op.output_arg_names):
            continue
        if dependent is not None and dependent.isdisjoint(op.input_arg_names):
            continue
        names = {name for _, _, name in _given_back(op, ended)}
        if names:
            reached |= names
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
    return None if schema is None else schema.gradient


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
